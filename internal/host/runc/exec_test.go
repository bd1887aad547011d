package runc

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
)

// TestKillRecorded: when the command of runc has ended, another process that has its number is not killed.
func TestKillRecorded(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	sleeper := exec.CommandContext(t.Context(), "sleep", "3600")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(sleeper.Process.Pid)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := killRecorded(pidFile, os.Getppid()); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a process of another parent: %v", err)
	}
	if err := killRecorded(pidFile, os.Getpid()); err != nil {
		t.Errorf("the command: %v", err)
	}
	_ = sleeper.Wait()
	if err := killRecorded(pidFile, os.Getpid()); err == nil {
		t.Error("a command that is gone was killed")
	}
}
