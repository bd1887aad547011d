// Package pool reconciles both kinds of pool: their finalizer, status, metrics and events (rows IPAM-02 and IPAM-06).
//
// Layer: reconciler. Allowed imports: api, library, contract.
package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/ipam/metrics"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
)

// Reconciler reconciles the pools of one kind.
type Reconciler struct {
	Kind string
	// Watches returns true if a pool passes the watch filter (ALL-07). Another manager writes the finalizer and the
	// conditions of other pools; this one can allocate from them for its claims.
	Watches func(client.Object) bool
	Client  client.Client
	// Live reads from the API server, past the cache.
	Live     client.Reader
	Ledger   *ledger.Registry
	Recorder events.EventRecorder
	// Exists reports whether a claim still exists.
	Exists func(context.Context, types.NamespacedName, types.UID) (bool, error)
	// MoveSettle is the time without arrivals after which a moved pool allocates addresses.
	MoveSettle time.Duration
	// Namespace is the only namespace whose Clusters this manager sees. Empty means all.
	Namespace string

	mu    sync.Mutex
	plans planCache
	// saves contains the times of the last copies of each pool's resting addresses.
	saves map[types.UID]time.Time
}

// Reconcile reconciles one pool.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	key := ledger.Key{Kind: r.Kind, Namespace: req.Namespace, Name: req.Name}
	pool := ledger.NewObject(r.Kind)
	if err := r.Client.Get(ctx, req.NamespacedName, pool); err != nil {
		if apierrors.IsNotFound(err) {
			r.Ledger.Drop(key)
			metrics.DropPool(key)
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, err
	}
	book := r.Ledger.Pool(key)
	book.Changed(pool)
	var res ctrl.Result
	var err error
	switch {
	case !r.Watches(pool):
		res, err = r.serveOnly(ctx, book)
	case annotations.HasPaused(pool): // ALL-08
		res, err = r.pause(ctx, pool, book)
	default:
		res, err = r.reconcile(ctx, pool, book)
	}
	switch {
	case errors.Is(err, ledger.ErrPoolGone), apierrors.IsNotFound(err):
		return ctrl.Result{}, nil
	case apierrors.IsConflict(err):
		return ctrl.Result{}, fmt.Errorf("another write came first, retrying: %w", err)
	}
	return res, err
}

// serveOnly maintains the ledger of a pool of another manager. While claims of this manager wait for an address of the
// pool, it ends resting periods and quarantines in time.
func (r *Reconciler) serveOnly(ctx context.Context, book *ledger.Pool) (ctrl.Result, error) {
	if book.View().Waiting == 0 {
		return ctrl.Result{}, nil
	}
	after, err := book.Sweep(ctx, r.Exists)
	return ctrl.Result{RequeueAfter: after}, err
}

// pause shows that the pool is paused. It still copies the resting addresses, for which clusterctl move waits (CTL-13): a
// paused pool would hold back every move of its namespace otherwise.
func (r *Reconciler) pause(ctx context.Context, pool ipamv1.Pool, book *ledger.Pool) (ctrl.Result, error) {
	unsaved, err := r.saveResting(ctx, pool)
	if err != nil {
		return ctrl.Result{}, err
	}
	err = book.Update(ctx, func(doc ipamv1.Pool, _ ledger.View) bool { return setPaused(doc) })
	return ctrl.Result{RequeueAfter: unsaved}, err
}

func (r *Reconciler) reconcile(ctx context.Context, pool ipamv1.Pool, book *ledger.Pool) (ctrl.Result, error) {
	deleting := !pool.GetDeletionTimestamp().IsZero()
	if !deleting {
		if err := r.mark(ctx, pool); err != nil {
			return ctrl.Result{}, err
		}
	}
	left, err := r.arrival(ctx, pool, book)
	if err != nil {
		return ctrl.Result{}, err
	}
	after, err := book.Sweep(ctx, r.Exists)
	if err != nil {
		return ctrl.Result{}, err
	}
	unsaved, err := r.saveResting(ctx, pool)
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := r.report(ctx, pool, book, left > 0); err != nil {
		return ctrl.Result{}, err
	}
	if deleting {
		return r.finish(ctx, pool, book)
	}
	// Resting periods, quarantines, the arrival of a move and the delay of a copy end without an event.
	return ctrl.Result{RequeueAfter: order.Sooner(after, order.Sooner(left, unsaved))}, nil
}

