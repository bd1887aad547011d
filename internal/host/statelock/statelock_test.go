package statelock

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A capstand waits for the lock of a killed one, whose last child can hold it for a moment, and not for one that runs.
func TestLock(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	former, err := os.OpenFile(filepath.Join(root, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(former.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() { _ = former.Close() })
	unlock, err := Lock(root)
	if err != nil {
		t.Fatalf("after the end of the former one: %v", err)
	}
	defer unlock()
	if _, err := Lock(root); err == nil || !strings.Contains(err.Error(), "another capstand runs") {
		t.Errorf("beside a running one: %v", err)
	}
}
