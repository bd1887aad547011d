package reconciling

import (
	"context"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// How the migration stores an unchanged object again. A write of the status is preferred, because webhooks that validate
// the spec cannot refuse it.
var (
	// StoredByStatus is for kinds with a status subresource.
	StoredByStatus = crdmigrator.ByObjectConfig{UseStatusForStorageVersionMigration: true}
	// StoredByObject is for the others.
	StoredByObject = crdmigrator.ByObjectConfig{}
)

// Provider is one of the providers that a manager process can run.
type Provider struct {
	// Name is the subcommand: infrastructure, control-plane, bootstrap or ipam.
	Name string

	// Kinds are the reconciled kinds. Each gets a flag --<kind>-concurrency.
	Kinds []string

	// NeedsClusterCache is true if the provider connects to workload clusters.
	NeedsClusterCache bool

	// ClusterIndexes are the indexes of the provider in the cache of each workload cluster.
	ClusterIndexes []clustercache.CacheOptionsIndex

	// ByCluster are the kinds that the provider lists with OfCluster and ControlPlaneOf.
	ByCluster []client.Object

	// AddToScheme adds the provider's own API types. The scheme already contains those of Cluster API and Kubernetes.
	AddToScheme func(*runtime.Scheme) error

	// Versioned contains the kinds with several API versions. The manager stores their objects in the storage version of
	// the CRD (ALL-14), see StoredByStatus.
	Versioned map[client.Object]crdmigrator.ByObjectConfig

	// AddFlags adds the provider's own flags. It may be nil.
	AddFlags func(*pflag.FlagSet)

	// Setup adds the provider's indexes and reconcilers.
	Setup func(ctx context.Context, mgr ctrl.Manager, opts Options) error

	// SetupWebhooks adds the provider's webhooks. It may be nil. It is not called with --webhook-port=0.
	SetupWebhooks func(ctx context.Context, mgr ctrl.Manager, opts Options) error
}