// mark adds the finalizer and records the UID, which distinguishes a copy from the original.
func (r *Reconciler) mark(ctx context.Context, pool ipamv1.Pool) error {
	if controllerutil.ContainsFinalizer(pool, ipamv1.PoolFinalizer) && pool.GetAnnotations()[ipamv1.OriginUIDAnnotation] != "" {
		return nil
	}
	return reconciling.Change(ctx, r.Client, pool, func() {
		controllerutil.AddFinalizer(pool, ipamv1.PoolFinalizer)
		if pool.GetAnnotations()[ipamv1.OriginUIDAnnotation] == "" {
			setOrigin(pool)
		}
	})
}

// setOrigin marks an object as the original: a copy in another management cluster has another UID.
func setOrigin(pool ipamv1.Pool) {
	annotate(pool, map[string]any{ipamv1.OriginUIDAnnotation: string(pool.GetUID())})
}

// annotate sets annotations, and removes those whose value is nil.
func annotate(pool ipamv1.Pool, changes map[string]any) {
	all := maps.Clone(pool.GetAnnotations())
	if all == nil {
		all = map[string]string{}
	}
	for key, value := range changes {
		if text, ok := value.(string); ok {
			all[key] = text
		} else {
			delete(all, key)
		}
	}
	pool.SetAnnotations(all)
}

// arrival returns the remaining wait of a moved pool, and ends the wait when it is over (row IPAM-06).
func (r *Reconciler) arrival(ctx context.Context, pool ipamv1.Pool, book *ledger.Pool) (time.Duration, error) {
	if !ledger.Copied(pool) {
		return 0, nil
	}
	paused, err := r.anyClusterPaused(ctx, pool.GetNamespace())
	if err != nil {
		return 0, err
	}
	if pool.GetNamespace() == "" && r.Namespace != "" {
		paused = true // Clusters of other namespaces may be.
	}
	age := time.Since(pool.GetCreationTimestamp().Time)
	if left := arrivalLeft(r.MoveSettle, age, book.View(), pool.GetNamespace() == "", paused); left > 0 {
		return left, nil
	}
	err = reconciling.Change(ctx, r.Client, pool, func() { setOrigin(pool) })
	if err == nil {
		book.Changed(pool)
	}
	return 0, err
}

// saveResting copies the resting addresses to an annotation, which clusterctl moves (ALL-12). It returns the time until
// the next copy. If the pool in the cache is stale, the patch conflicts, and an event follows.
func (r *Reconciler) saveResting(ctx context.Context, pool ipamv1.Pool) (time.Duration, error) {
	now := time.Now()
	if ledger.Saved(pool, now) && !ledger.BlocksMove(pool) || !pool.GetDeletionTimestamp().IsZero() {
		return 0, nil
	}
	paused, err := r.anyClusterPaused(ctx, pool.GetNamespace())
	if err != nil {
		return 0, err
	}
	if wait := r.saveDue(pool, now, paused || annotations.HasPaused(pool)); wait > 0 {
		return wait, nil
	}
	changes, err := ledger.SavedAnnotations(pool, now)
	if err != nil {
		return 0, err
	}
	if err := reconciling.Change(ctx, r.Client, pool, func() { annotate(pool, changes) }); err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.saves == nil || len(r.saves) > mostPlans {
		r.saves = map[types.UID]time.Time{}
	}
	r.saves[pool.GetUID()] = now
	return 0, nil
}

