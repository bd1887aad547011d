package runc

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
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

// TestOutputEnds: the output ends with the session, although a process that the command has left holds it open.
func TestOutputEnds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program, left := filepath.Join(dir, "runc"), filepath.Join(dir, "left")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nsleep 3600 &\necho $! > "+left+"\necho started\necho started >&2\nexec true\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := Runc{Binary: program, Root: dir, Sessions: filepath.Join(dir, "exec")}.Session(ctx, "m-1", Command{Args: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, output := range []io.Reader{s.Stdout, s.Stderr} {
		if _, err := io.ReadFull(output, make([]byte, len("started\n"))); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(left)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	cancel()
	ended := make(chan error, 2)
	for _, output := range []io.Reader{s.Stdout, s.Stderr} {
		go func() {
			_, err := io.Copy(io.Discard, output)
			ended <- err
		}()
	}
	for range 2 {
		select {
		case err := <-ended:
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("the output ended with %v, want %v", err, os.ErrClosed)
			}
		case <-time.After(expect.Patience):
			t.Fatal("the output has no end")
		}
	}
	_, _ = s.Wait()
}
