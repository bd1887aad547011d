// Package loopdevice attaches files to loop devices.
//
// Layer: library. Allowed imports: api.
package loopdevice

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// attempts bounds the search for a free device, because all users of the kernel take devices from one set.
const attempts = 100

// Attach attaches a file to a free loop device. control is /dev/loop-control. open opens the device with a number. The kernel releases the
// device with its last user if the flags of config have LO_FLAGS_AUTOCLEAR.
func Attach(control, file *os.File, config unix.LoopConfig, open func(number int) (*os.File, error)) (loop *os.File, number int, err error) {
	config.Fd = uint32(file.Fd())
	for range attempts {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, 0, fmt.Errorf("no free loop device: %w", err)
		}
		loop, err := open(number)
		if err != nil {
			return nil, 0, fmt.Errorf("loop device: %w", err)
		}
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), &config); err == nil {
			return loop, number, nil
		}
		_ = loop.Close()
		if !errors.Is(err, unix.EBUSY) { // Another process took the device first.
			return nil, 0, fmt.Errorf("attaching %s to a loop device: %w", file.Name(), err)
		}
	}
	return nil, 0, errors.New("no free loop device: other processes of the host took each one first")
}
