package host

import (
	"time"

	"capstan.dev/capstan/internal/backoff"
)

// A machine whose PID 1 ends is started again at once, then after longer and longer pauses. It has failed when PID 1 ended more
// than restartBudget times within restartWindow. A failed machine is tried again after failedDelay, with all of its restarts: what
// it lacked, memory say, may be there again by then.
const (
	restartBudget   = 10
	restartWindow   = 10 * time.Minute
	maxRestartDelay = 30 * time.Second
	failedDelay     = 15 * time.Minute
)

// afterDeath takes the earlier deaths of a machine and the newest, and returns those that still count,
// for how long to wait before it is started again, and whether its restarts are used up.
func afterDeath(deaths []time.Time, now time.Time) (counted []time.Time, delay time.Duration, usedUp bool) {
	for _, death := range deaths {
		// One in the future is of a clock that was ahead: it says nothing.
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

// stillFailed returns for how long a failed machine is to rest: forever if it cannot be started, 0 when it is to be started.
func stillFailed(failed string, restartAt, now time.Time) time.Duration {
	switch {
	case failed == "":
		return 0
	case restartAt.IsZero():
		return forever
	}
	// A clock that was set back must not prolong the pause.
	return max(0, min(restartAt.Sub(now), failedDelay))
}
