// Package ipam is Capstan's IPAM provider: it serves the IPAddressClaims of any
// infrastructure provider that name a CapstanIPPool or GlobalCapstanIPPool.
package ipam

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/labels"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/addressclaim"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/ipam/metrics"
	"capstan.dev/capstan/internal/ipam/pool"
	"capstan.dev/capstan/internal/selection"
)

// DefaultConcurrency is the number of claims that are served at a time. Most of
// that time is spent waiting for the API server.
const DefaultConcurrency = 32

// countDelay is how long changes of a pool's counts are collected before they
// are written.
const countDelay = time.Second

// The delays before a claim or pool is tried again after an error. A claim that
// is tried again keeps its place in line, so it must not stay away for long, as
// it would with controller-runtime's own limit of 17 minutes.
const (
	firstRetry   = 5 * time.Millisecond
	longestRetry = 15 * time.Second
)

// Options of the provider.
type Options struct {
	// WatchNamespace restricts the provider to one namespace. The manager's
	// cache must be restricted in the same way. Empty means all.
	WatchNamespace string
	// WatchFilter restricts it to claims whose label
	// cluster.x-k8s.io/watch-filter has this value. Empty means all.
	WatchFilter string
	// Concurrency is the number of claims that are served at a time. The
	// default is DefaultConcurrency.
	Concurrency int
	// PoolConcurrency is the number of pools of each kind that are looked
	// after at a time. The default is 4.
	PoolConcurrency int
	// Recorder of events. The default is one of the manager's.
	Recorder events.EventRecorder
	// Quarantine is how long an address stays taken that another process chose
	// and may still create an IPAddress for. The default is 60 seconds, the
	// longest that the API server lets a request live.
	Quarantine time.Duration
	// MoveSettle is how long a pool that came from another management cluster
	// must have been quiet before it hands out new addresses. The default is
	// 30 seconds.
	MoveSettle time.Duration
	// OrphanAge is how old an IPAddress without its claim must be before it is
	// removed: a restored backup may bring the claim after the address. The
	// default is one minute.
	OrphanAge time.Duration
}

func (o *Options) setDefaults(mgr ctrl.Manager) {
	if o.Concurrency <= 0 {
		o.Concurrency = DefaultConcurrency
	}
	if o.PoolConcurrency <= 0 {
		o.PoolConcurrency = 4
	}
	if o.Recorder == nil {
		o.Recorder = mgr.GetEventRecorder("capstan-ipam")
	}
	if o.Quarantine <= 0 {
		o.Quarantine = time.Minute
	}
	if o.MoveSettle <= 0 {
		o.MoveSettle = 30 * time.Second
	}
	if o.OrphanAge <= 0 {
		o.OrphanAge = time.Minute
	}
}

// +kubebuilder:rbac:groups=ipam.capstan.dev,resources=capstanippools;globalcapstanippools,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=ipam.capstan.dev,resources=capstanippools/status;globalcapstanippools/status,verbs=update
// +kubebuilder:rbac:groups=ipam.capstan.dev,resources=capstanippools/finalizers;globalcapstanippools/finalizers,verbs=update
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims,verbs=get;list;watch;patch;update
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims/status,verbs=patch
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims/finalizers,verbs=update
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddresses,verbs=get;list;watch;create;patch;update;delete
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch

// SetupWithManager adds the provider's controllers to a manager.
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, opts Options) error {
	opts.setDefaults(mgr)
	s := &setup{mgr: mgr, opts: opts}
	if err := s.ledgers(ctx); err != nil {
		return err
	}
	return errors.Join(
		s.claims(),
		s.pools(&ipamv1.CapstanIPPool{}),
		s.pools(&ipamv1.GlobalCapstanIPPool{}),
		s.follow(ctx),
	)
}

type setup struct {
	mgr      ctrl.Manager
	opts     Options
	registry *ledger.Registry
	exists   existsFunc
	queues   queues
}

