// Package hub passes the changes on a host to its watchers.
//
// Layer: host.
package hub

import (
	"context"
	"sync"

	"capstan.dev/capstan/internal/host/hostpb"
)

// Hub passes changes to watchers. A slow watcher gets only the newest state of each object, and does not delay others.
type Hub struct {
	mu       sync.Mutex
	watchers map[*Watcher]struct{}
}

// Watcher contains the events that its client has not received yet: the newest event of each object, in the order of the
// objects' first change.
type Watcher struct {
	mu      sync.Mutex
	order   []string
	pending map[string]*hostpb.Event
	wake    chan struct{}
}

// New returns a hub without watchers.
func New() *Hub { return &Hub{watchers: map[*Watcher]struct{}{}} }

// Subscribe starts a watcher; call the returned function to end it. The watcher gets all events that are published from now
// on, so a list that is read after Subscribe misses no change.
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

// Publish passes an event to every watcher. The caller must not change the event afterwards.
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
	default: // The watcher was woken before and has not read yet.
	}
}

// Take waits for events and returns all of them.
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
