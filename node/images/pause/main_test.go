package main

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

func TestRun(t *testing.T) {
	for _, stop := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		// Two children and a single SIGCHLD: both must be gone afterwards.
		var pids []int
		for range 2 {
			c := exec.Command("true")
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			pids = append(pids, c.Process.Pid)
		}
		time.Sleep(200 * time.Millisecond) // no event: the test must not wait for them itself

		signals := make(chan os.Signal, 2)
		signals <- syscall.SIGCHLD
		signals <- stop
		run(signals)

		for _, pid := range pids {
			if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("%v: child %d was not reaped: %v", stop, pid, err)
			}
		}
	}
}
