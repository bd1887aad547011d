// Package boottime reads the clock CLOCK_BOOTTIME, which a host and its machines share.
//
// Layer: library. Allowed imports: api.
package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since the boot of the host. Nobody can set this clock, and it does not stop while the host is suspended.
func Now() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	return time.Duration(t.Nano())
}
