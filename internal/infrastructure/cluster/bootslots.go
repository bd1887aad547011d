package cluster

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// turnLength bounds how long a cluster that does not come up keeps others waiting.
const turnLength = 15 * time.Second

// turns makes the clusters of a host boot one after the other. It is only in memory: after a restart of the manager all
// clusters boot at once, which only costs time.
type turns struct {
	mu      sync.Mutex
	booting map[client.ObjectKey]turn
	waiting map[client.ObjectKey]struct{}
	wake    chan event.TypedGenericEvent[client.ObjectKey]
}

// turn is that of a cluster that boots.
type turn struct {
	host string
	ends time.Time
}

// take gives a cluster its turn on a host that lets so many clusters boot at once. Otherwise it returns
// how long to wait at most; the cluster is woken when a turn is over.
func (t *turns) take(key client.ObjectKey, host string, slots int, now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.booting == nil {
		t.booting, t.waiting = map[client.ObjectKey]turn{}, map[client.ObjectKey]struct{}{}
	}
	taken, next := 0, turnLength
	for other, its := range t.booting {
		switch left := its.ends.Sub(now); {
		case left <= 0:
			delete(t.booting, other)
		case its.host == host && other != key:
			taken++
			next = min(next, left)
		}
	}
	if taken >= slots {
		t.waiting[key] = struct{}{}
		return next
	}
	delete(t.waiting, key)
	t.booting[key] = turn{host: host, ends: now.Add(turnLength)}
	return 0
}

// done ends the turn of a cluster, if it has one, and wakes those that wait.
func (t *turns) done(key client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.waiting, key)
	if _, ok := t.booting[key]; !ok {
		return
	}
	delete(t.booting, key)
	for waiting := range t.waiting {
		select {
		case t.wake <- event.TypedGenericEvent[client.ObjectKey]{Object: waiting}:
		default: // its timer wakes it
		}
	}
}

// source of the wake-ups.
func (t *turns) source() source.Source {
	return source.TypedChannel(t.wake, handler.TypedFuncs[client.ObjectKey, reconcile.Request]{
		GenericFunc: func(_ context.Context, e event.TypedGenericEvent[client.ObjectKey], queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			queue.Add(reconcile.Request{NamespacedName: e.Object})
		},
	})
}
