// Package cluster reconciles CapstanClusters: the network of a cluster's machines and the load balancer
// in front of its API servers.
package cluster

import (
	"cmp"
	"context"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	"sigs.k8s.io/cluster-api/util/finalizers"
	"sigs.k8s.io/cluster-api/util/patch"
	"sigs.k8s.io/cluster-api/util/paused"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters/finalizers,verbs=update
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts;capstanmachines,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machines,verbs=get;list;watch
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddresses,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets;namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

var clusterGroupKind = clusterv1.GroupVersion.WithKind("Cluster").GroupKind()

// Reconciler makes the infrastructure of clusters.
type Reconciler struct {
	manager.Options
	Client client.Client
	Pool   *connections.Pool

	// NetworkPool and NetworkBits say where machine networks are taken from, and how large they are.
	NetworkPool netip.Prefix
	NetworkBits int

	recorder   events.EventRecorder
	controller capicontroller.Controller
	// reserving makes the choice of a network and its record in spec one step. One process leads,
	// so that nobody else chooses at the same time.
	reserving sync.Mutex
	turns     turns
}

// scope is what one reconcile works on.
type scope struct {
	cluster *clusterv1.Cluster
	capstan *infrav1.CapstanCluster
	// helper writes what changed since the object was read or last recorded.
	helper *patch.Helper
}

func (s *scope) key() client.ObjectKey { return client.ObjectKeyFromObject(s.cluster) }

// clusterName is the name of the Cluster, which hosts need for every deletion. The owner reference and the label that
// core writes hold it after the Cluster is gone.
func (s *scope) clusterName() string { return clusterName(s.capstan) }

func clusterName(c *infrav1.CapstanCluster) string {
	if owner := manager.OwnerOf(c, clusterGroupKind); owner != nil {
		return owner.Name
	}
	return cmp.Or(c.Labels[clusterv1.ClusterNameLabel], c.Name)
}

// SetupWithManager adds the reconciler and the indexes of this package. It uses those of package host.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanCluster{}, idIndex, func(o client.Object) []string {
		return []string{o.(*infrav1.CapstanCluster).Spec.ID}
	}); err != nil {
		return err
	}
	r.recorder = mgr.GetEventRecorder("capstancluster-controller")
	r.turns.wake = make(chan event.TypedGenericEvent[client.ObjectKey], 1000)
	log := ctrl.LoggerFrom(ctx).WithValues("controller", "capstancluster")
	gvk := infrav1.GroupVersion.WithKind("CapstanCluster")
	c, err := capicontroller.NewControllerManagedBy(mgr, log).
		For(&infrav1.CapstanCluster{}, builder.WithPredicates(manager.OwnedOrDeleting(clusterGroupKind))).
		WithOptions(r.For("CapstanCluster")).
		Owns(&ipamv1.IPAddressClaim{}).
		Watches(&clusterv1.Cluster{},
			handler.EnqueueRequestsFromMapFunc(util.ClusterToInfrastructureMapFunc(ctx, gvk, mgr.GetClient(), &infrav1.CapstanCluster{})),
			// Of the Cluster its spec matters (pausing, networks, endpoint, control plane), and the moment
			// at which its API server answers.
			predicate.Or(predicate.GenerationChangedPredicate{}, becameInitialized())).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(r.ofLabel), predicate.NewPredicateFuncs(isPreparedControlPlane)).
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(r.ofMachine), manager.IgnoreStatus()).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.ofLabel), predicate.NewPredicateFuncs(isKubeconfig)).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.all), hostChanged()).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.ofNamespace), selection.NamespaceChanged()).
		WatchesRawSource(r.Pool.Source(r.ofEvent)).
		WatchesRawSource(r.turns.source()).
		Build(ctx, r)
	r.controller = c
	return err
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	c := &infrav1.CapstanCluster{}
	if err := r.Client.Get(ctx, req.NamespacedName, c); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	// IC-06: not even the status of what others manage is written.
	if !r.Watches(c) || annotations.IsExternallyManaged(c) {
		return ctrl.Result{}, nil
	}
	cluster, err := util.GetOwnerCluster(ctx, r.Client, c.ObjectMeta)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	deleting := !c.DeletionTimestamp.IsZero()
	// IC-07
	if cluster == nil && !deleting {
		return ctrl.Result{}, nil
	}
	// ALL-08
	if isPaused, _, err := paused.EnsurePausedCondition(ctx, r.LiveClient, cluster, c); err != nil || isPaused {
		return ctrl.Result{}, err
	}
	// IC-08
	if _, err := finalizers.EnsureFinalizer(ctx, r.Client, c, infrav1.ClusterFinalizer); err != nil {
		return ctrl.Result{}, err
	}
	helper, err := patch.NewHelper(c, r.LiveClient)
	if err != nil {
		return ctrl.Result{}, err
	}
	s := &scope{cluster: cluster, capstan: c, helper: helper}
	defer func() {
		if err := patchCluster(ctx, s.helper, c); err != nil {
			reterr = kerrors.NewAggregate([]error{reterr, err})
		}
	}()
	if deleting {
		r.turns.done(req.NamespacedName)
		return r.reconcileDelete(ctx, s)
	}
	res, err := r.reconcileNormal(ctx, s)
	if err == nil {
		// Everything that is waited for comes as an event, and the next one shall not wait for the
		// object's turn: a member that joins the load balancer, or what the cluster waits for.
		r.controller.DeferNextReconcile(req, time.Now())
	}
	return res, err
}

// patchCluster writes what changed: conditions, then spec, then status (IC-11).
func patchCluster(ctx context.Context, helper *patch.Helper, c *infrav1.CapstanCluster) error {
	if err := manager.SetReady(c, infrav1.HostsAvailableCondition, infrav1.NetworkReadyCondition, infrav1.LoadBalancerReadyCondition); err != nil {
		return err
	}
	err := helper.Patch(ctx, c, patch.WithStatusObservedGeneration{}, patch.WithOwnedConditions{Conditions: []string{
		clusterv1.ReadyCondition, infrav1.HostsAvailableCondition, infrav1.NetworkReadyCondition, infrav1.LoadBalancerReadyCondition,
		clusterv1.DeletingCondition, clusterv1.PausedCondition,
	}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
