package machinepool

import (
	"context"
	"time"

	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/kubeconfig"
)

// workloadTimeout bounds each request to a workload cluster.
const workloadTimeout = 10 * time.Second

// Workload returns a client of a workload cluster.
type Workload func(ctx context.Context, cluster *clusterv1.Cluster) (client.Client, error)

// Workloads connects with the kubeconfigs in Secrets. Only the drain of a machine of a pool needs a client, so there is no cache.
func Workloads(secrets client.Reader) Workload {
	return func(ctx context.Context, cluster *clusterv1.Cluster) (client.Client, error) {
		found, err := secret.Get(ctx, secrets, util.ObjectKey(cluster), secret.Kubeconfig)
		if err != nil {
			return nil, err
		}
		return kubeconfig.NewClient(found.Data[secret.KubeconfigDataName], cluster.Spec.ControlPlaneEndpoint, workloadTimeout,
			client.Options{Scheme: clientgoscheme.Scheme})
	}
}
