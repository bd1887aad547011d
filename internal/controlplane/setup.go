package controlplane

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/csr"
	"capstan.dev/capstan/internal/reconciling"
)

// probeFailure is the duration without an answer after which a workload cluster's silence is an event.
const probeFailure = 20 * time.Second

// The migration of stored objects (ALL-14):
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions;customresourcedefinitions/status,verbs=patch,resourceNames=capstancontrolplanes.controlplane.capstan.dev;capstancontrolplanetemplates.controlplane.capstan.dev
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanetemplates,verbs=get;list;patch

// Provider runs the control plane provider in a manager.
var Provider = reconciling.Provider{
	Name:              "control-plane",
	Kinds:             []string{controlplanev1.ControlPlaneKind},
	NeedsClusterCache: true,
	ClusterIndexes:    []clustercache.CacheOptionsIndex{csr.OpenIndex},
	ByCluster:         []client.Object{&clusterv1.Machine{}, &clusterv1.MachinePool{}, &corev1.Secret{}},
	AddToScheme: func(s *runtime.Scheme) error {
		return errors.Join(controlplanev1.AddToScheme(s), controlplanev1beta1.AddToScheme(s), bootstrapv1.AddToScheme(s), etcdv1.AddToScheme(s), infrav1.AddToScheme(s))
	},
	Versioned: map[client.Object]crdmigrator.ByObjectConfig{
		&controlplanev1.CapstanControlPlane{}:         reconciling.StoredByStatus,
		&controlplanev1.CapstanControlPlaneTemplate{}: reconciling.StoredByObject,
	},
	Setup: SetupWithManager,
	SetupWebhooks: func(_ context.Context, mgr ctrl.Manager, _ reconciling.Options) error {
		return SetupWebhooksWithManager(mgr)
	},
}

// SetupWithManager adds the control plane provider's reconcilers (ALL-13).
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
	r := newReconciler(mgr.GetClient(), reconciling.EventRecorder(mgr, "capstancontrolplane-controller"), opts)
	if err := mgr.Add(r.prober); err != nil {
		return err
	}
	log := mgr.GetLogger().WithValues("controller", "capstancontrolplane")
	b := opts.Controller(mgr, controlplanev1.ControlPlaneKind).
		For(&controlplanev1.CapstanControlPlane{}).
		Owns(&clusterv1.Machine{}).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(clusterToControlPlane), clusterChanged()).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(r.orphanToControlPlane)).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(r.workerToControlPlane), leaving()).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(r.workerToControlPlane), leaving()).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.secretToControlPlane)).
		Watches(&bootstrapv1.CapstanConfig{}, handler.EnqueueRequestsFromMapFunc(r.labelledToControlPlane), reconciling.Became(hasControlPlaneData)).
		WatchesRawSource(source.Channel(r.prober.events, &handler.EnqueueRequestForObject{}))
	if opts.ClusterCache != nil {
		b = b.WatchesRawSource(opts.ClusterCache.GetClusterSource("capstancontrolplane", clusterToControlPlane, clustercache.WatchForProbeFailure(probeFailure)))
	}
	// Each step of a rollout waits for the one before it.
	c, err := reconciling.BuildWithoutDelay(ctx, b, reconciling.Fair(opts.For(controlplanev1.ControlPlaneKind).MaxConcurrentReconciles, reconciling.Traced(controlplanev1.ControlPlaneKind, r)))
	if err != nil {
		return err
	}
	r.workloads.controller = c
	r.infrastructure.watchWith(c, mgr.GetCache(), mgr.GetScheme(), &log)
	if opts.ClusterCache == nil {
		return nil
	}
	return csr.SetupWithManager(ctx, mgr, opts, opts.For(controlplanev1.ControlPlaneKind))
}

// clusterChanged passes the changes of a Cluster that the steps read. The status of a Cluster changes with each of its machines, and each
// reconcile of its control plane connects to the workload cluster.
func clusterChanged() predicate.Predicate {
	return predicate.Or(reconciling.IgnoreStatus(), reconciling.Changed(func(before, after *clusterv1.Cluster) bool {
		return !equality.Semantic.DeepEqual(before.Status.Initialization, after.Status.Initialization) ||
			!equality.Semantic.DeepEqual(before.Status.FailureDomains, after.Status.FailureDomains)
	}))
}

func clusterToControlPlane(_ context.Context, obj client.Object) []ctrl.Request {
	cluster, ok := obj.(*clusterv1.Cluster)
	if !ok {
		return nil
	}
	ref := cluster.Spec.ControlPlaneRef
	if ref.GroupKind() != controlplanev1.ControlPlaneGroupKind {
		return nil
	}
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: cluster.Namespace, Name: ref.Name}}}
}

// labelledToControlPlane maps an object with the cluster's label to the cluster's control plane.
func (r *Reconciler) labelledToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	name := obj.GetLabels()[clusterv1.ClusterNameLabel]
	if name == "" {
		return nil
	}
	cluster, err := util.GetClusterByName(ctx, r.Client, obj.GetNamespace(), name)
	if !reconciling.Found(ctx, err) {
		return nil
	}
	return clusterToControlPlane(ctx, cluster)
}

// orphanToControlPlane maps control plane Machines that have no owner, because they have to be adopted.
func (r *Reconciler) orphanToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	if _, ok := obj.GetLabels()[clusterv1.MachineControlPlaneLabel]; !ok || metav1.GetControllerOfNoCopy(obj) != nil {
		return nil
	}
	return r.labelledToControlPlane(ctx, obj)
}

// leaving passes objects that are being deleted, and all deletions: after a gap in the watch, the last known state of a deleted object can be
// older than the beginning of its deletion.
func leaving() predicate.Predicate {
	return predicate.Or(reconciling.OnlyDeletes, predicate.NewPredicateFuncs(func(obj client.Object) bool {
		return !obj.GetDeletionTimestamp().IsZero()
	}))
}

// workerToControlPlane maps a worker that leaves to a control plane that is being deleted: its deletion waits for workers.
func (r *Reconciler) workerToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	if _, ok := obj.GetLabels()[clusterv1.MachineControlPlaneLabel]; ok {
		return nil
	}
	out := r.labelledToControlPlane(ctx, obj)
	if len(out) == 0 {
		return nil
	}
	controlPlane := &controlplanev1.CapstanControlPlane{}
	if err := r.Client.Get(ctx, out[0].NamespacedName, controlPlane); err == nil && controlPlane.DeletionTimestamp.IsZero() {
		return nil
	}
	return out
}

// secretToControlPlane leaves out bootstrap data.
func (r *Reconciler) secretToControlPlane(ctx context.Context, obj client.Object) []ctrl.Request {
	for _, ref := range obj.GetOwnerReferences() {
		if ref.Kind != "Cluster" && ref.Kind != controlplanev1.ControlPlaneKind {
			return nil
		}
	}
	return r.labelledToControlPlane(ctx, obj)
}