// saveDue is the time until the copy of a pool's resting addresses may be written again: once a second while a move may
// wait for it, else once in a sixteenth of the resting period.
func (r *Reconciler) saveDue(pool ipamv1.Pool, now time.Time, paused bool) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	var rest time.Duration
	if seconds := pool.PoolSpec().RestSeconds; seconds != nil && !paused {
		rest = time.Duration(*seconds) * time.Second
	}
	return r.saves[pool.GetUID()].Add(ledger.SavePeriod(rest)).Sub(now)
}

func (r *Reconciler) anyClusterPaused(ctx context.Context, namespace string) (bool, error) {
	list := &clusterv1.ClusterList{}
	if err := r.Client.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return false, fmt.Errorf("reading Clusters: %w", err)
	}
	return slices.ContainsFunc(list.Items, func(c clusterv1.Cluster) bool { return annotations.IsPaused(&c, &c) }), nil
}

// report writes the pool's status if it has changed.
func (r *Reconciler) report(ctx context.Context, pool ipamv1.Pool, book *ledger.Pool, arriving bool) error {
	overlaps, err := r.overlaps(ctx, pool)
	if err != nil {
		return err
	}
	var changed []metav1.Condition
	err = book.Update(ctx, func(doc ipamv1.Pool, view ledger.View) bool {
		metrics.SetPool(ledger.KeyOfPool(pool), view)
		if doc.GetGeneration() != pool.GetGeneration() {
			return false // The watch will deliver the spec that belongs to this status.
		}
		wanted := conditionsOf(facts{view: view, overlaps: overlaps, deleting: !doc.GetDeletionTimestamp().IsZero(), arriving: arriving})
		changed = setConditions(doc, wanted)
		doc.PoolStatus().ObservedGeneration = doc.GetGeneration()
		return !upToDate(pool, doc, view)
	})
	if err != nil {
		return err
	}
	for _, c := range changed {
		ctrl.LoggerFrom(ctx).Info("Condition changed", "condition", c.Type, "status", c.Status, "reason", c.Reason, "message", c.Message)
		r.event(pool, c)
	}
	return nil
}

// setPaused sets only the condition Paused. It reports whether the condition has changed.
func setPaused(doc ipamv1.Pool) bool {
	conditions := slices.Clone(doc.GetConditions())
	c := pausedCondition(true)
	c.ObservedGeneration = doc.GetGeneration()
	changed := apimeta.SetStatusCondition(&conditions, c)
	doc.SetConditions(conditions)
	return changed
}

func setConditions(doc ipamv1.Pool, wanted []metav1.Condition) []metav1.Condition {
	var changed []metav1.Condition
	conditions := slices.Clone(doc.GetConditions())
	for _, c := range wanted {
		c.ObservedGeneration = doc.GetGeneration()
		before := apimeta.FindStatusCondition(conditions, c.Type)
		if before != nil && before.Status != c.Status || before == nil && c.Status == metav1.ConditionFalse {
			changed = append(changed, c)
		}
		apimeta.SetStatusCondition(&conditions, c)
	}
	doc.SetConditions(conditions)
	return changed
}

// upToDate reports whether the pool in the watch needs no write, because another manager has written it already.
func upToDate(seen, wanted ipamv1.Pool, view ledger.View) bool {
	s, w := seen.PoolStatus(), wanted.PoolStatus()
	if s.ObservedGeneration != w.ObservedGeneration || s.Addresses == nil || *s.Addresses != *view.Counts() {
		return false
	}
	if s.Allocator == nil || len(s.Allocator.Pending) > 0 && view.Pending == 0 {
		return false
	}
	for _, c := range w.Conditions {
		old := apimeta.FindStatusCondition(s.Conditions, c.Type)
		if old == nil || old.Status != c.Status || old.Reason != c.Reason || old.Message != c.Message || old.ObservedGeneration != c.ObservedGeneration {
			return false
		}
	}
	return true
}

