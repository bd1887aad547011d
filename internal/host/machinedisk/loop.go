package machinedisk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/loopdevice"
)

// openControl opens the device that creates loop devices.
func openControl() (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the kernel has no loop devices: %w; load the module loop", err)
	}
	return control, nil
}

// newLoop attaches an image to a free loop device. The kernel releases the device when the returned file is closed and the
// device is not mounted.
func newLoop(image string) (*os.File, error) {
	control, err := openControl()
	if err != nil {
		return nil, err
	}
	defer func() { _ = control.Close() }()
	back, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = back.Close() }()
	// Direct I/O keeps data out of a second page cache. The kernel falls back to buffered I/O where it is not possible.
	config := unix.LoopConfig{Size: blockSize, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO}}
	loop, _, err := loopdevice.Attach(control, back, config, func(number int) (*os.File, error) {
		return os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
	})
	return loop, err
}

// findLoop returns the loop device that has an image, nil when none has. The caller closes it. It opens only devices whose file has the name of
// the image: a device of another program can hang, for example on a network file system. Opened for writing, each device would cause an event
// of udev.
func findLoop(image string) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Stat(image, &want); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return nil, fmt.Errorf("%s: %w", image, err)
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, path := range attached {
		file, err := os.ReadFile(path)
		if err != nil || shortName(strings.TrimSuffix(string(file), "\n")) != shortName(image) {
			continue
		}
		loop, err := os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(filepath.Dir(path)))), os.O_RDONLY, 0)
		if err != nil {
			continue // It is another's, and was released meanwhile.
		}
		info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
		if err == nil && info.Device == want.Dev && info.Inode == want.Ino {
			return loop, nil
		}
		_ = loop.Close()
	}
	return nil, nil
}

// shortName returns the name of an image with that of its folder, which is the id of its machine or volume. The kernel's path can be another one
// than that of capstand, for example because of a symbolic link.
func shortName(image string) string {
	return filepath.Join(filepath.Base(filepath.Dir(image)), filepath.Base(image))
}
