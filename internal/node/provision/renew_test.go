package provision

import (
	"errors"
	"testing"
	"time"
)

// TestRenewAll: an open request does not delay another renewal, an error does not hide the others, and the earliest time counts.
func TestRenewAll(t *testing.T) {
	soon, later := time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)
	renewed := make(chan struct{})
	next, err := renewAll([]func() (time.Time, error){
		func() (time.Time, error) {
			select {
			case <-renewed:
				return later, errors.New("refused")
			case <-time.After(time.Minute):
				return later, errors.New("the second renewal waits for the first one")
			}
		},
		func() (time.Time, error) { close(renewed); return soon, nil },
	})
	if !next.Equal(soon) || err == nil || err.Error() != "refused" {
		t.Errorf("next at %s, %v", next, err)
	}
}
