package host

import (
	"context"
	"sync"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
)

// hub hands changes to watchers. A watcher that is slow gets only the newest state of each object;
// nobody waits for it.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// watcher holds what its client was not told yet: the newest event of each object, in order of the
// objects' first change.
type watcher struct {
	mu      sync.Mutex
	order   []string
	pending map[string]*hostpb.Event
	wake    chan struct{}
}

func newHub() *hub { return &hub{watchers: map[*watcher]struct{}{}} }

// subscribe starts a watcher; call the returned function at its end. Events that are published from
// now on reach it, so a list that is taken after subscribe misses nothing.
func (h *hub) subscribe() (*watcher, func()) {
	w := &watcher{pending: map[string]*hostpb.Event{}, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[w] = struct{}{}
	return w, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, w)
	}
}

// publish tells every watcher. The event must not be changed afterwards.
func (h *hub) publish(event *hostpb.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.put(event)
	}
}

func (w *watcher) put(event *hostpb.Event) {
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

// take waits for news and returns all of it.
func (w *watcher) take(ctx context.Context) ([]*hostpb.Event, error) {
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

func machineEvent(t hostpb.Event_Type, m *hostpb.Machine) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_Machine{Machine: m}}
}

func balancerEvent(t hostpb.Event_Type, lb *hostpb.LoadBalancer) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_LoadBalancer{LoadBalancer: lb}}
}

func hostEvent(info *hostpb.HostInfo) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: info}}
}

func clone[T proto.Message](m T) T { return proto.CloneOf(m) }
