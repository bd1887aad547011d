package expect

import (
	"testing"
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
