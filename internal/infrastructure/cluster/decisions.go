package cluster

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// decisions are the CapstanClusters as this manager recorded them, until the cache contains them. A choice of a network, an identifier,
// a port or an address reads the cache and these, instead of all objects of the API server.
type decisions struct {
	mu       sync.Mutex
	recorded map[types.UID]*infrav1.CapstanCluster
}

// note keeps a CapstanCluster that was read from the cache and has been written.
func (d *decisions) note(c *infrav1.CapstanCluster) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.recorded == nil {
		d.recorded = map[types.UID]*infrav1.CapstanCluster{}
	}
	d.recorded[c.UID] = c.DeepCopy()
}

// apply replaces the items of the cache that are older than the record of this manager, and forgets the records that the cache contains.
// It also forgets objects that the cache has lost: they were in it before they were recorded, so they are deleted. mu is held since the
// cache was read: a record that another caller forgets meanwhile would be missing in an older list.
func (d *decisions) apply(cached []infrav1.CapstanCluster) {
	pending := map[types.UID]*infrav1.CapstanCluster{}
	for i := range cached {
		if own := d.recorded[cached[i].UID]; own != nil && newer(own, &cached[i]) {
			pending[own.UID] = own
			cached[i] = *own
		}
	}
	d.recorded = pending
}

// newer reports whether a was written after b. A version that cannot be compared is not newer: its record would stay for ever.
func newer(a, b *infrav1.CapstanCluster) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order > 0
}

// pending reports whether the cache did not contain the last record of a CapstanCluster at the last apply.
func (d *decisions) pending(uid types.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.recorded[uid] != nil
}

// decided returns the CapstanClusters with the decisions of this manager. The caller must not change them. The cache of a manager that
// watches one namespace does not contain the others, so this manager reads from the API server.
func (r *Reconciler) decided(ctx context.Context) ([]infrav1.CapstanCluster, error) {
	if r.WatchNamespace != "" {
		return r.stored(ctx)
	}
	r.decisions.mu.Lock()
	defer r.decisions.mu.Unlock()
	clusters := &infrav1.CapstanClusterList{}
	if err := r.Client.List(ctx, clusters, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	r.decisions.apply(clusters.Items)
	return clusters.Items, nil
}

// stored returns the CapstanClusters of the API server.
func (r *Reconciler) stored(ctx context.Context) ([]infrav1.CapstanCluster, error) {
	clusters := &infrav1.CapstanClusterList{}
	err := r.LiveClient.List(ctx, clusters)
	return clusters.Items, err
}

// decidedUntil returns the CapstanClusters with all writes before the last write of c: those of users, too.
func (r *Reconciler) decidedUntil(ctx context.Context, c *infrav1.CapstanCluster) ([]infrav1.CapstanCluster, error) {
	clusters, err := r.decided(ctx)
	if err == nil && r.decisions.pending(c.UID) {
		return r.stored(ctx)
	}
	return clusters, err
}
