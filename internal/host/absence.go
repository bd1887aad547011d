package host

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
)

// While no manager is connected, the owners of machines may replace them on other hosts. capstand never stops a machine for
// this reason, but after an absence it does not start one either until the manager has confirmed it. The absence is measured
// when capstand starts: a machine that ends later was running, so nothing else has its place.
//
// The wait is limited as long as no manager of the machine's management cluster connects: the management cluster itself may
// run on the machines that wait.

const (
	// DefaultAbsence is the time without a manager after which machines may have been replaced. A manager needs longer to
	// detect the loss of a host and to replace its machines.
	DefaultAbsence = 30 * time.Second
	// DefaultConfirmTimeout is the longest wait for a manager.
	DefaultConfirmTimeout = 10 * time.Minute
)

// contacts records when a manager of each management cluster was last connected.
type contacts struct {
	path string
	log  *slog.Logger
	// absence and timeout are DefaultAbsence and DefaultConfirmTimeout, except in tests.
	absence, timeout time.Duration
	started          time.Time

	mu sync.Mutex
	// before contains the times of the previous capstand, last those of this one.
	before, last map[string]time.Time
	// connected is called with mu unlocked after the first contact with a management cluster.
	connected func(managementCluster string)
}

// openContacts reads the record. Without a readable record, no management cluster was ever connected.
func openContacts(path string, absence, timeout time.Duration, log *slog.Logger) *contacts {
	c := &contacts{
		path: path, log: log, absence: absence, timeout: timeout, started: time.Now(),
		before: map[string]time.Time{}, last: map[string]time.Time{}, connected: func(string) {},
	}
	_ = atomicfile.ReadJSON(path, &c.before)
	return c
}

// mayBeReplaced returns whether the machines of a management cluster that do not run must be confirmed. A contact in the
// future comes from another clock, so the absence is unknown.
func (c *contacts) mayBeReplaced(managementCluster string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, ever := c.before[managementCluster]
	away := c.started.Sub(last)
	return ever && (away < 0 || away > c.absence)
}

// patience returns how long a machine still waits for its confirmation: forever if a manager of its management cluster has
// connected since the start of capstand.
func (c *contacts) patience(managementCluster string, now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, connected := c.last[managementCluster]; connected || c.timeout == 0 {
		return forever
	}
	return max(0, c.timeout-now.Sub(c.started))
}

// follow records the contact with a manager until ctx ends.
func (c *contacts) follow(ctx context.Context, managementCluster string) {
	if c.note(managementCluster) {
		c.connected(managementCluster)
	}
	// Half of the absence is often enough, and rarely writes to the disk.
	ticker := time.NewTicker(c.absence / 2)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			c.note(managementCluster)
			return
		case <-ticker.C:
			c.note(managementCluster)
		}
	}
}

// note records a contact now, and returns whether it is the first one of this capstand.
func (c *contacts) note(managementCluster string) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, known := c.last[managementCluster]
	c.last[managementCluster] = time.Now()
	// A management cluster that is gone for good must not stay on the list forever.
	all := map[string]time.Time{}
	for id, last := range c.before {
		if time.Since(last) < contactLife {
			all[id] = last
		}
	}
	for id, last := range c.last {
		all[id] = last
	}
	if err := atomicfile.WriteJSON(c.path, all, 0o600); err != nil {
		c.log.Error("Cannot record the contact with a manager", "error", err)
	}
	return !known
}

// contactLife is the time for which a contact is remembered.
const contactLife = 365 * 24 * time.Hour
