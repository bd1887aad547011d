package boundedfolder

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The users of a folder can fill neither the disk nor the memory of the host, and cannot use up its files.
func TestMake(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	path := filepath.Join(t.TempDir(), "folder")
	t.Cleanup(func() { _ = Unmount(path) })
	limits := Limits{Bytes: 1 << 20, Files: 32}
	if err := Make(path, 65534, limits); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o700 || info.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Fatal(info, err)
	}
	if err := os.WriteFile(filepath.Join(path, "large"), make([]byte, 2*limits.Bytes), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("twice the size was written: %v", err)
	}
	made := 0
	for ; made <= limits.Files && err == nil; made++ {
		err = os.Mkdir(filepath.Join(path, fmt.Sprint(made)), 0o700)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%d folders were made: %v", made, err)
	}
	if err := Make(path, 0, limits); !errors.Is(err, os.ErrExist) {
		t.Errorf("an existing folder was made again: %v", err)
	}
	for range 2 { // The second time, nothing is mounted.
		if err := Unmount(path); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
		t.Errorf("the folder contains %v, %v", left, err)
	}
	if err := Unmount(path + ".missing"); err != nil {
		t.Error(err)
	}
}
