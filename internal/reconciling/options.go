package reconciling

import (
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	"sigs.k8s.io/cluster-api/util/labels"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
)

// DefaultConcurrency is the number of objects of a kind that are reconciled at the same time.
const DefaultConcurrency = 50

// Options are the common options of all reconcilers.
type Options struct {
	// WatchNamespace limits the provider to one namespace. Empty means all (ALL-07). The manager's cache has the same
	// limit, so reconcilers do not check it.
	WatchNamespace string

	// WatchFilter is the value of the label cluster.x-k8s.io/watch-filter that reconciled objects must have. Empty means
	// any (ALL-07). See Watches.
	WatchFilter string

	// StrictContract disables steps that are ahead of Cluster API core (ALL-15, CP-02, IM-05): the providers prepare nothing
	// before core has written Cluster.spec.controlPlaneEndpoint, boot no machine before core has written
	// Cluster.status.initialization.infrastructureProvisioned, and do no work of core. Clusters start some seconds later.
	StrictContract bool

	// Concurrency is the concurrency by kind; see For.
	Concurrency map[string]int

	// ClusterCache connects to workload clusters. It is nil if no provider of the process uses it.
	ClusterCache clustercache.ClusterCache

	// SecretCachingClient reads Secrets with the label cluster.x-k8s.io/cluster-name from the cache. The manager's own
	// client reads Secrets and ConfigMaps live.
	SecretCachingClient client.Client

	// LiveClient reads all objects from the API server; see Live. Patch helpers use it, so that conditions are patched against the
	// stored object. Patches against a stale cache conflict, and the helper then waits for 100 ms or more.
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

// Controller returns the builder of the controller of a kind. It is Cluster API's builder, so that every controller has
// the feature gate ReconcilerRateLimiting, the time limit of a reconcile, and the log fields of Cluster API.
func (o Options) Controller(mgr ctrl.Manager, kind string) *capicontroller.Builder {
	name := strings.ToLower(kind)
	log := mgr.GetLogger().WithValues("controller", name)
	return capicontroller.NewControllerManagedBy(mgr, log).Named(name).WithOptions(o.For(kind))
}

// Watches returns true if an object passes the watch filter (ALL-07). Each reconciler checks the object of its request,
// because the event of another object can lead to it.
func (o Options) Watches(obj client.Object) bool {
	return o.WatchFilter == "" || labels.HasWatchLabel(obj, o.WatchFilter)
}

// Wrote returns the function Frame.Wrote for the objects of a kind. Their next reconcile sees what this one has written: otherwise it
// would decide again, or write the same status once more.
func (o Options) Wrote(c capicontroller.Controller, gv schema.GroupVersion, kind string) func(Object, string) {
	return func(obj Object, resourceVersion string) {
		o.WaitForCache(c, obj, capicontroller.StructuredObject(gv, kind), resourceVersion)
	}
}

// WaitForCache delays the next reconcile of an object until the cache contains the writes of this one. It does nothing
// if the manager watches one namespace: Cluster API's function then fails each reconcile. A reconcile can read an older
// object in that case, and its write ends with a conflict.
func (o Options) WaitForCache(c capicontroller.Controller, reconciled client.Object, written capicontroller.GroupVersionKindType, resourceVersion string) {
	if o.WatchNamespace == "" {
		c.DeferNextReconcileUntilCacheUpToDate(reconciled, written, resourceVersion)
	}
}
