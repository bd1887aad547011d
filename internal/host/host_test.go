package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// capstand ends although a goroutine hangs, for example in a file system of the host: the orderly stop of the machines comes after the wait.
func TestWaitIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, hang := recorded(t), make(chan struct{})
		h.running.Go(func() { <-hang })
		h.Wait() // Without a bound, the test reports a deadlock.
		close(hang)
	})
}

// The end of capstand waits for a start of a machine that takes long, and does not leave its runc behind.
func TestWaitForStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, started := recorded(t), false
		h.running.Go(func() {
			<-time.After(endWait - time.Second)
			started = true
		})
		h.Wait()
		if !started {
			t.Error("capstand ended during the start of a machine")
		}
	})
}

// No machine starts after the end of capstand.
func TestNoStartAfterTheEnd(t *testing.T) {
	h := recorded(t)
	life, end := context.WithCancel(t.Context())
	end()
	if _, err := onDisk(t, h).start(life); !errors.Is(err, context.Canceled) {
		t.Errorf("a start after the end of capstand: %v", err)
	}
}
