package machinedisk

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// errorsInterval is the interval of the checks in AwaitError. The kernel notifies pollers of the count only for some of
// the errors.
const errorsInterval = 2 * time.Second

// errorsOf returns how many errors the ext4 file system on a device has met since its last check.
func errorsOf(device string) (int64, error) {
	data, err := os.ReadFile("/sys/fs/ext4/" + device + "/errors_count")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// AwaitError returns nil once the mounted file system has met an error, after which it is read-only. It returns the context's
// error when ctx ends first.
func (d Disk) AwaitError(ctx context.Context) error {
	device, err := d.mounted()
	if err != nil {
		return err
	}
	if device == "" {
		return fmt.Errorf("no disk is mounted at %s", d.Dir)
	}
	ticker := time.NewTicker(errorsInterval)
	defer ticker.Stop()
	for {
		if count, err := errorsOf(device); err != nil || count > 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
