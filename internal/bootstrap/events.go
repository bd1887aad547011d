package bootstrap

import (
	"context"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// watchControlPlanes starts the watch on CapstanControlPlanes, once.
func (r *Reconciler) watchControlPlanes(ctx context.Context, obj *controlplanev1.CapstanControlPlane) error {
	if r.tracker.Controller == nil {
		return nil // Tests have no manager.
	}
	return r.tracker.Watch(ctrl.LoggerFrom(ctx), obj, handler.EnqueueRequestsFromMapFunc(r.labelledToConfigs), controlPlaneChanged())
}

// controlPlaneChanged passes the changes of a CapstanControlPlane that configs depend on: its spec, the first answer of its API server, and
// annotations with which a config may begin the cluster. The label of the cluster counts, because without it the earlier events of the object
// reached no config. So does the end of the pause: the watch drops the events of a paused control plane.
func controlPlaneChanged() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, reconciling.Became(isInitialized),
		reconciling.Changed(func(before, after *controlplanev1.CapstanControlPlane) bool {
			return mayBeginNow(before.Annotations, after.Annotations) ||
				before.Labels[clusterv1.ClusterNameLabel] != after.Labels[clusterv1.ClusterNameLabel] ||
				annotations.HasPaused(before) && !annotations.HasPaused(after)
		}))
}

// mayBeginNow reports whether a change of annotations can let a config pass mayBegin. A new annotation of the first Machine or of the
// initialization only holds configs back.
func mayBeginNow(before, after map[string]string) bool {
	if before[controlplanev1.RestoredAnnotation] != after[controlplanev1.RestoredAnnotation] {
		return true
	}
	for _, name := range []string{controlplanev1.FirstMachineAnnotation, controlplanev1.InitializedAnnotation} {
		value, existed := before[name]
		if now, exists := after[name]; existed && (!exists || now != value) {
			return true
		}
	}
	return false
}

func isInitialized(c *controlplanev1.CapstanControlPlane) bool {
	return ptr.Deref(c.Status.Initialization.ControlPlaneInitialized, false)
}

// clusterChanged passes the changes of a Cluster that configs depend on. The status of a Cluster changes with each of its machines. Only the
// workers of a control plane of another provider wait for it: the CapstanControlPlane itself reports that it is initialized.
func clusterChanged() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, reconciling.Became(func(c *clusterv1.Cluster) bool {
		return !isCapstanControlPlane(c) && ptr.Deref(c.Status.Initialization.ControlPlaneInitialized, false)
	}))
}

// machineChanged passes the changes of a Machine that findOwner reads. A Machine is written a dozen times on its way up.
func machineChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.Machine) bool { return ofMachine(before) != ofMachine(after) })
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
	return r.configsOf(ctx, obj.GetNamespace(), obj.GetName(), anyConfig)
}

// labelledToConfigs maps an object with the cluster's label to the configs of the cluster.
func (r *Reconciler) labelledToConfigs(ctx context.Context, obj client.Object) []ctrl.Request {
	return r.configsOf(ctx, obj.GetNamespace(), obj.GetLabels()[clusterv1.ClusterNameLabel], anyConfig)
}

// connectionToConfigs maps a Cluster, whose connection in the ClusterCache has begun or ended, to the configs that need it for their token.
func (r *Reconciler) connectionToConfigs(ctx context.Context, cluster client.Object) []ctrl.Request {
	return r.configsOf(ctx, cluster.GetNamespace(), cluster.GetName(), func(c *bootstrapv1.CapstanConfig) bool {
		return !hasNoToken(c) && !tokenRemoved(c)
	})
}

// secretToConfigs maps a data secret to its config, so that a deleted one is created again. It maps any other secret of
// a cluster to the configs that can use it.
func (r *Reconciler) secretToConfigs(ctx context.Context, obj client.Object) []ctrl.Request {
	if ref := metav1.GetControllerOf(obj); ref != nil && ref.Kind == bootstrapv1.ConfigKind {
		return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: obj.GetNamespace(), Name: ref.Name}}}
	}
	cluster := obj.GetLabels()[clusterv1.ClusterNameLabel]
	if forControlPlaneOnly(obj.GetName(), cluster) {
		return r.configsOf(ctx, obj.GetNamespace(), cluster, func(c *bootstrapv1.CapstanConfig) bool { return c.Spec.Role.IsControlPlane() })
	}
	return r.configsOf(ctx, obj.GetNamespace(), cluster, anyConfig)
}

// forControlPlaneOnly reports whether only control plane machines need a Secret of the cluster. A worker whose spec references it tries again
// after missingSecretRetry.
func forControlPlaneOnly(name, cluster string) bool {
	if name == EncryptionSecretName(cluster) {
		return true
	}
	purposes := []secret.Purpose{secret.EtcdCA, secret.FrontProxyCA, secret.ServiceAccount, secret.APIServerEtcdClient}
	return slices.ContainsFunc(purposes, func(p secret.Purpose) bool { return name == secret.Name(cluster, p) })
}

func anyConfig(*bootstrapv1.CapstanConfig) bool { return true }

func (r *Reconciler) configsOf(ctx context.Context, namespace, cluster string, keep func(*bootstrapv1.CapstanConfig) bool) []ctrl.Request {
	if cluster == "" {
		return nil
	}
	return reconciling.RequestsIf(ctx, r.Client, &bootstrapv1.CapstanConfigList{}, keep, reconciling.OfCluster(client.ObjectKey{Namespace: namespace, Name: cluster}))
}
