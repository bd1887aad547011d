// Package cluster reconciles CapstanClusters: the network of a cluster's machines and the load balancer
// in front of its API servers.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
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

var (
	clusterGroupKind = clusterv1.GroupVersion.WithKind("Cluster").GroupKind()
	machineGroupKind = clusterv1.GroupVersion.WithKind("Machine").GroupKind()
)

// Reconciler makes the infrastructure of clusters.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	// NetworkPool and NetworkBits are the source and the size of machine networks.
	NetworkPool netip.Prefix
	NetworkBits int
	// EndpointPorts are the ports for endpoints at the tunnel addresses of hosts.
	EndpointPorts utilnet.PortRange

	recorder events.EventRecorder
	frame    reconciling.Frame
	// reserving makes the choice of a network, an overlay or a port, and its record in spec, one step. Only the leader
	// chooses.
	reserving sync.Mutex
	decisions decisions
	slots     bootSlots
}

// scope contains the objects of one reconcile.
type scope struct {
	cluster *clusterv1.Cluster
	capstan *infrav1.CapstanCluster
	// usable are the hosts that the cluster may use.
	usable []infrav1.CapstanHost
	// patch writes the changes since the object was read or last recorded.
	patch *reconciling.Patch
	// leaving is the error of a former host that keeps the load balancer.
	leaving error
}

func (s *scope) key() client.ObjectKey { return client.ObjectKeyFromObject(s.cluster) }

// clusterName is the name of the Cluster, which hosts need for every deletion. The owner reference and the label that
// core writes contain it after the Cluster is deleted.
func (s *scope) clusterName() string { return clusterName(s.capstan) }

func clusterName(c *infrav1.CapstanCluster) string {
	if cluster, ok := reconciling.OwnerCluster(c); ok {
		return cluster.Name
	}
	return cmp.Or(c.Labels[clusterv1.ClusterNameLabel], c.Name)
}

// SetupWithManager adds the reconciler and the indexes of this package. It uses those of package capstanhost.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanCluster{}, idIndex, func(o client.Object) []string {
		return []string{o.(*infrav1.CapstanCluster).Spec.ID}
	}); err != nil {
		return err
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanCluster{}, vniIndex, func(o client.Object) []string {
		return []string{vniOf(o.(*infrav1.CapstanCluster))}
	}); err != nil {
		return err
	}
	r.recorder = reconciling.EventRecorder(mgr, "capstancluster-controller")
	r.slots.wake = make(chan event.TypedGenericEvent[client.ObjectKey], 1000)
	r.frame = reconciling.Frame{
		Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.ClusterFinalizer,
		Summary: []string{infrav1.HostsAvailableCondition, infrav1.NetworkReadyCondition, infrav1.LoadBalancerReadyCondition},
	}
	gvk := infrav1.GroupVersion.WithKind(infrav1.ClusterKind)
	b := r.Controller(mgr, infrav1.ClusterKind).
		For(&infrav1.CapstanCluster{}, builder.WithPredicates(reconciling.OwnedOrDeleting(clusterGroupKind))).
		Owns(&capiipamv1.IPAddressClaim{}).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(addresses.OfOwner(mgr.GetClient(), gvk.Kind)), reconciling.OnlyCreates).
		Watches(&clusterv1.Cluster{},
			handler.EnqueueRequestsFromMapFunc(util.ClusterToInfrastructureMapFunc(ctx, gvk, mgr.GetClient(), &infrav1.CapstanCluster{})),
			// Of the Cluster its spec matters (pausing, networks, endpoint, control plane), and the moment
			// at which its API server answers.
			predicate.Or(predicate.GenerationChangedPredicate{}, reconciling.ControlPlaneInitialized())).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(r.ofLabel), controlPlanePrepared()).
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(r.ofMachine), reconciling.IgnoreStatus()).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.ofLabel), predicate.NewPredicateFuncs(isKubeconfig)).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.all), hostChanged()).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(r.rivals), reconciling.IgnoreStatus()).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.ofNamespace), selection.NamespaceChanged()).
		WatchesRawSource(r.Pool.Source(r.ofEvent)).
		WatchesRawSource(r.slots.source())
	// All that a cluster waits for are events, such as a new member of the load balancer.
	_, err := reconciling.BuildWithoutDelay(ctx, b, reconciling.Fair(r.For(infrav1.ClusterKind).MaxConcurrentReconciles, reconciling.Traced(infrav1.ClusterKind, r)))
	return err
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	c := &infrav1.CapstanCluster{}
	if err := r.Client.Get(ctx, req.NamespacedName, c); apierrors.IsNotFound(err) {
		r.slots.release(req.NamespacedName) // Somebody may have removed its finalizer.
		return ctrl.Result{}, nil
	} else if err != nil {
		return ctrl.Result{}, err
	}
	// IC-06: the status of an externally managed object is not written either.
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
	// ALL-08, IC-08
	patch, err := r.frame.Begin(ctx, cluster, c)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	s := &scope{cluster: cluster, capstan: c, patch: patch}
	defer func() { reterr = errors.Join(reterr, r.frame.End(ctx, s.patch, c)) }() // IC-11
	if deleting {
		r.slots.release(req.NamespacedName)
		return ctrl.Result{}, r.reconcileDelete(ctx, s)
	}
	return r.reconcileNormal(ctx, s)
}
