package fencing

import (
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"capstan.dev/capstan/internal/boottime"
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
	all := stops{begun: map[string]bool{}}
	for {
		m, fresh := ReadMemory(path)
		if fresh || len(m.Leases) == 0 {
			return nil
		}
		expired := Expired(m.Leases, boottime.Now()-grace)
		all.keep(expired)
		for _, id := range expired {
			if !all.begin(id) {
				continue
			}
			log.Warn("Stopping a machine: capstand does not run, and its lease has expired", "id", id)
			// A process that waits for a disk that hangs must not delay the end of other machines.
			go func() {
				unmarked, alive := stop(ctx, marks(m.Root, path), m.Cgroup, id)
				if unmarked != nil {
					log.Error("Cannot record that fencing stops a machine: a capstand that starts can start it again", "id", id, "error", unmarked)
				}
				if alive != nil {
					log.Error("Cannot stop a machine; the guard tries again", "id", id, "error", alive)
					all.failed(id)
				}
			}()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func stop(ctx context.Context, marks Marks, parent, id string) (unmarked, alive error) {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	return marks.stop(ctx, id, cgroup.Group(filepath.Join(parent, id)).Remove)
}

// stops are the machines with an expired lease that the guard stops or has stopped.
type stops struct {
	mu    sync.Mutex
	begun map[string]bool
}

// begin returns whether the machine must be stopped now.
func (s *stops) begin(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	begun := s.begun[id]
	s.begun[id] = true
	return !begun
}

// failed lets the next round try again.
func (s *stops) failed(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.begun, id)
}

// keep forgets other machines: their leases were renewed.
func (s *stops) keep(expired []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.begun, func(id string, _ bool) bool { return !slices.Contains(expired, id) })
}