func (r *Reconciler) event(pool ipamv1.Pool, c metav1.Condition) {
	if r.Recorder == nil || c.Type == ipamv1.ReadyCondition || c.Type == clusterv1.PausedCondition {
		return
	}
	kind, message := corev1.EventTypeNormal, c.Type+" again"
	if c.Status == metav1.ConditionFalse {
		kind, message = corev1.EventTypeWarning, c.Message
	}
	r.Recorder.Eventf(pool, nil, kind, c.Reason, "Report", "%s", message)
}

func (r *Reconciler) overlaps(ctx context.Context, pool ipamv1.Pool) ([]overlap, error) {
	others, err := Beside(ctx, r.Client, pool.GetNamespace())
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.plans == nil || len(r.plans) > mostPlans {
		r.plans = planCache{}
	}
	return overlapsOf(pool, others, r.plans.get), nil
}

// Beside returns the pools that a pool of a namespace is compared with. For the empty namespace, these are global pools.
// The result must not be changed.
func Beside(ctx context.Context, c client.Reader, namespace string) ([]ipamv1.Pool, error) {
	global, err := OfKind(ctx, c, ipamv1.GlobalCapstanIPPoolKind, "")
	if err != nil || namespace == "" {
		return global, err
	}
	own, err := OfKind(ctx, c, ipamv1.CapstanIPPoolKind, namespace)
	return append(own, global...), err
}

// OfKind returns the pools of a kind: namespaced ones of a namespace, or of all namespaces. The result must not be
// changed.
func OfKind(ctx context.Context, c client.Reader, kind, namespace string) ([]ipamv1.Pool, error) {
	var out []ipamv1.Pool
	if kind == ipamv1.GlobalCapstanIPPoolKind {
		list := &ipamv1.GlobalCapstanIPPoolList{}
		if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("reading GlobalCapstanIPPools: %w", err)
		}
		for i := range list.Items {
			out = append(out, &list.Items[i])
		}
		return out, nil
	}
	list := &ipamv1.CapstanIPPoolList{}
	if err := c.List(ctx, list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading CapstanIPPools: %w", err)
	}
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out, nil
}

// finish removes the finalizer of a pool when no address references it. Until then, the deletion of an address triggers
// the next reconcile.
func (r *Reconciler) finish(ctx context.Context, pool ipamv1.Pool, book *ledger.Pool) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(pool, ipamv1.PoolFinalizer) {
		return ctrl.Result{}, nil
	}
	if chosen(pool, book.View()) {
		// A request to create an IPAddress can expire without an event.
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	// The watch reports the deletion of objects in the cache. Objects of other namespaces and the newest objects are
	// only in the API server.
	for _, c := range []client.Reader{r.Client, r.Live} {
		if used, err := Uses(ctx, c, pool); err != nil || len(used) > 0 {
			return ctrl.Result{}, err
		}
	}
	ctrl.LoggerFrom(ctx).Info("Releasing the deleted pool: no IPAddress refers to it")
	return ctrl.Result{}, reconciling.Change(ctx, r.Client, pool, func() { controllerutil.RemoveFinalizer(pool, ipamv1.PoolFinalizer) })
}

// chosen reports whether an IPAddress may still be created from a pool that is being deleted, by this process or by one
// that has written the pool's record since.
func chosen(pool ipamv1.Pool, v ledger.View) bool {
	record := pool.PoolStatus().Allocator
	return v.Pending > 0 || record != nil && len(record.Pending) > 0
}

// Uses returns the IPAddresses that reference a pool.
func Uses(ctx context.Context, c client.Reader, pool ipamv1.Pool) ([]*capiipamv1.IPAddress, error) {
	list := &capiipamv1.IPAddressList{}
	if err := c.List(ctx, list, client.InNamespace(pool.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading IPAddresses: %w", err)
	}
	var used []*capiipamv1.IPAddress
	for i := range list.Items {
		ip := &list.Items[i]
		if key, ok := ledger.KeyOf(ip.Spec.PoolRef, ip.Namespace); ok && key == ledger.KeyOfPool(pool) {
			used = append(used, ip)
		}
	}
	return used, nil
}
