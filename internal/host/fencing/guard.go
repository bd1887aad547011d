package fencing

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"time"

	"capstan.dev/capstan/internal/host/cgroup"
)

const (
	// Pause is the time between two checks of the leases, by capstand and by the guard.
	Pause = time.Second
	// grace is the time after which the guard stops machines that capstand should have stopped.
	grace = 3 * time.Second
	// killTimeout bounds the end of a machine's processes.
	killTimeout = 30 * time.Second
)

// Guard stops machines whose leases have expired, until there are no leases. capstand renews the leases in the memory file, and
// starts the guard, which outlives it.
func Guard(ctx context.Context, path string, log *slog.Logger) error {
	ticker := time.NewTicker(Pause)
	defer ticker.Stop()
	stopped := map[string]bool{}
	for {
		m, fresh := ReadMemory(path)
		if fresh || len(m.Leases) == 0 {
			return nil
		}
		expired := map[string]bool{}
		for _, id := range Expired(m.Leases, Now()-grace) {
			expired[id] = true
			if !stopped[id] {
				log.Warn("Stopping a machine: capstand does not run, and its lease has expired", "id", id)
				stopped[id] = stop(ctx, m, id, log)
			}
		}
		for id := range stopped {
			if !expired[id] {
				delete(stopped, id)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// stop marks the machine first: a capstand that starts in between must not start it again.
func stop(ctx context.Context, m Memory, id string, log *slog.Logger) bool {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	err := errors.Join(Mark(m.Root, id), cgroup.Group(filepath.Join(m.Cgroup, id)).Remove(ctx))
	if err != nil {
		log.Error("Cannot stop a machine; the guard tries again", "id", id, "error", err)
	}
	return err == nil
}
