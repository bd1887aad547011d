package machinedisk

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

// A disk is detached although root in the machine uses a file of it for swap. Another file with the name of a swap file is no error.
func TestSwapFile(t *testing.T) {
	d, other := attached(t), attached(t)
	file := filepath.Join(d.Dir, "swap")
	expect.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	expect.NoError(t, os.WriteFile(filepath.Join(other.Dir, "swap"), nil, 0o600))
	if out, err := exec.CommandContext(t.Context(), "mkswap", file).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	used := make(chan error)
	go func() { used <- swapOnIn(d.Dir, "/swap") }()
	expect.NoError(t, <-used)
	expect.NoError(t, other.Detach(ctx(t)))
	expect.NoError(t, d.Detach(ctx(t)))
}

// swapOnIn uses a file for swap in a mount namespace whose root is dir, as in a machine. The thread, and with it the namespace, ends with the
// goroutine.
func swapOnIn(dir, file string) error {
	runtime.LockOSThread()
	for _, step := range []func() error{
		func() error { return unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS) },
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount(dir, dir, "", unix.MS_BIND, "") },
		func() error { return unix.Chdir(dir) },
		func() error { return unix.PivotRoot(".", ".") },
		func() error { return unix.Unmount(".", unix.MNT_DETACH) },
		func() error {
			path, err := unix.BytePtrFromString(file)
			if err != nil {
				return err
			}
			if _, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(path)), 0, 0); errno != 0 { //nolint:gosec // The kernel reads the path.
				return errno
			}
			return nil
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
