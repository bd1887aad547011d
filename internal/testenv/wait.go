package testenv

import "time"

// Pause returns the time until the next attempt of a wait that has lasted some time. Most waits are short. An attempt is one
// request or several, so a long wait with short pauses would take much of the processor from the other tests.
func Pause(waited time.Duration) time.Duration {
	return min(max(20*time.Millisecond, waited/5), 200*time.Millisecond)
}
