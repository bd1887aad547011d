// Package ipam is Capstan's IPAM provider. It serves the IPAddressClaims of any infrastructure provider that reference a
// CapstanIPPool or GlobalCapstanIPPool.
//
// Layer: reconciler. Allowed imports: api, library, contract.
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
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
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
	"capstan.dev/capstan/internal/ipam/webhook"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// countDelay is the time for which changes of a pool's counts are collected before they are written.
const countDelay = time.Second

// The delays between attempts after errors. A claim keeps its place in the queue of its pool, and delays the claims
// behind it. controller-runtime's limit of 17 minutes is therefore too long.
const (
	firstRetry   = 5 * time.Millisecond
	longestRetry = 15 * time.Second
)

// Options of the provider.
type Options struct {
	// Options of all reconcilers. The provider uses the namespace, the watch filter of claims and pools, and the
	// concurrency of claimKind and of poolKind. The manager's cache must be restricted to the namespace as well.
	reconciling.Options
	// Recorder records events. The default is a recorder of the manager.
	Recorder events.EventRecorder
	// Quarantine is the time for which an address of another process stays used, because that process may still create
	// its IPAddress. The default is 60 seconds, the longest duration of a request at the API server.
	Quarantine time.Duration
	// MoveSettle is the time without arrivals after which a pool from another management cluster allocates new
	// addresses. The default is 30 seconds.
	MoveSettle time.Duration
	// OrphanAge is the age after which an IPAddress without its claim is removed. A restored backup may create the claim
	// after the address. The default is one minute.
	OrphanAge time.Duration
}

func (o *Options) setDefaults(mgr ctrl.Manager) {
	if o.Recorder == nil {
		o.Recorder = reconciling.EventRecorder(mgr, "capstan-ipam")
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

// Names of the flags and settings of concurrency. Both kinds of pools share one.
const (
	claimKind = "IPAddressClaim"
	poolKind  = ipamv1.CapstanIPPoolKind
)

// Provider runs the IPAM provider in a manager.
var Provider = reconciling.Provider{
	Name:        "ipam",
	Kinds:       []string{claimKind, poolKind},
	AddToScheme: ipamv1.AddToScheme,
	Setup: func(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
		return SetupWithManager(ctx, mgr, Options{Options: opts})
	},
	SetupWebhooks: func(_ context.Context, mgr ctrl.Manager, _ reconciling.Options) error {
		return webhook.Setup(mgr)
	},
}

// SetupWithManager adds the provider's controllers to a manager.
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, opts Options) error {
	opts.setDefaults(mgr)
	s := &setup{mgr: mgr, opts: opts}
	if err := s.ledgers(ctx); err != nil {
		return err
	}
	return errors.Join(
		s.claims(ctx),
		s.pools(ctx, &ipamv1.CapstanIPPool{}),
		s.pools(ctx, &ipamv1.GlobalCapstanIPPool{}),
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
	return f.notify(ctx, s.registry)
}

func (s *setup) claims(ctx context.Context) error {
	r := &addressclaim.Reconciler{
		Client:    s.mgr.GetClient(),
		Live:      s.mgr.GetAPIReader(),
		Ledger:    s.registry,
		Recorder:  s.opts.Recorder,
		Serves:    s.serves,
		Watches:   s.opts.Watches,
		OrphanAge: s.opts.OrphanAge,
	}
	s.exists = r.Exists
	events := &claimEvents{client: s.mgr.GetClient(), serves: s.serves}
	b := s.opts.Controller(s.mgr, claimKind).
		WithOptions(s.controllerOptions(claimKind)).
		For(&capiipamv1.IPAddressClaim{}, builder.WithPredicates(predicate.NewPredicateFuncs(s.serves), claimChanged())).
		Watches(&capiipamv1.IPAddressClaim{}, unservedFirst(), predicate.NewPredicateFuncs(s.serves)).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(events.ofAddress), events.addressChanged()).
		Watches(&ipamv1.CapstanIPPool{}, handler.EnqueueRequestsFromMapFunc(events.ofPool), poolChangedForClaims()).
		Watches(&ipamv1.GlobalCapstanIPPool{}, handler.EnqueueRequestsFromMapFunc(events.ofPool), poolChangedForClaims()).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(events.ofCluster), clusterChanged()).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(events.ofNamespace), selection.NamespaceChanged()).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			s.queues.setClaims(q)
			return nil
		}))
	return start(ctx, b, retried{r, s.queues.againClaim})
}

func (s *setup) pools(ctx context.Context, kind ipamv1.Pool) error {
	r := &pool.Reconciler{
		Kind:       kind.PoolKind(),
		Watches:    s.opts.Watches,
		Client:     s.mgr.GetClient(),
		Live:       s.mgr.GetAPIReader(),
		Ledger:     s.registry,
		Recorder:   s.opts.Recorder,
		Exists:     s.exists,
		MoveSettle: s.opts.MoveSettle,
		Namespace:  s.opts.WatchNamespace,
	}
	all := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, changed client.Object) []reconcile.Request {
		return poolsBeside(ctx, s.mgr.GetClient(), kind.PoolKind(), changed)
	})
	b := s.opts.Controller(s.mgr, kind.PoolKind()).
		Named(kind.PoolKind()).
		WithOptions(s.controllerOptions(poolKind)).
		For(kind, builder.WithPredicates(poolChanged())).
		Watches(&ipamv1.CapstanIPPool{}, all, predicate.GenerationChangedPredicate{}).
		Watches(&ipamv1.GlobalCapstanIPPool{}, all, predicate.GenerationChangedPredicate{}).
		Watches(&clusterv1.Cluster{}, all, clusterPaused()).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			s.queues.setPools(kind.PoolKind(), q)
			return nil
		}))
	return start(ctx, b, retried{r, s.queues.againPool(kind.PoolKind())})
}

// controllerOptions returns the options of a kind. Cluster API's builder replaces the rate limiter if
// ReconcilerRateLimiting is enabled.
func (s *setup) controllerOptions(kind string) controller.Options {
	o := s.opts.For(kind)
	o.RateLimiter = workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, longestRetry)
	return o
}

func start(ctx context.Context, b *capicontroller.Builder, r retried) error {
	if _, err := reconciling.BuildWithoutDelay(ctx, b, reconciling.Traced("IP pools", r)); err != nil {
		return fmt.Errorf("setting up the controllers of the IPAM provider: %w", err)
	}
	return nil
}

// retried bounds the delay of ReconcilerRateLimiting after an error: the next attempt starts within longestRetry.
type retried struct {
	reconcile.Reconciler
	again func(reconcile.Request)
}

// Reconcile implements reconcile.Reconciler.
func (r retried) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	result, err := r.Reconciler.Reconcile(ctx, req)
	if err != nil {
		r.again(req)
	}
	return result, err
}

// serves reports whether a claim is for this provider and passes the watch filter.
func (s *setup) serves(obj client.Object) bool {
	c, ok := obj.(*capiipamv1.IPAddressClaim)
	if !ok || !s.opts.Watches(c) {
		return false
	}
	_, ok = ledger.KeyOf(c.Spec.PoolRef, c.Namespace)
	return ok
}
