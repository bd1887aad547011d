package ipam

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/addressclaim"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/ipam/pool"
	"capstan.dev/capstan/internal/reconciling"
)

type existsFunc func(context.Context, types.NamespacedName, types.UID) (bool, error)

type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// queues contains the controllers' queues, so that the ledger can wake waiting objects.
type queues struct {
	mu    sync.Mutex
	claim requestQueue
	pool  map[string]requestQueue
}

func (q *queues) setClaims(queue requestQueue) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.claim = queue
}

func (q *queues) setPools(kind string, queue requestQueue) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pool == nil {
		q.pool = map[string]requestQueue{}
	}
	q.pool[kind] = queue
}

// wakeClaim requests a reconcile of a claim. Before the controller has started it does nothing, because the start
// reconciles all claims.
func (q *queues) wakeClaim(name types.NamespacedName) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.claim != nil {
		q.claim.Add(reconcile.Request{NamespacedName: name})
	}
}

// againClaim schedules the next attempt for a claim after an error. A shorter delay of the rate limiter has precedence.
func (q *queues) againClaim(req reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.claim != nil {
		q.claim.AddAfter(req, longestRetry)
	}
}

// againPool is againClaim for pools of a kind.
func (q *queues) againPool(kind string) func(reconcile.Request) {
	return func(req reconcile.Request) {
		q.mu.Lock()
		defer q.mu.Unlock()
		if queue := q.pool[kind]; queue != nil {
			queue.AddAfter(req, longestRetry)
		}
	}
}

// poolChanged requests a reconcile of a pool after a delay. Several changes lead to one reconcile.
func (q *queues) poolChanged(key ledger.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if queue := q.pool[key.Kind]; queue != nil {
		queue.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: key.Namespace, Name: key.Name}}, countDelay)
	}
}

// follow keeps the ledger's index up to date with the watch.
func (s *setup) follow(ctx context.Context) error {
	s.registry.SetHooks(s.queues.wakeClaim, s.queues.poolChanged)
	if err := s.mgr.Add(everyReplica(func(ctx context.Context) error {
		wait.UntilWithContext(ctx, func(context.Context) { s.registry.Prune() }, pruneEvery)
		return nil
	})); err != nil {
		return err
	}
	if err := followKind(ctx, s.mgr.GetCache(), s.registry.AddressSeen, s.registry.AddressGone); err != nil {
		return err
	}
	return followKind(ctx, s.mgr.GetCache(), s.claimSeen, s.registry.ClaimGone)
}

// claimSeen puts a claim into the queue of its pool. A claim that has got the watch label of another manager loses its place, because it
// would hold back later claims of this manager.
func (s *setup) claimSeen(c *capiipamv1.IPAddressClaim) {
	if s.serves(c) {
		s.registry.ClaimSeen(c)
	} else {
		s.registry.ClaimLeft(c)
	}
}

func followKind[T any, O interface {
	*T
	client.Object
}](ctx context.Context, from cache.Cache, seen, gone func(O)) error {
	informer, err := from.GetInformer(ctx, O(new(T)))
	if err != nil {
		return fmt.Errorf("following %T: %w", O(new(T)), err)
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := obj.(O); ok {
				seen(o)
			}
		},
		UpdateFunc: func(_, obj any) {
			if o, ok := obj.(O); ok {
				seen(o)
			}
		},
		DeleteFunc: func(obj any) {
			if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = last.Obj
			}
			if o, ok := obj.(O); ok {
				gone(o)
			}
		},
	})
	return err
}

// claimEvents maps the events of other objects to claims.
type claimEvents struct {
	client client.Client
	serves func(client.Object) bool
}

// ofAddress maps an IPAddress to the claim of its name, also if it belongs to another pool, because it may block the
// claim.
func (e *claimEvents) ofAddress(_ context.Context, obj client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(obj)}}
}

