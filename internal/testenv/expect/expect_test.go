package expect

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestPause(t *testing.T) {
	for waited, want := range map[time.Duration]time.Duration{
		0: 20 * time.Millisecond, 100 * time.Millisecond: 20 * time.Millisecond, 500 * time.Millisecond: 100 * time.Millisecond, time.Minute: 200 * time.Millisecond,
	} {
		if got := pause(waited); got != want {
			t.Errorf("after %s: got %s, want %s", waited, got, want)
		}
	}
}

// failing keeps the message of a failure, and ends the goroutine of the test.
type failing struct {
	testing.TB
	message string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.message = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// Work that repeats is no idleness, also when its interval is longer than the rest that Idle waits for. The time is virtual: on a busy box,
// Idle looks too seldom to see the rest between two pieces of work.
func TestIdle(t *testing.T) { synctest.Test(t, testIdle) }

func testIdle(t *testing.T) {
	const d = 100 * time.Millisecond
	begin := time.Now()
	every := func(interval time.Duration) func() string {
		return func() string { return fmt.Sprint(int(time.Since(begin) / interval)) }
	}
	for name, tc := range map[string]struct {
		read func() string
		want string
	}{
		"no work":       {func() string { return "nothing" }, ""},
		"some work":     {func() string { return fmt.Sprint(min(time.Since(begin), 3*d/2)) }, ""},
		"repeated work": {every(3 * d / 2), "the pool is not idle"},
	} {
		f, ended := &failing{TB: t}, make(chan struct{})
		go func() {
			defer close(ended)
			Idle(f, "the pool", d, tc.read)
		}()
		<-ended
		if (f.message != "") != (tc.want != "") || !strings.Contains(f.message, tc.want) {
			t.Errorf("%s: got %q, want %q", name, f.message, tc.want)
		}
	}
}
