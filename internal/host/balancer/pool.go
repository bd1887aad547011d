package balancer

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// pool contains the backends and their health, and selects them in turn.
type pool struct {
	mu       sync.Mutex
	backends []*backend
	next     int
	// changed is closed and replaced when a backend becomes healthy.
	changed chan struct{}
}

// backend is a Backend with its health and its connections.
type backend struct {
	Backend
	healthy bool
	// open is the number of connections of clients.
	open atomic.Int64
	// removed is done when the backend is no longer in the configuration. Its machine is being removed, so its connections
	// are ended and clients connect to another backend.
	removed context.Context
	remove  context.CancelFunc
	// connected is done when the connections must end: the backend is removed, or cut off. Later connections have another one.
	connected context.Context
	cut       context.CancelFunc
}

func newBackend(config Backend) *backend {
	b := &backend{Backend: config}
	b.removed, b.remove = context.WithCancel(context.Background())
	b.connected, b.cut = context.WithCancel(b.removed)
	return b
}

func newPool() *pool { return &pool{changed: make(chan struct{})} }

// set replaces the backends of the pool and returns the new ones. Backends that stay keep their health and connections.
func (p *pool) set(want []Backend) (added []*backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now []*backend
	for _, w := range want {
		i := slices.IndexFunc(p.backends, func(b *backend) bool { return b.Address == w.Address })
		if i >= 0 {
			now = append(now, p.backends[i])
			continue
		}
		b := newBackend(w)
		now, added = append(now, b), append(added, b)
	}
	for _, b := range p.backends {
		if !slices.Contains(now, b) {
			b.remove()
		}
	}
	p.backends = now
	return added
}

// setHealth records a backend's health and returns whether it changed.
func (p *pool) setHealth(b *backend, healthy bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b.healthy == healthy {
		return false
	}
	b.healthy = healthy
	if healthy {
		close(p.changed)
		p.changed = make(chan struct{})
	}
	return true
}

// connected returns the context of a connection to a backend.
func (p *pool) connected(b *backend) context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	return b.connected
}

// cut ends the connections to a backend that is cut off: clients would wait for it.
func (p *pool) cut(b *backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b.cut()
	b.connected, b.cut = context.WithCancel(b.removed)
}

// pick returns the next healthy backend in turn that is not in tried. If there is none, it returns nil and a channel that is
// closed when another attempt is useful.
func (p *pool) pick(tried []*backend) (*backend, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.backends {
		at := (p.next + i) % len(p.backends)
		if b := p.backends[at]; b.healthy && !slices.Contains(tried, b) {
			p.next = at + 1
			return b, nil
		}
	}
	return nil, p.changed
}

func (p *pool) healthy() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	addresses := []string{}
	for _, b := range p.backends {
		if b.healthy {
			addresses = append(addresses, b.Address)
		}
	}
	return addresses
}

// load calls see with each backend.
func (p *pool) load(see func(address string, healthy bool, open int64)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.backends {
		see(b.Address, b.healthy, b.open.Load())
	}
}
