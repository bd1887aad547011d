package machine

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"

	"capstan.dev/capstan/internal/reconciling"
)

// Space for a volume is promised by its object, until its host has made it. The choice of a host reads the objects of all namespaces from the
// cache, so their number does not delay the machines of others. A process adds the volumes that it has created (createdVolumes), and chooses
// no host before its cache has contained those of an earlier leader (earlierVolumes). Missing for a moment are a volume whose creation got no
// answer, and those that other managers create at the same time: capstand refuses the second volume if there is no space for both.

// createdVolumes contains the volumes that this process has created, until its cache contains them.
type createdVolumes struct {
	mu    sync.Mutex
	byUID map[types.UID]infrav1.CapstanVolume
}

func (c *createdVolumes) note(v *infrav1.CapstanVolume) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byUID == nil {
		c.byUID = map[types.UID]infrav1.CapstanVolume{}
	}
	c.byUID[v.UID] = *v.DeepCopy()
}

// seen forgets a volume that the cache contains or has contained.
func (c *createdVolumes) seen(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byUID, uid)
}

// release forgets the volumes of a machine that is gone. The cache never contains one that was deleted while the watch was interrupted.
func (c *createdVolumes) release(machine client.ObjectKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, v := range c.byUID {
		if (client.ObjectKey{Namespace: v.Namespace, Name: v.Spec.MachineName}) == machine {
			delete(c.byUID, uid)
		}
	}
}

// list returns the volumes of the cache with those that it does not contain yet. The caller must not change them. The lock is held while the
// cache is read: a volume that is seen meanwhile would be missing in an older list.
func (c *createdVolumes) list(ctx context.Context, cache client.Reader) ([]infrav1.CapstanVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := &infrav1.CapstanVolumeList{}
	if err := cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return slices.AppendSeq(list.Items, maps.Values(missingIn(list.Items, c.byUID))), nil
}

// missingIn returns the volumes of a map that a list does not contain.
func missingIn(list []infrav1.CapstanVolume, byUID map[types.UID]infrav1.CapstanVolume) map[types.UID]infrav1.CapstanVolume {
	missing := maps.Clone(byUID)
	for i := 0; i < len(list) && len(missing) > 0; i++ { // Mostly nothing is missing, and the list can be long.
		delete(missing, list[i].UID)
	}
	return missing
}

// decidedVolumes returns the volumes of all namespaces. The caller must not change them. The cache of a manager that watches one namespace does
// not contain the others, so this manager reads from the API server.
func (r *Reconciler) decidedVolumes(ctx context.Context) ([]infrav1.CapstanVolume, error) {
	if r.WatchNamespace == "" {
		return r.created.list(ctx, r.Client)
	}
	list := &infrav1.CapstanVolumeList{}
	err := r.LiveClient.List(ctx, list)
	return list.Items, err
}

// earlierVolumes are those that were stored when this process began, until its cache has contained them.
type earlierVolumes struct {
	contained atomic.Bool
	mu        sync.Mutex
	missing   map[types.UID]infrav1.CapstanVolume // nil before the first list
}

// followPause is the time until the next comparison of the cache with the API server. The cache of a manager is rarely behind.
const followPause = time.Second

// followVolumes waits until the cache has contained the volumes of all namespaces that were stored when this process began.
func (r *Reconciler) followVolumes(ctx context.Context, s *scope) error {
	if r.WatchNamespace != "" {
		return nil
	}
	contained, err := r.earlier.compare(ctx, r.Client, r.LiveClient)
	if err == nil && !contained {
		ctrl.LoggerFrom(ctx).V(4).Info("The cache does not contain all volumes yet")
		s.again = followPause
		return reconciling.ErrWaiting
	}
	return err
}

// compare reports whether the cache has contained all volumes. It is false while another caller compares: the list can take long.
func (e *earlierVolumes) compare(ctx context.Context, cache, live client.Reader) (bool, error) {
	if e.contained.Load() {
		return true, nil
	}
	if !e.mu.TryLock() {
		return false, nil
	}
	defer e.mu.Unlock()
	list := &infrav1.CapstanVolumeList{}
	if e.missing == nil {
		if err := live.List(ctx, list); err != nil {
			return false, err
		}
		e.missing = map[types.UID]infrav1.CapstanVolume{}
		for _, v := range list.Items {
			e.missing[v.UID] = v
		}
	}
	if err := cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	e.missing = missingIn(list.Items, e.missing)
	for uid, v := range e.missing {
		stored := &infrav1.CapstanVolume{}
		err := live.Get(ctx, client.ObjectKeyFromObject(&v), stored)
		if client.IgnoreNotFound(err) != nil {
			return false, err
		}
		if err != nil || stored.UID != uid { // It was deleted since the list.
			delete(e.missing, uid)
		}
	}
	e.contained.Store(len(e.missing) == 0)
	return e.contained.Load(), nil
}
