package backoff

import (
	"testing"
	"time"
)

func TestAfter(t *testing.T) {
	for failures, want := range map[int]time.Duration{0: time.Second, 1: 2 * time.Second, 2: 4 * time.Second, 4: 10 * time.Second, 5: 10 * time.Second, 1 << 30: 10 * time.Second} {
		if got := After(failures, time.Second, 10*time.Second); got != want {
			t.Errorf("after %d failures: %s, want %s", failures, got, want)
		}
	}
}

func TestJittered(t *testing.T) {
	pauses := Jittered(time.Second, 4*time.Second)
	for i, base := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second} {
		if got := pauses.Step(); got < base || got > base*12/10 {
			t.Errorf("pause %d is %s, want %s and at most a fifth more", i, got, base)
		}
	}
}
