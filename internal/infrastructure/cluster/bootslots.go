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

// slotLength bounds how long a cluster that does not come up keeps others waiting.
const slotLength = 15 * time.Second

// bootSlots makes the clusters of a host boot one after the other. It is only in memory: after a restart of the manager all
// clusters boot at once, which only costs time.
type bootSlots struct {
	mu      sync.Mutex
	booting map[client.ObjectKey]bootSlot
	waiting map[client.ObjectKey]struct{}
	wake    chan event.TypedGenericEvent[client.ObjectKey]
}

// bootSlot is that of a cluster that boots.
type bootSlot struct {
	host string
	ends time.Time
}

// acquire gives a cluster a slot on a host that lets so many clusters boot at once. Otherwise it returns
// how long to wait at most; the cluster is woken when a slot is free.
func (b *bootSlots) acquire(key client.ObjectKey, host string, slots int, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.booting == nil {
		b.booting, b.waiting = map[client.ObjectKey]bootSlot{}, map[client.ObjectKey]struct{}{}
	}
	taken, next := 0, slotLength
	for other, its := range b.booting {
		switch left := its.ends.Sub(now); {
		case left <= 0:
			delete(b.booting, other)
		case its.host == host && other != key:
			taken++
			next = min(next, left)
		}
	}
	if taken >= slots {
		b.waiting[key] = struct{}{}
		return next
	}
	delete(b.waiting, key)
	b.booting[key] = bootSlot{host: host, ends: now.Add(slotLength)}
	return 0
}

// release ends the slot of a cluster, if it has one, and wakes those that wait.
func (b *bootSlots) release(key client.ObjectKey) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiting, key)
	if _, ok := b.booting[key]; !ok {
		return
	}
	delete(b.booting, key)
	for waiting := range b.waiting {
		select {
		case b.wake <- event.TypedGenericEvent[client.ObjectKey]{Object: waiting}:
		default: // its timer wakes it
		}
	}
}

// source of the wake-ups.
func (b *bootSlots) source() source.Source {
	return source.TypedChannel(b.wake, handler.TypedFuncs[client.ObjectKey, reconcile.Request]{
		GenericFunc: func(_ context.Context, e event.TypedGenericEvent[client.ObjectKey], queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			queue.Add(reconcile.Request{NamespacedName: e.Object})
		},
	})
}
