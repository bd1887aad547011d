package host

import (
	"time"

	"capstan.dev/capstan/internal/backoff"
)

// A machine whose PID 1 ends is started again at once, and later after growing pauses. It has failed when PID 1 ended more
// than restartBudget times within restartWindow. After failedDelay, a failed machine is tried again with a full budget,
// because the cause, such as missing memory, may be gone.
const (
	restartBudget   = 10
	restartWindow   = 10 * time.Minute
	maxRestartDelay = 30 * time.Second
	failedDelay     = 15 * time.Minute
)

// afterDeath takes the earlier deaths of a machine and the newest one. It returns the deaths that still count, the pause
// before the next start, and whether the restart budget is used up.
func afterDeath(deaths []time.Time, now time.Time) (counted []time.Time, delay time.Duration, usedUp bool) {
	for _, death := range deaths {
		// A time in the future comes from a clock that was ahead, so it does not count.
		if !death.After(now) && now.Sub(death) < restartWindow {
			counted = append(counted, death)
		}
	}
	counted = append(counted, now)
	if len(counted) > restartBudget {
		return counted, 0, true
	}
	return counted, pauseAfter(len(counted) - 2), false
}

// pauseAfter is 0 for n < 0, then 1, 2, 4 … 30 seconds.
func pauseAfter(n int) time.Duration {
	if n < 0 {
		return 0
	}
	return backoff.After(n, time.Second, maxRestartDelay)
}

// stillFailed returns how long a failed machine must wait: forever if it cannot be started, 0 if it must be started now.
func stillFailed(failed string, restartAt, now time.Time) time.Duration {
	switch {
	case failed == "":
		return 0
	case restartAt.IsZero():
		return forever
	}
	// A clock that was set back must not lengthen the pause.
	return max(0, min(restartAt.Sub(now), failedDelay))
}
