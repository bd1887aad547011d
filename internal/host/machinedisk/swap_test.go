package machinedisk

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/thread"
)

// A disk is detached although root in the machine uses a file of it for swap, has made the file immutable, and has chosen a name that the kernel
// escapes. Another file with the name of a swap file is no error, also in a read-only file system.
func TestSwapFile(t *testing.T) {
	d, other := attached(t), attached(t)
	name := "a \t\n\\\v swap"
	file := filepath.Join(d.Dir, name)
	expect.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	expect.NoError(t, os.WriteFile(filepath.Join(other.Dir, name), nil, 0o600))
	expect.NoError(t, unix.Mount("", other.Dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if out, err := exec.CommandContext(t.Context(), "mkswap", file).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	var used error
	thread.Throwaway(func() { used = swapOnIn(d.Dir, "/"+name) }) // The mount namespace ends with the thread.
	expect.NoError(t, used)
	if out, err := exec.CommandContext(t.Context(), "chattr", "+i", file).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	expect.NoError(t, other.Detach(ctx(t)))
	expect.NoError(t, d.Detach(ctx(t)))
}

// swapOnIn uses a file for swap in a mount namespace whose root is dir, as in a machine. The calling thread stays in the namespace.
func swapOnIn(dir, file string) error {
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
			if _, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(path)), 0, 0); errno != 0 {
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