func (s *setup) ledgers(ctx context.Context) error {
	o := ledger.Options{
		Namespace:  s.opts.WatchNamespace,
		Quarantine: s.opts.Quarantine,
		MoveSettle: s.opts.MoveSettle,
		Observe:    metrics.Observe,
	}
	if s.opts.WatchNamespace == "" {
		s.registry = ledger.NewRegistry(s.mgr.GetClient(), s.mgr.GetAPIReader(), o)
		return nil
	}
	f, err := newFollower(s.mgr)
	if err != nil {
		return err
	}
	o.FollowAll = f.follow
	s.registry = ledger.NewRegistry(s.mgr.GetClient(), s.mgr.GetAPIReader(), o)
	return f.tell(ctx, s.registry)
}

func (s *setup) claims() error {
	r := &addressclaim.Reconciler{
		Client:    s.mgr.GetClient(),
		Live:      s.mgr.GetAPIReader(),
		Ledger:    s.registry,
		Recorder:  s.opts.Recorder,
		Serves:    s.serves,
		OrphanAge: s.opts.OrphanAge,
	}
	s.exists = r.Exists
	events := &claimEvents{client: s.mgr.GetClient(), serves: s.serves}
	err := ctrl.NewControllerManagedBy(s.mgr).
		Named("ipaddressclaim").
		WithOptions(controller.Options{MaxConcurrentReconciles: s.opts.Concurrency, RateLimiter: retries()}).
		For(&capiipamv1.IPAddressClaim{}, builder.WithPredicates(predicate.NewPredicateFuncs(s.serves), claimChanged())).
		Watches(&capiipamv1.IPAddressClaim{}, unservedFirst(), builder.WithPredicates(predicate.NewPredicateFuncs(s.serves))).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(events.ofAddress), builder.WithPredicates(events.addressChanged())).
		Watches(&ipamv1.CapstanIPPool{}, handler.EnqueueRequestsFromMapFunc(events.ofPool), builder.WithPredicates(poolChangedForClaims())).
		Watches(&ipamv1.GlobalCapstanIPPool{}, handler.EnqueueRequestsFromMapFunc(events.ofPool), builder.WithPredicates(poolChangedForClaims())).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(events.ofCluster), builder.WithPredicates(clusterChanged())).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(events.ofNamespace), builder.WithPredicates(selection.NamespaceChanged())).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			s.queues.setClaims(q)
			return nil
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the IPAddressClaim controller: %w", err)
	}
	return nil
}

func (s *setup) pools(kind ipamv1.Pool) error {
	r := &pool.Reconciler{
		Kind:       kind.PoolKind(),
		Client:     s.mgr.GetClient(),
		Live:       s.mgr.GetAPIReader(),
		Ledger:     s.registry,
		Recorder:   s.opts.Recorder,
		Exists:     s.exists,
		MoveSettle: s.opts.MoveSettle,
	}
	all := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, changed client.Object) []reconcile.Request {
		return poolsBeside(ctx, s.mgr.GetClient(), kind.PoolKind(), changed)
	})
	err := ctrl.NewControllerManagedBy(s.mgr).
		Named(kind.PoolKind()).
		WithOptions(controller.Options{MaxConcurrentReconciles: s.opts.PoolConcurrency, RateLimiter: retries()}).
		For(kind, builder.WithPredicates(poolChanged())).
		Watches(&ipamv1.CapstanIPPool{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&ipamv1.GlobalCapstanIPPool{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&clusterv1.Cluster{}, all, builder.WithPredicates(clusterPaused())).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			s.queues.setPools(kind.PoolKind(), q)
			return nil
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the %s controller: %w", kind.PoolKind(), err)
	}
	return nil
}

func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, longestRetry)
}

// serves says whether a claim is for this provider.
func (s *setup) serves(obj client.Object) bool {
	c, ok := obj.(*capiipamv1.IPAddressClaim)
	if !ok || s.opts.WatchFilter != "" && !labels.HasWatchLabel(c, s.opts.WatchFilter) {
		return false
	}
	_, ok = ledger.KeyOf(c.Spec.PoolRef, c.Namespace)
	return ok
}