// ofPool returns the claims of a pool that have no address or are being deleted.
func (e *claimEvents) ofPool(ctx context.Context, obj client.Object) []reconcile.Request {
	p, ok := obj.(ipamv1.Pool)
	if !ok {
		return nil
	}
	key := ledger.KeyOfPool(p)
	return e.open(ctx, key.Namespace, func(c *capiipamv1.IPAddressClaim) bool {
		of, isOurs := ledger.KeyOf(c.Spec.PoolRef, c.Namespace)
		return isOurs && of == key
	})
}

// ofCluster returns the claims of a Cluster that have no address or are being deleted.
func (e *claimEvents) ofCluster(ctx context.Context, obj client.Object) []reconcile.Request {
	return e.open(ctx, obj.GetNamespace(), func(c *capiipamv1.IPAddressClaim) bool {
		return addressclaim.ClusterNameOf(c) == obj.GetName()
	})
}

// ofNamespace returns the claims of a Namespace that wait for a pool with a namespace selector.
func (e *claimEvents) ofNamespace(ctx context.Context, obj client.Object) []reconcile.Request {
	return e.open(ctx, obj.GetName(), func(c *capiipamv1.IPAddressClaim) bool {
		return c.Spec.PoolRef.Kind == ipamv1.GlobalCapstanIPPoolKind
	})
}

func (e *claimEvents) open(ctx context.Context, namespace string, match func(*capiipamv1.IPAddressClaim) bool) []reconcile.Request {
	return reconciling.RequestsIf(ctx, e.client, &capiipamv1.IPAddressClaimList{}, func(c *capiipamv1.IPAddressClaim) bool {
		return e.serves(c) && match(c) && (c.Status.AddressRef.Name == "" || !c.DeletionTimestamp.IsZero())
	}, client.InNamespace(namespace))
}

// poolsBeside lists the pools of a kind that are compared with a changed pool, because it may overlap any of them.
func poolsBeside(ctx context.Context, c client.Client, kind string, changed client.Object) []reconcile.Request {
	_, isPool := changed.(ipamv1.Pool)
	if isPool && kind == ipamv1.GlobalCapstanIPPoolKind && changed.GetNamespace() != "" {
		return nil
	}
	// A changed global pool has no namespace: then these are the pools of all namespaces.
	beside, err := pool.OfKind(ctx, c, kind, changed.GetNamespace())
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot read pools")
		return nil
	}
	var out []reconcile.Request
	for _, p := range beside {
		if p.GetUID() != changed.GetUID() {
			out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(p)})
		}
	}
	return out
}

// unservedFirst gives unserved claims that a starting manager finds the priority of new claims. controller-runtime gives
// existing objects a lower priority than changed ones, so on a busy cluster they could wait for ever, and delay later
// claims of their pool. A claim that is created later keeps its normal priority: a second request would reconcile it
// twice, the second time with a stale cache.
func unservedFirst() handler.Funcs {
	return handler.Funcs{CreateFunc: func(_ context.Context, e event.CreateEvent, q requestQueue) {
		c, ok := e.Object.(*capiipamv1.IPAddressClaim)
		if !ok || !e.IsInInitialList || c.DeletionTimestamp.IsZero() && c.Status.AddressRef.Name != "" {
			return
		}
		req := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(c)}
		if pq, ok := q.(priorityqueue.PriorityQueue[reconcile.Request]); ok {
			pq.AddWithOpts(priorityqueue.AddOpts{Priority: ptr.To(0)}, req)
			return
		}
		q.Add(req)
	}}
}

// claimChanged drops events that the provider's own writes cause: the finalizer, and the status of a served claim.
func claimChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *capiipamv1.IPAddressClaim) bool {
		switch {
		case !after.DeletionTimestamp.IsZero(), before.UID != after.UID, before.ResourceVersion == after.ResourceVersion:
			return true
		case !maps.Equal(before.Labels, after.Labels) && !onlyAdds(before.Labels, after.Labels),
			before.Annotations[ipamv1.AddressAnnotation] != after.Annotations[ipamv1.AddressAnnotation],
			annotations.HasPaused(before) != annotations.HasPaused(after),
			// The annotations may have had no room for that of the provider.
			!slices.Contains(after.Finalizers, ipamv1.ClaimFinalizer) && !maps.Equal(before.Annotations, after.Annotations):
			return true
		}
		// Another client removed our value.
		return len(after.Finalizers) < len(before.Finalizers) ||
			before.Status.AddressRef.Name != "" && after.Status.AddressRef.Name == ""
	})
}

