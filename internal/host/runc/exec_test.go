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

// TestSessionFolder: a session has its folder below that of all sessions, and nothing is left after its end.
func TestSessionFolder(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "runc")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexec cat\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := Runc{Binary: program, Root: filepath.Join(dir, "root"), Sessions: filepath.Join(dir, "exec", "host")}
	s, err := r.Session(t.Context(), "m-1", Command{Args: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(r.Sessions); err != nil || len(entries) != 1 {
		t.Errorf("during the session: %v, %v", entries, err)
	}
	if err := s.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	if code, err := s.Wait(); code != 0 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	if entries, err := os.ReadDir(r.Sessions); err != nil || len(entries) != 0 {
		t.Errorf("after the session: %v, %v", entries, err)
	}
}
