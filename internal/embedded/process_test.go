package embedded

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/backoff"
)

func TestBackoff(t *testing.T) {
	for failures, want := range map[int]time.Duration{0: 200 * time.Millisecond, 1: 400 * time.Millisecond, 3: 1600 * time.Millisecond, 6: 10 * time.Second, 1000: 10 * time.Second} {
		if got := backoff.After(failures, firstBackoff, lastBackoff); got != want {
			t.Errorf("backoff(%d) = %s, want %s", failures, got, want)
		}
	}
}

// supervised runs a shell script as a component and returns its statuses.
func supervised(t *testing.T, script string, ready func(context.Context) error) (*process, <-chan ProcessStatus) {
	t.Helper()
	statuses := make(chan ProcessStatus, 100)
	log := filepath.Join(t.TempDir(), "log")
	p := newProcess(component{name: "test", path: "/bin/sh", args: []string{"-c", script}, asRoot: true, ready: ready}, log, user{}, newSpawner(), func(s ProcessStatus) { statuses <- s })
	p.begin()
	t.Cleanup(p.Stop)
	return p, statuses
}

func await(t *testing.T, statuses <-chan ProcessStatus, what string, is func(ProcessStatus) bool) ProcessStatus {
	t.Helper()
	deadline := time.After(2 * time.Minute)
	for {
		select {
		case s := <-statuses:
			if is(s) {
				return s
			}
		case <-deadline:
			t.Fatalf("the component did not become %s", what)
		}
	}
}

func alwaysReady(context.Context) error { return nil }

func TestProcessIsRestarted(t *testing.T) {
	p, statuses := supervised(t, "exec sleep 1000", alwaysReady)
	first := await(t, statuses, "ready", func(s ProcessStatus) bool { return s.State == ProcessReady })
	if err := p.waitReady(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	down := await(t, statuses, "in back-off", func(s ProcessStatus) bool { return s.State == ProcessBackoff })
	if !strings.Contains(down.Message, "killed") || !strings.Contains(down.Message, p.log) {
		t.Errorf("the message is %q", down.Message)
	}
	second := await(t, statuses, "ready again", func(s ProcessStatus) bool { return s.State == ProcessReady })
	if second.PID == first.PID || second.Restarts != 1 {
		t.Errorf("status %+v was followed by %+v", first, second)
	}
	p.Stop()
	await(t, statuses, "stopped", func(s ProcessStatus) bool { return s.State == ProcessStopped })
	if err := syscall.Kill(second.PID, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d still runs: %v", second.PID, err)
	}
}

// The status is current: an API server whose etcd has stopped is not ready.
func TestUnreadyProcess(t *testing.T) {
	var away atomic.Bool
	_, statuses := supervised(t, "exec sleep 1000", func(context.Context) error {
		if away.Load() {
			return errors.New("etcd is away")
		}
		return nil
	})
	is := func(state ProcessState) func(ProcessStatus) bool {
		return func(s ProcessStatus) bool { return s.State == state }
	}
	await(t, statuses, "ready", is(ProcessReady))
	away.Store(true)
	if s := await(t, statuses, "not ready", is(ProcessStarting)); !strings.Contains(s.Message, "etcd is away") {
		t.Errorf("the message is %q", s.Message)
	}
	away.Store(false)
	if s := await(t, statuses, "ready again", is(ProcessReady)); s.Message != "" || s.Restarts != 0 {
		t.Errorf("the status is %+v", s)
	}
}

func TestProcessBackoff(t *testing.T) {
	_, statuses := supervised(t, "exit 3", func(context.Context) error { return errors.New("not yet") })
	s := await(t, statuses, "restarted three times", func(s ProcessStatus) bool { return s.Restarts == 3 })
	if !strings.Contains(s.Message, "exit status 3") || !strings.Contains(s.Message, "next start in 800ms") {
		t.Errorf("the message is %q", s.Message)
	}
}

func TestProcessThatCannotStart(t *testing.T) {
	statuses := make(chan ProcessStatus, 100)
	p := newProcess(component{name: "test", path: "/nonexistent", ready: alwaysReady}, filepath.Join(t.TempDir(), "log"), user{os.Getuid(), os.Getgid()}, newSpawner(), func(s ProcessStatus) { statuses <- s })
	p.begin()
	defer p.Stop()
	s := await(t, statuses, "in back-off", func(s ProcessStatus) bool { return s.State == ProcessBackoff })
	if !strings.Contains(s.Message, "cannot start /nonexistent") {
		t.Errorf("the message is %q", s.Message)
	}
}

func TestStopBeforeStart(t *testing.T) {
	p := newProcess(component{name: "test"}, "", user{}, nil, func(ProcessStatus) {})
	p.Stop() // stop must return
	p.begin()
	if p.status.State != ProcessWaiting {
		t.Errorf("a stopped component was started: %+v", p.status)
	}
}
