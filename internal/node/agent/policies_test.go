package agent

import (
	"testing"
	"time"
)

// A user of the cluster who makes updates long gets them seldom. Short updates do not wait.
func TestPauseAfterUpdate(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0: policyPause, 50 * time.Millisecond: policyPause, time.Second: 4 * time.Second, time.Minute: 4 * time.Minute,
	} {
		if got := pauseAfterUpdate(took); got != want {
			t.Errorf("after %s: %s, want %s", took, got, want)
		}
	}
}
