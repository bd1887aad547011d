package connections

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// paced returns notify for the events of one host, because root on a host can cause any number of them, and all namespaces wait for their
// reconciles. A host whose connection or whose objects change too often waits, and with it its other events. Changes of its capacity do not
// wait for each other: one event after the pause stands for all of them.
func paced(ctx context.Context, notify func(Event)) func(Event) {
	changes := rate.NewLimiter(rate.Every(changePause), changesAtOnce)
	objects := rate.NewLimiter(objectsPerSecond, objectsAtOnce)
	capacity := merged{limit: rate.NewLimiter(rate.Every(changePause), changesAtOnce)}
	return func(e Event) {
		switch { // At the end of ctx, nobody follows the host any more.
		case e.Connection:
			_ = changes.Wait(ctx)
		case e.Machine != nil, e.LoadBalancer != nil:
			_ = objects.Wait(ctx)
		case e.Capacity:
			capacity.call(ctx, func() { notify(e) })
			return
		}
		notify(e)
	}
}

// merged merges calls beyond a limit into one. It never blocks: a reconciler can report capacity, too.
type merged struct {
	limit *rate.Limiter

	mu      sync.Mutex
	waiting bool
}

// call calls f now, or after a pause unless such a call is due already.
func (m *merged) call(ctx context.Context, f func()) {
	m.mu.Lock()
	if m.waiting {
		m.mu.Unlock()
		return
	}
	pause := m.limit.Reserve().Delay()
	m.waiting = pause > 0
	m.mu.Unlock()
	if pause == 0 {
		f()
		return
	}
	time.AfterFunc(pause, func() {
		m.mu.Lock()
		m.waiting = false // A change from now on is not in the state that f reports.
		m.mu.Unlock()
		if ctx.Err() == nil {
			f()
		}
	})
}
