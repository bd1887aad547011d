// Package statelock is the lock of capstand's state folder.
//
// Layer: host. Allowed imports: api, library, contract.
package statelock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// wait bounds the wait for the lock of a killed capstand: a process that it was about to start holds the lock too, until it runs
// its program.
const wait = 5 * time.Second

// Lock prevents that a capstand runs with the state folder. The lock lasts until unlock, or as long as the process.
func Lock(root string) (unlock func(), err error) {
	if err := os.MkdirAll(root, 0o711); err != nil {
		return nil, err
	}
	fd, err := unix.Open(filepath.Join(root, "lock"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the state folder %s: %w", root, err)
	}
	for deadline := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) { // flock has no timeout.
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = unix.Close(fd) }, nil
		case !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline):
			_ = unix.Close(fd)
			return nil, fmt.Errorf("another capstand runs with --root %s: %w", root, err)
		}
	}
}
