package proc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestHandle(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
	ref, err := Find(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	h, err := ref.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := h.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a live process: %v", err)
	}
	if !ref.Alive() {
		t.Error("a live process is reported as ended")
	}
	if err := h.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	long, cancelLong := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancelLong()
	if err := h.Wait(long); err != nil { // A second wait works after the first one timed out.
		t.Errorf("waiting for its end: %v", err)
	}
	if ref.Alive() {
		t.Error("an ended process is reported as alive")
	}
	if err := h.Signal(unix.SIGKILL); err != nil {
		t.Errorf("a signal to a process that ended: %v", err)
	}
	if _, err := ref.Open(); !errors.Is(err, ErrGone) {
		t.Errorf("a second open of an ended process: %v", err)
	}
}

// A process with the same id can be a different process.
func TestAnotherProcess(t *testing.T) {
	me, err := Find(os.Getpid())
	if err != nil || !me.Alive() {
		t.Fatalf("%+v %v", me, err)
	}
	for name, other := range map[string]Ref{
		"start": {me.PID, me.StartTime + 1, me.BootID},
		"boot":  {me.PID, me.StartTime, "another"},
		"empty": {},
	} {
		if other.Alive() {
			t.Errorf("taken for this process: another %s", name)
		}
		if _, err := other.Open(); err == nil {
			t.Errorf("opened: another %s", name)
		}
	}
}
