package hollow

import (
	"context"
	"sync"

	"capstan.dev/capstan/internal/host/hostpb"
)

// hub hands changes to watchers. A slow watcher gets only the newest state of each object; nobody waits for it.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	mu      sync.Mutex
	order   []string
	pending map[string]*hostpb.Event
	wake    chan struct{}
}

func newHub() *hub { return &hub{watchers: map[*watcher]struct{}{}} }

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
	key := "host"
	if m := event.GetMachine(); m != nil {
		key = m.GetSpec().GetId()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.put(key, event)
	}
}

func (w *watcher) put(key string, event *hostpb.Event) {
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

func machineEvent(t hostpb.Event_Type, m *hostpb.Machine) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_Machine{Machine: m}}
}

func hostEvent(info *hostpb.HostInfo) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: info}}
}
