// Package backoff computes pauses that double with each failed attempt, up to a limit.
//
// Layer: library. Allowed imports: api.
package backoff

import (
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Doubling returns pauses that begin with first and double up to last. Step returns the next one.
func Doubling(first, last time.Duration) *wait.Backoff {
	return &wait.Backoff{Duration: first, Factor: 2, Steps: math.MaxInt, Cap: last}
}

// Jittered is Doubling with up to a fifth added to each pause, so that many clients of one server do not try at the same time.
func Jittered(first, last time.Duration) *wait.Backoff {
	out := Doubling(first, last)
	out.Jitter = 0.2
	return out
}

// After returns the pause after so many failures in a row: first after none, then twice as long for each one, at most last.
func After(failures int, first, last time.Duration) time.Duration {
	pauses := Doubling(first, last)
	// More failures than the bits of a duration make no difference.
	for range min(failures, 64) {
		pauses.Step()
	}
	return pauses.Step()
}
