package host

import (
	"testing"
	"time"
)

func TestAfterDeath(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(ds ...time.Duration) (all []time.Time) {
		for _, d := range ds {
			all = append(all, now.Add(-d))
		}
		return all
	}
	var full []time.Duration
	for range restartBudget {
		full = append(full, time.Minute)
	}
	for name, test := range map[string]struct {
		deaths []time.Time
		delay  time.Duration
		usedUp bool
		counts int
	}{
		"the first: at once":         {nil, 0, false, 1},
		"the second: a second":       {ago(time.Minute), time.Second, false, 2},
		"the third: two":             {ago(time.Minute, time.Second), 2 * time.Second, false, 3},
		"old deaths do not count":    {ago(time.Hour, restartWindow), 0, false, 1},
		"nor those of a clock ahead": {ago(-time.Hour, -48*time.Hour), 0, false, 1},
		"pauses have an upper end":   {ago(full[:8]...), maxRestartDelay, false, 9},
		"the last one allowed":       {ago(full[:restartBudget-1]...), maxRestartDelay, false, restartBudget},
		"one more uses up":           {ago(full...), 0, true, restartBudget + 1},
		"not when they are old":      {append(ago(2*time.Hour), ago(full[:3]...)...), 4 * time.Second, false, 4},
	} {
		counted, delay, usedUp := afterDeath(test.deaths, now)
		if delay != test.delay || usedUp != test.usedUp || len(counted) != test.counts {
			t.Errorf("%s: got %s %v with %d deaths, want %s %v with %d", name, delay, usedUp, len(counted), test.delay, test.usedUp, test.counts)
		}
	}
}
