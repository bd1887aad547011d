package host

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/fencing"
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

// follow records the contact with a manager until ctx ends. A disk that hangs delays the records, but not the times in them.
func (c *contacts) follow(ctx context.Context, managementCluster string) {
	ended := make(chan time.Time, 1)
	defer context.AfterFunc(ctx, func() { ended <- time.Now() })()
	if c.note(managementCluster, time.Now()) {
		c.connected(managementCluster)
	}
	// Half of the absence is often enough, and rarely writes to the disk.
	ticker := time.NewTicker(c.absence / 2)
	defer ticker.Stop()
	for {
		select {
		case at := <-ended:
			c.note(managementCluster, at)
			return
		case <-ticker.C:
			if ctx.Err() == nil {
				c.note(managementCluster, time.Now())
			}
		}
	}
}

// note records a contact, and returns whether it is the first one of this capstand. Another manager can have had a later one.
func (c *contacts) note(managementCluster string, at time.Time) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, known := c.last[managementCluster]
	if at.After(last) {
		c.last[managementCluster] = at
	}
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

// unconfirmedFile is the file in the folder of a machine that may have been replaced. The first contact with a manager ends the absence
// from which capstand concluded this, so the next capstand reads the file.
const unconfirmedFile = "unconfirmed"

func (m *machine) unconfirmedPath() string { return filepath.Join(m.dir, unconfirmedFile) }

// loadDoubts finds out which machines need a confirmation. After an absence, this writes a file for each machine, all at the same
// time.
func (ms *machines) loadDoubts() {
	var loads []func() error
	for _, m := range ms.byID {
		loads = append(loads, func() error {
			m.unconfirmed = m.loadDoubt()
			return nil // loadDoubt logs its errors.
		})
	}
	_ = atomicfile.Together(loads...)
}

// loadDoubt returns whether the machine may have been replaced and no manager has confirmed it since. It records this before a manager can
// connect.
func (m *machine) loadDoubt() bool {
	if m.fenced || atomicfile.Exists(m.unconfirmedPath()) {
		return true
	}
	if !m.host.contacts.mayBeReplaced(m.state.ManagementCluster) {
		return false
	}
	if err := atomicfile.WriteFile(m.unconfirmedPath(), nil, 0o600); err != nil {
		m.log.Error("Cannot record that the machine may have been replaced: the next capstand can start it without a confirmation", "error", err)
	}
	return true
}

// doubt has the reasons why a machine may run on another host, and whether it runs on this one.
type doubt struct {
	// unconfirmed: the host was without a manager, or has stopped the machine.
	unconfirmed bool
	// bound: the machine must not run without a contact. expired: the time since the last contact is over.
	bound, expired bool
	running        bool
}

func (d doubt) any() bool { return d.unconfirmed || d.expired }

// confirmation returns how long a machine with a doubt must still not start, and why; 0 if it may. patience is the rest of the wait for a
// manager.
func (d doubt) confirmation(patience time.Duration) (pause time.Duration, message string) {
	switch {
	case d.running:
		return 0, ""
	case !d.unconfirmed:
		return fencing.Pause, "the host has reached neither a manager nor another host of the cluster yet: the machine starts when it does"
	case d.bound: // The machine may have been replaced without an answer of this host.
		patience = forever
	}
	if patience == 0 {
		return 0, ""
	}
	return patience, "the machine may have been replaced while the management cluster did not reach this host: it starts when a manager confirms it"
}

// contactLife is the time for which a contact is remembered.
const contactLife = 365 * 24 * time.Hour
