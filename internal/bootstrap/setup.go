package bootstrap

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	"sigs.k8s.io/cluster-api/controllers/external"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// The migration of stored objects (ALL-14):
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions;customresourcedefinitions/status,verbs=patch,resourceNames=capstanconfigs.bootstrap.capstan.dev;capstanconfigtemplates.bootstrap.capstan.dev
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigtemplates,verbs=get;list;patch

// Provider runs the bootstrap provider in a manager. It imports the types of the control plane provider, but works
// without that provider.
var Provider = reconciling.Provider{
	Name:              "bootstrap",
	Kinds:             []string{bootstrapv1.ConfigKind},
	NeedsClusterCache: true,
	ByCluster:         []client.Object{&bootstrapv1.CapstanConfig{}, &corev1.Secret{}},
	AddToScheme: func(s *runtime.Scheme) error {
		return errors.Join(bootstrapv1.AddToScheme(s), bootstrapv1beta1.AddToScheme(s), controlplanev1.AddToScheme(s))
	},
	Versioned: map[client.Object]crdmigrator.ByObjectConfig{
		&bootstrapv1.CapstanConfig{}:         reconciling.StoredByStatus,
		&bootstrapv1.CapstanConfigTemplate{}: reconciling.StoredByObject,
	},
	Setup: SetupWithManager,
	SetupWebhooks: func(_ context.Context, mgr ctrl.Manager, _ reconciling.Options) error {
		return SetupWebhooksWithManager(mgr)
	},
}

// SetupWithManager adds the bootstrap provider's reconciler (ALL-13).
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
	r := &Reconciler{
		Client: mgr.GetClient(), SecretClient: opts.SecretCachingClient, LiveClient: opts.LiveClient, ClusterCache: opts.ClusterCache,
		Options: opts, recorder: reconciling.EventRecorder(mgr, "capstanconfig-controller"),
	}
	log := mgr.GetLogger().WithValues("controller", "capstanconfig")
	b := opts.Controller(mgr, bootstrapv1.ConfigKind).
		For(&bootstrapv1.CapstanConfig{}).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(machineToConfig), machineChanged()).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(machinePoolToConfig), reconciling.IgnoreStatus()).
		// The status of a Cluster changes with each of its machines, and so each would reconcile the configs of all others.
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.clusterToConfigs),
			predicate.Or(predicate.GenerationChangedPredicate{}, reconciling.ControlPlaneInitialized())).
		// Certificate authorities, the kubeconfig and the encryption key are Secrets with the cluster's label.
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.secretToConfigs))
	if opts.ClusterCache != nil {
		b = b.WatchesRawSource(opts.ClusterCache.GetClusterSource("capstanconfig", r.clusterToConfigs))
	}
	// A config is created before its Machine.
	c, err := reconciling.BuildWithoutDelay(ctx, b, reconciling.Fair(opts.For(bootstrapv1.ConfigKind).MaxConcurrentReconciles, reconciling.Traced(bootstrapv1.ConfigKind, r)))
	if err != nil {
		return err
	}
	r.wrote = opts.Wrote(c, bootstrapv1.GroupVersion, bootstrapv1.ConfigKind)
	r.tracker = external.ObjectTracker{Controller: c, Cache: mgr.GetCache(), Scheme: mgr.GetScheme(), PredicateLogger: &log}
	return nil
}

// watchControlPlanes starts the watch on CapstanControlPlanes, once.
func (r *Reconciler) watchControlPlanes(ctx context.Context, obj *controlplanev1.CapstanControlPlane) error {
	if r.tracker.Controller == nil {
		return nil // Tests have no manager.
	}
	return r.tracker.Watch(ctrl.LoggerFrom(ctx), obj, handler.EnqueueRequestsFromMapFunc(r.labelledToConfigs),
		predicate.Or(reconciling.IgnoreStatus(), reconciling.Became(isInitialized)))
}

func isInitialized(c *controlplanev1.CapstanControlPlane) bool {
	return ptr.Deref(c.Status.Initialization.ControlPlaneInitialized, false)
}

// machineChanged passes the changes of a Machine that findOwner reads. The status of a Machine is written a dozen times on its way up,
// and each reconcile of its config decodes the whole bootstrap data.
func machineChanged() predicate.Predicate {
	return predicate.Or(reconciling.IgnoreStatus(), reconciling.Changed(func(before, after *clusterv1.Machine) bool {
		return joined(before) != joined(after) || started(before) != started(after)
	}))
}

func machineToConfig(_ context.Context, obj client.Object) []ctrl.Request {
	return refToConfig(obj, obj.(*clusterv1.Machine).Spec.Bootstrap.ConfigRef)
}

func machinePoolToConfig(_ context.Context, obj client.Object) []ctrl.Request {
	return refToConfig(obj, obj.(*clusterv1.MachinePool).Spec.Template.Spec.Bootstrap.ConfigRef)
}

func refToConfig(obj client.Object, ref clusterv1.ContractVersionedObjectReference) []ctrl.Request {
	if ref.APIGroup != bootstrapv1.GroupVersion.Group || ref.Kind != bootstrapv1.ConfigKind {
		return nil
	}
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: ref.Name}}}
}

func (r *Reconciler) clusterToConfigs(ctx context.Context, obj client.Object) []ctrl.Request {
	return r.configsOf(ctx, obj.GetNamespace(), obj.GetName())
}

// labelledToConfigs maps an object with the cluster's label to the configs of the cluster.
func (r *Reconciler) labelledToConfigs(ctx context.Context, obj client.Object) []ctrl.Request {
	return r.configsOf(ctx, obj.GetNamespace(), obj.GetLabels()[clusterv1.ClusterNameLabel])
}

// secretToConfigs maps a data secret to its config, so that a deleted one is created again. It maps any other secret of
// a cluster to all configs of the cluster.
func (r *Reconciler) secretToConfigs(ctx context.Context, obj client.Object) []ctrl.Request {
	if ref := metav1.GetControllerOf(obj); ref != nil && ref.Kind == bootstrapv1.ConfigKind {
		return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: ref.Name}}}
	}
	return r.labelledToConfigs(ctx, obj)
}

func (r *Reconciler) configsOf(ctx context.Context, namespace, cluster string) []ctrl.Request {
	if cluster == "" {
		return nil
	}
	return reconciling.Requests(ctx, r.Client, &bootstrapv1.CapstanConfigList{}, reconciling.OfCluster(client.ObjectKey{Namespace: namespace, Name: cluster}))
}
