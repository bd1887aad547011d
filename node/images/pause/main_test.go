package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// awaitZombie waits until a process has ended, without reaping it.
func awaitZombie(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("process %d does not end: %s", pid, stat)
		}
	}
}

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
		for _, pid := range pids {
			awaitZombie(t, pid)
		}

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
