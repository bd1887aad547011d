package changes

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Each change of the file is told, whether it is written, replaced, removed or made, and no change of another file.
func testChanges(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "file"), filepath.Join(dir, "other")
	c := Of(t.Context(), path)
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	told := func(what string) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s: not told", what)
		}
		for settled := false; !settled; { // one change may be several events
			select {
			case <-c:
			case <-time.After(50 * time.Millisecond):
				settled = true
			}
		}
	}
	write(path, "one")
	told("made")
	write(path, "longer")
	told("written")
	write(other, "other")
	select {
	case <-c:
		t.Error("told of another file")
	case <-time.After(50 * time.Millisecond):
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	told("replaced")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	told("removed")
}

// testWaitFor waits for a file that is there, for one that comes, and for one that does not.
func testWaitFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	waited := make(chan error, 1)
	wait := func(ctx context.Context) { waited <- WaitFor(ctx, path) }
	ended := func(want error) {
		t.Helper()
		select {
		case err := <-waited:
			if !errors.Is(err, want) {
				t.Errorf("WaitFor: %v, want %v", err, want)
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("WaitFor does not return")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	go wait(ctx)
	cancel()
	ended(context.Canceled)
	go wait(t.Context())
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ended(nil)
	go wait(t.Context())
	ended(nil)
}

func TestChanges(t *testing.T) {
	testChanges(t)
	testWaitFor(t)
}

// The same with an inotify budget that is used up: in a user namespace of its own, whose budget is 0, so that the test takes
// nothing from others.
func TestChangesWithoutBudget(t *testing.T) {
	const marker = "CAPSTAN_TEST_NO_INOTIFY"
	if os.Getenv(marker) == "" {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), marker+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("in a user namespace: %v\n%s", err, out)
		}
		return
	}
	if err := os.WriteFile("/proc/sys/user/max_inotify_instances", []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := fsnotify.NewWatcher(); err == nil {
		t.Fatal("there is a budget")
	}
	testChanges(t)
	testWaitFor(t)
}
