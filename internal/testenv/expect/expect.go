// Package expect ends a test when a call fails, or when a condition does not become true in time. It imports only the standard
// library, so that the test of each package can use it.
package expect

import (
	"errors"
	"testing"
	"time"
)

// Patience is the timeout of waits in tests. It is long, because only failing tests reach it, and two packages at a time
// are slow on a small and busy machine.
const Patience = 5 * time.Minute

// NoError ends a test after an error.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually waits until a function returns no error. After Patience it ends the test with the last error.
func Eventually(t testing.TB, what string, try func() error) {
	t.Helper()
	for start := time.Now(); ; time.Sleep(pause(time.Since(start))) {
		err := try()
		if err == nil {
			return
		}
		if time.Since(start) > Patience {
			t.Fatalf("%s: not within %s: %v", what, Patience, err)
		}
	}
}

// True waits until a condition is true.
func True(t testing.TB, what string, holds func() bool) {
	t.Helper()
	Eventually(t, what, func() error {
		if !holds() {
			return errors.New("the condition is false")
		}
		return nil
	})
}

// Rest waits until the result of a function has not changed for two seconds, and returns it.
func Rest(t testing.TB, read func() string) string {
	t.Helper()
	return rest(t, 2*time.Second, read)
}

// Idle checks that work ends. read returns something that all work changes, such as a counter. Idle waits until it has not changed for a
// time, because the last work can be late on a busy box, and then expects that it does not change for this time again. So work that
// repeats at intervals of up to twice this time ends the test.
func Idle(t testing.TB, what string, d time.Duration, read func() string) {
	t.Helper()
	before := rest(t, d, read)
	time.Sleep(d) // The idle period is the measurement.
	if after := read(); after != before {
		t.Fatalf("%s is not idle: %s after a rest of %s, and %s as long afterwards", what, before, d, after)
	}
}

func rest(t testing.TB, d time.Duration, read func() string) string {
	t.Helper()
	last, since := read(), time.Now()
	True(t, "rest", func() bool {
		if now := read(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > d
	})
	return last
}

// Consistently checks that a condition remains true.
func Consistently(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(700 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if !holds() {
			t.Fatalf("did not remain true: %s", what)
		}
	}
}

// pause returns the time until the next attempt of a wait that has lasted some time. Most waits are short. An attempt is one
// request or several, so a long wait with short pauses would take much of the processor from the other tests.
func pause(waited time.Duration) time.Duration {
	return min(max(20*time.Millisecond, waited/5), 200*time.Millisecond)
}
