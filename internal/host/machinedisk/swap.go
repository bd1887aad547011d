package machinedisk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/clearfolder"
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
		if path, rest, _ := strings.Cut(line, " "); strings.HasPrefix(strings.TrimLeft(rest, " "), "file") {
			// The kernel prints the path in the mount namespace that used the file.
			err = errors.Join(err, endSwapOf(root, strings.Trim(strings.TrimPrefix(unescape.Replace(path), d.Dir), "/")))
		}
	}
	return err
}

// unescape decodes the characters that the kernel escapes in the paths of /proc/swaps.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

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
	// The kernel opens the file for writing. If this fails, swapoff returns the error.
	_ = clearfolder.MakeChangeable(file)
	path, err := unix.BytePtrFromString(fmt.Sprintf("/proc/self/fd/%d", file.Fd())) // No link of the machine leads it elsewhere.
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(path)), 0, 0); errno != 0 && errno != unix.EINVAL { //nolint:gosec // The kernel reads the path.
		return fmt.Errorf("ending the use of the swap file %q of the machine: %w", file.Name(), errno)
	}
	return nil
}
