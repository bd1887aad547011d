package process

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain runs TestReaper's inner process. A reaper waits for all children of its process, including those of
// other tests, so it needs its own process.
func TestMain(m *testing.M) {
	if os.Getenv("TEST_REAPER") == "" {
		os.Exit(m.Run())
	}
	if err := reapEverything(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func TestReaper(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TEST_REAPER=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func reapEverything() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	r := NewReaper()
	if err := childrenDieFirst(r); err != nil {
		return err
	}
	// Many processes run at once, and some end before Start returns. Each process gets its own Exit.
	var done []<-chan Exit
	for i := range 100 {
		exit, err := r.Start(exec.Command("/bin/sh", "-c", fmt.Sprintf("exit %d", i)))
		if err != nil {
			return err
		}
		done = append(done, exit)
	}
	for i, exit := range done {
		if got := <-exit; got.Code != i {
			return fmt.Errorf("process %d ended with %+v", i, got)
		}
	}
	// The reaper also reaps an orphan whose parent has ended.
	exit, err := r.Start(exec.Command("/bin/sh", "-c", "(exec sleep 0.05) & exit 0"))
	if err != nil {
		return err
	}
	<-exit
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err == unix.ECHILD {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the orphan was not reaped")
		}
	}
	if _, err := r.Start(exec.Command("/does/not/exist")); err == nil {
		return fmt.Errorf("a program that does not exist was started")
	}
	return nil
}
