package host

import (
	"testing"
	"testing/synctest"
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
