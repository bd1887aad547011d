// Package hub tells the watchers of a host what changes on it.
//
// Layer: host.
package hub

import (
	"context"
	"sync"

	"capstan.dev/capstan/internal/host/hostpb"
)

// Hub hands changes to watchers. A watcher that is slow gets only the newest state of each object;
// nobody waits for it.
type Hub struct {
	mu       sync.Mutex
	watchers map[*Watcher]struct{}
}

// Watcher holds what its client was not told yet: the newest event of each object, in order of the
// objects' first change.
type Watcher struct {
	mu      sync.Mutex
	order   []string
	pending map[string]*hostpb.Event
	wake    chan struct{}
}

// New hub without watchers.
func New() *Hub { return &Hub{watchers: map[*Watcher]struct{}{}} }

// Subscribe starts a watcher; call the returned function at its end. Events that are published from
// now on reach it, so a list that is taken after Subscribe misses nothing.
func (h *Hub) Subscribe() (*Watcher, func()) {
	w := &Watcher{pending: map[string]*hostpb.Event{}, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[w] = struct{}{}
	return w, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, w)
	}
}

// Publish tells every watcher. The event must not be changed afterwards.
func (h *Hub) Publish(event *hostpb.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.put(event)
	}
}

func (w *Watcher) put(event *hostpb.Event) {
	key := eventKey(event)
	w.mu.Lock()
	if w.pending[key] == nil {
		w.order = append(w.order, key)
	}
	w.pending[key] = event
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default: // it knows already
	}
}

// Take waits for news and returns all of it.
func (w *Watcher) Take(ctx context.Context) ([]*hostpb.Event, error) {
	for {
		w.mu.Lock()
		var events []*hostpb.Event
		for _, key := range w.order {
			events = append(events, w.pending[key])
		}
		w.order, w.pending = nil, map[string]*hostpb.Event{}
		w.mu.Unlock()
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-w.wake:
		}
	}
}

func eventKey(event *hostpb.Event) string {
	switch object := event.Object.(type) {
	case *hostpb.Event_Machine:
		return "machine/" + object.Machine.Spec.Id
	case *hostpb.Event_LoadBalancer:
		return "balancer/" + object.LoadBalancer.Id
	}
	return "host"
}

// Machine is the event of a machine.
func Machine(t hostpb.Event_Type, m *hostpb.Machine) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_Machine{Machine: m}}
}

// LoadBalancer is the event of a load balancer.
func LoadBalancer(t hostpb.Event_Type, lb *hostpb.LoadBalancer) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_LoadBalancer{LoadBalancer: lb}}
}

// Host is the event of the host itself.
func Host(info *hostpb.HostInfo) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: info}}
}