// onlyAdds reports whether labels were only added, like the provider's label.
func onlyAdds(before, after map[string]string) bool {
	for k, v := range before {
		if after[k] != v {
			return false
		}
	}
	_, hadFilter := before[clusterv1.WatchLabel]
	_, hasFilter := after[clusterv1.WatchLabel]
	_, hadCluster := before[clusterv1.ClusterNameLabel]
	_, hasCluster := after[clusterv1.ClusterNameLabel]
	return hadFilter == hasFilter && hadCluster == hasCluster
}

// addressChanged drops changes that do not affect the claim. Nearly all new IPAddresses are the result of the provider's
// own writes.
func (e *claimEvents) addressChanged() predicate.Funcs {
	return predicate.Funcs{
		CreateFunc: func(ev event.CreateEvent) bool { return !e.echo(ev.Object) },
		UpdateFunc: func(ev event.UpdateEvent) bool {
			return !ev.ObjectNew.GetDeletionTimestamp().IsZero() ||
				!slices.Equal(ev.ObjectOld.GetFinalizers(), ev.ObjectNew.GetFinalizers()) ||
				!equality.Semantic.DeepEqual(ev.ObjectOld.GetOwnerReferences(), ev.ObjectNew.GetOwnerReferences())
		},
	}
}

// echo reports whether an IPAddress belongs to an existing claim, and was not moved from another management cluster
// after the claim.
func (e *claimEvents) echo(obj client.Object) bool {
	owner := metav1.GetControllerOf(obj)
	if owner == nil || !obj.GetDeletionTimestamp().IsZero() {
		return false
	}
	c := &capiipamv1.IPAddressClaim{}
	err := e.client.Get(context.Background(), client.ObjectKeyFromObject(obj), c)
	return err == nil && c.UID == owner.UID && c.DeletionTimestamp.IsZero() && !ledger.Copied(c)
}

// poolChanged drops changes of a pool's status, except for the result of its comparison with other pools. Another
// manager can write the result, and allocations depend on it.
func poolChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after ipamv1.Pool) bool {
		return before.GetGeneration() != after.GetGeneration() ||
			before.GetResourceVersion() == after.GetResourceVersion() ||
			before.GetDeletionTimestamp().IsZero() != after.GetDeletionTimestamp().IsZero() ||
			!maps.Equal(before.GetAnnotations(), after.GetAnnotations()) ||
			!maps.Equal(before.GetLabels(), after.GetLabels()) ||
			!slices.Equal(before.GetFinalizers(), after.GetFinalizers()) ||
			!ledger.SameComparison(before, after)
	})
}

// poolChangedForClaims passes changes after which a pool can serve more claims. The ledger reports free addresses and
// changes of the spec and its overlaps.
func poolChangedForClaims() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after ipamv1.Pool) bool {
		return len(before.GetFinalizers()) != len(after.GetFinalizers()) ||
			before.GetUID() != after.GetUID() ||
			annotations.HasPaused(before) != annotations.HasPaused(after) ||
			before.GetDeletionTimestamp().IsZero() != after.GetDeletionTimestamp().IsZero()
	})
}

// clusterChanged passes the changes that unblock a Cluster's claims.
func clusterChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.Cluster) bool {
		return annotations.IsPaused(before, before) && !annotations.IsPaused(after, after)
	})
}

// clusterPaused passes the pause of a Cluster, which is the first step of a clusterctl move.
func clusterPaused() predicate.Predicate {
	return reconciling.Became(func(c *clusterv1.Cluster) bool { return annotations.IsPaused(c, c) })
}
