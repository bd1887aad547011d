// Package machine reconciles CapstanMachines: it places them on hosts, gives them addresses, and has
// the hosts make and remove them.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package machine

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
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	"sigs.k8s.io/cluster-api/util/predicates"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines/finalizers,verbs=update
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts;capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machines;machinepools,verbs=get;list;watch
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddressclaims,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=ipam.cluster.x-k8s.io,resources=ipaddresses,verbs=get;list;watch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanvolumes,verbs=get;list;watch;create;patch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinedeployments;machinesets,verbs=get
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=get
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get
// +kubebuilder:rbac:groups="",resources=secrets;namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

var machineGroupKind = clusterv1.GroupVersion.WithKind("Machine").GroupKind()

// Reconciler makes machines.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	recorder   events.EventRecorder
	frame      reconciling.Frame
	controller capicontroller.Controller
	remembered
	// turns are those of hosts, by their names.
	turns *reconciling.Turns
	// volumeTurns are those of namespaces, for the choice of volumes.
	volumeTurns *reconciling.Turns
}

// scope contains the objects of one reconcile. machine and cluster may be nil while the object is being deleted.
type scope struct {
	cluster *clusterv1.Cluster
	machine *clusterv1.Machine
	capstan *infrav1.CapstanMachine
	// patch writes the changes since the object was read or last recorded.
	patch *reconciling.Patch
	// recorded is true if all that was decided is written: the reconcile that follows from that writes the rest.
	recorded bool
	// volumes are those of readVolumes.
	volumes volumeInputs
	// again is after how long the object changes without an event; zero: never.
	again time.Duration
}

// SetupWithManager adds the reconciler. It uses the indexes of package capstanhost.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	r.recorder = reconciling.EventRecorder(mgr, "capstanmachine-controller")
	r.frame = reconciling.Frame{Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.MachineFinalizer, Summary: summarized}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanMachine{}, addressIndex, addressesOf); err != nil {
		return err
	}
	gvk := infrav1.GroupVersion.WithKind(infrav1.MachineKind)
	c, err := r.Controller(mgr, infrav1.MachineKind).
		// What was promised to a machine is taken back after its deletion, also if somebody removed its owner and its finalizer.
		For(&infrav1.CapstanMachine{}, builder.WithPredicates(predicate.Or(reconciling.OwnedOrDeleting(machineGroupKind), reconciling.OnlyDeletes))).
		Owns(&capiipamv1.IPAddressClaim{}).
		Watches(&capiipamv1.IPAddress{}, handler.EnqueueRequestsFromMapFunc(addresses.OfOwner(mgr.GetClient(), infrav1.MachineKind)), reconciling.OnlyCreates).
		// Of the Machine its spec matters (bootstrap data, version, failure domain) and the progress of an update in place.
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(util.MachineToInfrastructureMapFunc(gvk)), updateStep()).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.ofUpdateData), isUpdateData()).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(r.ofMachinePool), dataSecretChanged()).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCluster),
			predicates.ClusterPausedTransitionsOrInfrastructureProvisioned(mgr.GetScheme(), mgr.GetLogger())).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCapstanCluster),
			predicate.Or(hostselection.HostsChosen(), reconciling.Became((*infrav1.CapstanCluster).AllowsBoot))).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.ofHost), predicate.Or(reconciling.IgnoreStatus(), hostselection.RebootEnded())).
		Watches(&infrav1.CapstanVolume{}, handler.EnqueueRequestsFromMapFunc(r.ofVolume), reconciling.IgnoreStatus()).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.ofNamespace), selection.NamespaceChanged()).
		WatchesRawSource(r.Pool.Source(r.ofEvent)).
		Build(ctx, reconciling.Traced(infrav1.MachineKind, r))
	workers := r.For(infrav1.MachineKind).MaxConcurrentReconciles
	r.controller, r.turns, r.volumeTurns = c, reconciling.FairTurns(workers), reconciling.NewTurns(workers, 1)
	r.frame.Wrote = r.Wrote(c, infrav1.GroupVersion, infrav1.MachineKind)
	return err
}

// Reconcile implements reconcile.Reconciler. After a conflict, the next attempt does not wait for the object's turn: core writes a new
// CapstanMachine at the same time.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	result, err := r.reconcile(ctx, req)
	if apierrors.IsConflict(err) {
		r.controller.DeferNextReconcile(req, time.Now())
	}
	return result, err
}

func (r *Reconciler) reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	m := &infrav1.CapstanMachine{}
	if err := r.Client.Get(ctx, req.NamespacedName, m); err != nil {
		if apierrors.IsNotFound(err) {
			r.drop(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.dropPredecessor(m)
	if !r.Watches(m) {
		return ctrl.Result{}, nil
	}
	s := &scope{capstan: m}
	found, err := r.findOwners(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	// IM-05: deletion waits for none of them.
	deleting := !m.DeletionTimestamp.IsZero()
	if !found && !deleting {
		r.controller.DeferNextReconcile(req, time.Now())
		return ctrl.Result{}, nil
	}
	// ALL-08, IM-10
	if s.patch, err = r.frame.Begin(ctx, s.cluster, m); err != nil || s.patch == nil {
		return ctrl.Result{}, err
	}
	if deleting {
		err = r.reconcileDelete(ctx, s)
	} else {
		err = r.reconcileNormal(ctx, s)
	}
	return r.result(ctx, req, s, err)
}

// result writes the object and returns when to reconcile it again. err is that of the steps.
func (r *Reconciler) result(ctx context.Context, req ctrl.Request, s *scope, err error) (ctrl.Result, error) {
	if err == nil && !conditions.IsTrue(s.capstan, clusterv1.ReadyCondition) {
		// Everything that is waited for comes as an event, and until the machine is ready the next
		// one shall not wait for the object's turn.
		r.controller.DeferNextReconcile(req, time.Now())
	}
	if !s.recorded {
		err = errors.Join(err, r.frame.End(ctx, s.patch, s.capstan))
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: s.again}, nil
}

// findOwners reads the Machine and the Cluster. It returns whether both exist.
func (r *Reconciler) findOwners(ctx context.Context, s *scope) (bool, error) {
	var err error
	if s.machine, err = util.GetOwnerMachine(ctx, r.Client, s.capstan.ObjectMeta); client.IgnoreNotFound(err) != nil {
		return false, err
	}
	name := s.capstan.Labels[clusterv1.ClusterNameLabel]
	if s.machine != nil {
		name = s.machine.Spec.ClusterName
	}
	if name == "" {
		return false, nil
	}
	cluster, err := util.GetClusterByName(ctx, r.Client, s.capstan.Namespace, name)
	if client.IgnoreNotFound(err) != nil {
		return false, err
	}
	s.cluster = cluster
	return s.machine != nil && s.cluster != nil, nil
}

var summarized = []string{
	infrav1.HostAssignedCondition, infrav1.AddressesAssignedCondition, infrav1.MachineRunningCondition,
	infrav1.BootstrapSucceededCondition, infrav1.ServicesHealthyCondition,
}
