package kubeconfig

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Reader reads kubeconfig Secrets for Cluster API's ClusterCache. The loader of ClusterCache refuses exec and
// auth-provider, but accepts proxies, files, and other servers. It therefore gets the output of Rewrite.
type Reader struct {
	// source of Secrets, and source of Clusters
	Secrets, Clusters client.Reader
}

// Get reads the Secret `<cluster>-kubeconfig`. The error for a refused kubeconfig is a *RefusedError.
func (r Reader) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	out, ok := obj.(*corev1.Secret)
	name, isKubeconfig := strings.CutSuffix(key.Name, "-"+string(secret.Kubeconfig))
	if !ok || !isKubeconfig {
		return fmt.Errorf("%T %s is not the kubeconfig of a cluster", obj, key)
	}
	cluster := &clusterv1.Cluster{}
	if err := r.Clusters.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: name}, cluster); err != nil {
		return err
	}
	found := &corev1.Secret{}
	if err := r.Secrets.Get(ctx, key, found, opts...); err != nil {
		return err
	}
	data, err := Rewrite(found.Data[secret.KubeconfigDataName], cluster.Spec.ControlPlaneEndpoint)
	if err != nil {
		return err
	}
	found.Data = map[string][]byte{secret.KubeconfigDataName: data}
	*out = *found
	return nil
}

// List is not used by ClusterCache.
func (r Reader) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return fmt.Errorf("kubeconfigs are read one by one")
}
