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

// Each change of the file is reported: a write, a replacement, a removal or a creation. Changes of other files are not
// reported.
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
			t.Fatalf("%s: the change was not reported", what)
		}
		for settled := false; !settled; { // One change may cause several events.
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
		t.Error("a change of another file was reported")
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

// testWaitFor waits for an existing file, for a file that is created later, and for a missing file.
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

// The same with an exhausted inotify limit. The test runs in its own user namespace with the limit 0, so that other
// processes keep theirs.
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
		t.Fatal("the inotify limit is not 0")
	}
	testChanges(t)
	testWaitFor(t)
}
