// Package manager holds what the four providers share in one process: the options that their
// reconcilers are set up with, the flags, and the controller manager itself.
package manager

import (
	"context"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	"sigs.k8s.io/cluster-api/controllers/clustercache"
)

// DefaultConcurrency is how many objects of a kind are reconciled at the same time.
const DefaultConcurrency = 50

// Options are what every reconciler is set up with.
type Options struct {
	// WatchNamespace limits the provider to one namespace; all of them when empty (ALL-07). The
	// manager's cache follows it: reconcilers need not look at it.
	WatchNamespace string

	// WatchFilter is the value of the label cluster.x-k8s.io/watch-filter that objects must have to
	// be reconciled; any when empty (ALL-07). Reconcilers pass it to
	// predicates.ResourceHasFilterLabel.
	WatchFilter string

	// StrictContract takes no step ahead of Cluster API core (ALL-15, CP-02): nothing is prepared before core has written
	// Cluster.spec.controlPlaneEndpoint, and nothing is done for core. Clusters start some seconds later.
	StrictContract bool

	// Concurrency by kind; see For.
	Concurrency map[string]int

	// ClusterCache connects to workload clusters. Nil when no provider of the process asked for it.
	ClusterCache clustercache.ClusterCache

	// SecretCachingClient reads Secrets that carry the label cluster.x-k8s.io/cluster-name from the
	// cache; the manager's own client reads Secrets and ConfigMaps live.
	SecretCachingClient client.Client

	// LiveClient reads everything from the API server. Patch helpers are made with it, so that
	// conditions are patched against what is stored: against a cache that lags they
	// conflict, and the helper backs off for 100 ms and more.
	LiveClient client.Client
}

// For returns the controller options of a kind, for example For("CapstanMachine").
func (o Options) For(kind string) controller.Options {
	n := o.Concurrency[kind]
	if n <= 0 {
		n = DefaultConcurrency
	}
	return controller.Options{MaxConcurrentReconciles: n}
}

// Provider is one of the providers that a manager process can run.
type Provider struct {
	// Name is the subcommand: infrastructure, control-plane, bootstrap or ipam.
	Name string

	// Kinds that the provider reconciles; each gets a flag --<kind>-concurrency.
	Kinds []string

	// NeedsClusterCache says that the provider talks to workload clusters.
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
