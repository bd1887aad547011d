package proc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

func TestHandle(t *testing.T) {
	ref, err := Start(exec.Command("sleep", "60"))
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

// A process that has ended leaves no zombie, which would keep its id.
func TestStartReaps(t *testing.T) {
	cmd := exec.Command("cat") // It ends when its input ends.
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ref, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "the process is reaped", func() bool { return errors.Is(unix.Kill(ref.PID, 0), unix.ESRCH) })
	if _, err := Start(exec.Command("/does/not/exist")); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("a program that does not exist: %v", err)
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
