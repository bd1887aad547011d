package bootstrap

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/kubeconfig"
)

// workloadTimeout limits a call to a workload cluster without the ClusterCache.
const workloadTimeout = 5 * time.Second

// workloadClient returns a client of the workload cluster, or nil if it is not reachable yet. An event follows in that
// case. ClusterCache connects after core has copied the status of the control plane, and waits 30 s after a failure.
// Once a CapstanControlPlane reports that it is initialized, the client uses the kubeconfig directly, so that workers
// do not have to wait for the ClusterCache. The kubeconfig must be for the Cluster's endpoint, which core copies when the
// infrastructure is provisioned.
func (r *Reconciler) workloadClient(ctx context.Context, s *scope) (client.Client, error) {
	key := util.ObjectKey(s.cluster)
	if r.ClusterCache != nil {
		workload, err := r.ClusterCache.GetUncachedClient(ctx, key)
		if err == nil {
			return workload, nil
		}
		if !errors.Is(err, clustercache.ErrClusterNotConnected) {
			return nil, err
		}
	}
	initialized := s.controlPlane != nil && isInitialized(s.controlPlane)
	if !initialized || !s.cluster.Spec.ControlPlaneEndpoint.IsValid() {
		return nil, nil
	}
	found, err := secret.Get(ctx, r.SecretCachingClient, key, secret.Kubeconfig)
	if err != nil {
		return nil, client.IgnoreNotFound(err) // A new kubeconfig is an event too.
	}
	return kubeconfig.NewClient(found.Data[secret.KubeconfigDataName], s.cluster.Spec.ControlPlaneEndpoint, workloadTimeout,
		client.Options{Scheme: r.Client.Scheme(), Mapper: onlySecrets()})
}

// onlySecrets returns the mapper of a client for tokens, which are Secrets. The client does not ask the API server for its kinds: each
// request has a connection of its own, and most clients make one request.
func onlySecrets() meta.RESTMapper {
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{corev1.SchemeGroupVersion})
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Secret"), meta.RESTScopeNamespace)
	return mapper
}
