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
	// rotatePeriod: services write to their files directly, and an event for each write would cost
	// more than a look at a dozen sizes.
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

// rotate copies a log that has grown beyond limit to <path>.1 and empties it. It is copied, not
// renamed, because the service holds it open (for appending, so it goes on at the new end).
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
