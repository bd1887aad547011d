package supervisor

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"
)

const (
	// maxLogBytes of a service's log before it is rotated; one old file is kept.
	maxLogBytes = 20 << 20
	// rotatePeriod between two checks. Services write to their files directly, and an event for each write would cost more
	// than checking a dozen sizes.
	rotatePeriod = 30 * time.Second
)

// RotateLogs rotates the logs of the folder until ctx ends.
func RotateLogs(ctx context.Context, dir string) {
	tick := time.NewTicker(rotatePeriod)
	defer tick.Stop()
	for {
		paths, _ := filepath.Glob(filepath.Join(dir, "*.log"))
		for _, path := range paths {
			_ = rotate(path, maxLogBytes)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// rotate copies a log that is larger than limit to <path>.1 and truncates it. It does not rename the file, because the
// service keeps it open (in append mode, so it continues at the new end).
func rotate(path string, limit int64) error {
	log, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	info, err := log.Stat()
	if err != nil || info.Size() <= limit {
		return err
	}
	old, err := os.OpenFile(path+".1", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(old, log)
	return errors.Join(err, old.Close(), log.Truncate(0))
}
