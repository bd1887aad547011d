package host

import "time"

// A machine whose PID 1 ends is started again at once, then after longer and longer pauses, and is
// given up when it ended more than restartBudget times within restartWindow.
const (
	restartBudget   = 10
	restartWindow   = 10 * time.Minute
	maxRestartDelay = 30 * time.Second
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
	return counted, backoff(len(counted) - 2), false
}

// backoff is 0 for n < 0, then 1, 2, 4 … 30 seconds.
func backoff(n int) time.Duration {
	if n < 0 {
		return 0
	}
	return min(maxRestartDelay, time.Second<<min(n, 10))
}
