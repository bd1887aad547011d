// Package machinepool reconciles CapstanMachinePools: it creates and deletes CapstanMachines until their number and
// properties are those of the MachinePool. It has no connection to hosts: package machine reconciles a pool's machine
// like any other.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package machinepool

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinepools,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinepools/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinepools/finalizers,verbs=update
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines,verbs=get;list;watch;create;delete;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts;capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines,verbs=get;list;watch;delete
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinepools,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

var (
	poolGVK              = infrav1.GroupVersion.WithKind(infrav1.MachinePoolKind)
	machinePoolGroupKind = clusterv1.GroupVersion.WithKind("MachinePool").GroupKind()
)

// Reconciler keeps the machines of pools.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	// Workload connects to the workload cluster of machines that are drained before an update.
	Workload Workload

	recorder   events.EventRecorder
	frame      reconciling.Frame
	controller capicontroller.Controller
}

// scope contains the objects of one reconcile. machinePool and cluster may be nil while the object is being deleted.
type scope struct {
	cluster     *clusterv1.Cluster
	machinePool *clusterv1.MachinePool
	pool        *infrav1.CapstanMachinePool
	observed
	// next are the last steps that were decided; nil before a decision.
	next *actions
	// draining is the reason why the drain of a Node waits; "" without a drain.
	draining string
	// trouble contains the errors of the pool's machines in this reconcile.
	trouble error
	// patch writes the changes since the pool was read or last recorded.
	patch *reconciling.Patch
}

// observed is the input of the steps of a pool.
type observed struct {
	members []member
	// orphans are Machines whose CapstanMachine was deleted.
	orphans []clusterv1.Machine
	// hosts are those that machines of the pool may be placed on.
	hosts []infrav1.CapstanHost
	// want is the desired state of the pool.
	want    desired
	invalid *invalid
}

// SetupWithManager adds the reconciler of pools (ALL-13).
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	r.recorder = reconciling.EventRecorder(mgr, "capstanmachinepool-controller")
	r.frame = reconciling.Frame{Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.MachinePoolFinalizer}
	var err error
	r.controller, err = r.Controller(mgr, infrav1.MachinePoolKind).
		For(&infrav1.CapstanMachinePool{}, builder.WithPredicates(reconciling.OwnedOrDeleting(machinePoolGroupKind))).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(util.MachinePoolToInfrastructureMapFunc(ctx, poolGVK)), machinePoolChanged()).
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(ofCapstanMachine), capstanMachineChanged()).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(r.ofMachine), machineChanged()).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCluster), clusterChanged()).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCapstanCluster), hostselection.HostsChosen()).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.all), predicate.Or(reconciling.IgnoreStatus(), hostChanged())).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.ofNamespace), selection.NamespaceChanged()).
		Build(ctx, reconciling.Fair(r.For(infrav1.MachinePoolKind).MaxConcurrentReconciles, reconciling.Traced(infrav1.MachinePoolKind, r)))
	return err
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	pool := &infrav1.CapstanMachinePool{}
	if err := r.Client.Get(ctx, req.NamespacedName, pool); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Watches(pool) { // MP-11
		return ctrl.Result{}, nil
	}
	s := &scope{pool: pool}
	if err := r.findOwners(ctx, r.Client, s); err != nil {
		return ctrl.Result{}, err
	}
	deleting := !pool.DeletionTimestamp.IsZero()
	if (s.machinePool == nil || s.cluster == nil) && !deleting {
		return ctrl.Result{}, nil
	}
	// MP-06
	var err error
	if s.patch, err = r.frame.Begin(ctx, s.cluster, pool); err != nil || s.patch == nil {
		return ctrl.Result{}, err
	}
	defer func() { reterr = errors.Join(reterr, r.frame.End(ctx, s.patch, s.pool)) }()
	var res ctrl.Result
	if deleting {
		err = r.reconcileDelete(ctx, s)
	} else {
		res, err = r.reconcileNormal(ctx, s)
	}
	if err == nil {
		r.controller.DeferNextReconcile(req, time.Now().Add(pace(len(s.members))))
	}
	return res, err
}

// pace returns the pause before the next reconcile of a pool. Every change of a machine triggers a reconcile, whose
// cost is proportional to the number of machines. With a proportional pause, a machine costs the same in a pool of ten
// and in one of thousands.
func pace(machines int) time.Duration {
	return min(10*time.Millisecond+time.Duration(machines)*2*time.Millisecond, 5*time.Second)
}

// findOwners reads the MachinePool and the Cluster. Each of them can be missing.
func (r *Reconciler) findOwners(ctx context.Context, c client.Client, s *scope) error {
	mp, err := util.GetOwnerMachinePool(ctx, c, s.pool.ObjectMeta)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if apierrors.IsNotFound(err) {
		mp = nil
	}
	s.machinePool = mp
	name := s.pool.Labels[clusterv1.ClusterNameLabel]
	if mp != nil {
		name = mp.Spec.ClusterName
	}
	if name == "" {
		return nil
	}
	cluster, err := util.GetClusterByName(ctx, c, s.pool.Namespace, name)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	s.cluster = cluster
	return nil
}
