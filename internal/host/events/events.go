// Package events sends the events of a host to its watchers: the clients of the Watch call.
//
// Layer: host. Allowed imports: api, library, contract.
package events

import (
	"context"
	"sync"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/wakeup"
)

// Broadcaster sends events to all watchers. A slow watcher gets only the newest state of each object, and does not delay others.
type Broadcaster struct {
	mu       sync.Mutex
	watchers map[*Watcher]struct{}
}

// Watcher contains the events that its client has not received yet: the newest event of each object, in the order of the
// objects' first change.
type Watcher struct {
	mu      sync.Mutex
	order   []string
	pending map[string]*hostpb.Event
	wake    wakeup.Signal
}

// New returns a broadcaster without watchers.
func New() *Broadcaster { return &Broadcaster{watchers: map[*Watcher]struct{}{}} }

// Subscribe starts a watcher; call the returned function to end it. The watcher gets all events that are published from now
// on, so a list that is read after Subscribe misses no change.
func (b *Broadcaster) Subscribe() (*Watcher, func()) {
	w := &Watcher{pending: map[string]*hostpb.Event{}, wake: wakeup.New()}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.watchers[w] = struct{}{}
	return w, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.watchers, w)
	}
}

// Publish sends an event to every watcher. The caller must not change the event afterwards.
func (b *Broadcaster) Publish(event *hostpb.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for w := range b.watchers {
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
	w.wake.Send()
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

// Machine returns the event of a machine.
func Machine(t hostpb.Event_Type, m *hostpb.Machine) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_Machine{Machine: m}}
}

// LoadBalancer returns the event of a load balancer.
func LoadBalancer(t hostpb.Event_Type, lb *hostpb.LoadBalancer) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_LoadBalancer{LoadBalancer: lb}}
}

// Host returns the event of the host itself.
func Host(info *hostpb.HostInfo) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: info}}
}
