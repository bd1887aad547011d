package reconciling

import (
	"context"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
)

// Provider is one of the providers that a manager process can run.
type Provider struct {
	// Name is the subcommand: infrastructure, control-plane, bootstrap or ipam.
	Name string

	// Kinds that the provider reconciles; each gets a flag --<kind>-concurrency.
	Kinds []string

	// NeedsClusterCache is true if the provider talks to workload clusters.
	NeedsClusterCache bool

	// ClusterIndexes are what the provider looks up in the cache of each workload cluster.
	ClusterIndexes []clustercache.CacheOptionsIndex

	// AddToScheme adds the provider's own API types. Cluster API's and Kubernetes' are always there.
	AddToScheme func(*runtime.Scheme) error

	// AddFlags adds flags of the provider's own; may be nil.
	AddFlags func(*pflag.FlagSet)

	// Setup adds the provider's indexes and reconcilers.
	Setup func(ctx context.Context, mgr ctrl.Manager, opts Options) error

	// SetupWebhooks adds the provider's webhooks; may be nil. Not called with --webhook-port=0.
	SetupWebhooks func(mgr ctrl.Manager, opts Options) error
}
