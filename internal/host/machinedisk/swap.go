package machinedisk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// endSwap ends the use of the swap files of a mounted file system: root in the machine can have begun it with swapon(8), and the kernel would keep
// the loop device.
func (d Disk) endSwap() error {
	if mounted, err := d.Mounted(); err != nil || !mounted {
		return err
	}
	swaps, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // The kernel has no swap.
	}
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(d.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for line := range strings.Lines(string(swaps)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == "file" {
			// The kernel prints the path in the mount namespace that used the file.
			err = errors.Join(err, endSwapOf(root, strings.Trim(strings.TrimPrefix(fields[0], d.Dir), "/")))
		}
	}
	return err
}

// endSwapOf ends the use of a swap file if root has it. A swap file of the host can have the same name.
func endSwapOf(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return nil //nolint:nilerr // The swap file is in another file system.
	}
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	path, err := unix.BytePtrFromString(fmt.Sprintf("/proc/self/fd/%d", file.Fd())) // No link of the machine leads it elsewhere.
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(path)), 0, 0); errno != 0 && errno != unix.EINVAL { //nolint:gosec // The kernel reads the path.
		return fmt.Errorf("ending the use of the swap file %s of the machine: %w", file.Name(), errno)
	}
	return nil
}
