package bootstrap

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	"sigs.k8s.io/cluster-api/controllers/external"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

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
	r := &Reconciler{Options: opts, Client: mgr.GetClient(), recorder: reconciling.EventRecorder(mgr, "capstanconfig-controller")}
	log := mgr.GetLogger().WithValues("controller", "capstanconfig")
	b := opts.Controller(mgr, bootstrapv1.ConfigKind).
		For(&bootstrapv1.CapstanConfig{}).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(machineToConfig), machineChanged()).
		Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(machinePoolToConfig), reconciling.IgnoreStatus()).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.clusterToConfigs), clusterChanged()).
		// Certificate authorities, the kubeconfig and the encryption key are Secrets with the cluster's label.
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.secretToConfigs))
	if opts.ClusterCache != nil {
		b = b.WatchesRawSource(opts.ClusterCache.GetClusterSource("capstanconfig", r.connectionToConfigs))
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
