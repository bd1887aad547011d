package machine

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Space for a volume is promised by its object, until its host has made it. The choice of a host reads the objects of all namespaces from the
// cache, so their number does not delay the machines of others. No volume is missing there:
//
//  1. A process keeps the volumes that it creates until its cache contains them (createdVolumes).
//  2. A process chooses no host for a new volume before its cache has contained all volumes that were stored when it began (followVolumes):
//     those of an earlier leader. A write of that one which arrives later is missing for a moment, as it was for a request to the API server.
//     capstand then refuses the second volume if there is no space for both.

// createdVolumes contains the volumes that this process has created, by machine, until its cache contains them or the machine is gone.
type createdVolumes struct {
	mu sync.Mutex
	of map[client.ObjectKey][]infrav1.CapstanVolume
}

func (c *createdVolumes) note(m *infrav1.CapstanMachine, v *infrav1.CapstanVolume) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = map[client.ObjectKey][]infrav1.CapstanVolume{}
	}
	key := client.ObjectKeyFromObject(m)
	c.of[key] = append(c.of[key], *v.DeepCopy())
}

// release forgets the volumes of a machine that is gone: one that was deleted before the cache contained it would stay here.
func (c *createdVolumes) release(machine client.ObjectKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.of, machine)
}

// add returns the volumes of the cache with those that it does not contain yet, and forgets the others. Only the holder of Reconciler.placing
// creates volumes and calls add, so no caller has an older list.
func (c *createdVolumes) add(cached []infrav1.CapstanVolume) []infrav1.CapstanVolume {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.of) == 0 {
		return cached
	}
	known := uidsOf(cached)
	for machine, created := range c.of {
		created = slices.DeleteFunc(created, func(v infrav1.CapstanVolume) bool { return known[v.UID] })
		if c.of[machine] = created; len(created) == 0 {
			delete(c.of, machine)
		}
		cached = append(cached, created...)
	}
	return cached
}

func uidsOf(volumes []infrav1.CapstanVolume) map[types.UID]bool {
	out := make(map[types.UID]bool, len(volumes))
	for i := range volumes {
		out[volumes[i].UID] = true
	}
	return out
}

// decidedVolumes returns the volumes of all namespaces with those that this manager has created. The caller must not change them. The cache of
// a manager that watches one namespace does not contain the others, so this manager reads from the API server.
func (r *Reconciler) decidedVolumes(ctx context.Context) ([]infrav1.CapstanVolume, error) {
	list := &infrav1.CapstanVolumeList{}
	if r.WatchNamespace != "" {
		err := r.LiveClient.List(ctx, list)
		return list.Items, err
	}
	err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy)
	return r.created.add(list.Items), err
}

// followPause is the time until the next comparison of the cache with the API server. The cache of a manager is rarely behind.
const followPause = time.Second

// followVolumes waits until the cache has contained the stored volumes of all namespaces once.
func (r *Reconciler) followVolumes(ctx context.Context, s *scope) error {
	if r.WatchNamespace != "" || r.volumesFollowed.Load() {
		return nil
	}
	stored, cached := &infrav1.CapstanVolumeList{}, &infrav1.CapstanVolumeList{}
	if err := r.LiveClient.List(ctx, stored); err != nil {
		return err
	}
	if err := r.Client.List(ctx, cached, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	known := uidsOf(cached.Items)
	for i := range stored.Items {
		if !known[stored.Items[i].UID] { // Or it was deleted just now.
			ctrl.LoggerFrom(ctx).V(4).Info("The cache does not contain all volumes yet", "CapstanVolume", client.ObjectKeyFromObject(&stored.Items[i]))
			s.again = followPause
			return errWaiting
		}
	}
	r.volumesFollowed.Store(true)
	return nil
}
