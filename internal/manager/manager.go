package manager

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/healthz"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/controllers/remote"
	"sigs.k8s.io/cluster-api/feature"
	capiflags "sigs.k8s.io/cluster-api/util/flags"
	"sigs.k8s.io/cluster-api/util/index"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/nodedrain"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/version"
)

// Scheme contains the types of Kubernetes, Cluster API and the providers.
func Scheme(providers []reconciling.Provider) *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(clusterv1.AddToScheme(scheme))
	utilruntime.Must(capiipamv1.AddToScheme(scheme))
	utilruntime.Must(apiextensionsv1.AddToScheme(scheme))
	for _, p := range providers {
		utilruntime.Must(p.AddToScheme(scheme))
	}
	return scheme
}

// New returns a manager with the providers' reconcilers and webhooks. The caller starts it.
func New(ctx context.Context, restConfig *rest.Config, flags *Flags, providers []reconciling.Provider) (ctrl.Manager, error) {
	tlsOptions, metrics, err := capiflags.GetManagerOptions(flags.Serving)
	if err != nil {
		return nil, err
	}
	scheme := Scheme(providers)
	options := ctrl.Options{
		Scheme: scheme,
		Controller: config.Controller{
			UsePriorityQueue: ptr.To(feature.Gates.Enabled(feature.PriorityQueue)),
		},
		LeaderElection:             flags.LeaderElect,
		LeaderElectionID:           leaderElectionID(providers),
		LeaderElectionResourceLock: resourcelock.LeasesResourceLock,
		LeaderElectionNamespace:    flags.LeaderElectNamespace,
		LeaseDuration:              &flags.LeaseDuration,
		RenewDeadline:              &flags.RenewDeadline,
		RetryPeriod:                &flags.RetryPeriod,
		// The process ends with its context, so the next leader does not have to wait for the end of the lease.
		LeaderElectionReleaseOnCancel: true,
		HealthProbeBindAddress:        flags.HealthAddr,
		PprofBindAddress:              flags.ProfilerAddress,
		Metrics:                       *metrics,
		Cache:                         cacheOptions(flags),
		Client:                        clientOptions(),
	}
	if flags.WebhookPort != 0 {
		if options.WebhookServer, err = webhookServer(flags, tlsOptions); err != nil {
			return nil, err
		}
	}
	reportCertificates(flags)
	mgr, err := ctrl.NewManager(restConfig, options)
	if err != nil {
		return nil, err
	}
	opts, err := shared(ctx, mgr, flags, providers)
	if err != nil {
		return nil, err
	}
	return mgr, errors.Join(indexByCluster(ctx, mgr, providers), setup(ctx, mgr, opts, flags, providers), migrateStorage(ctx, mgr, flags, providers), addChecks(mgr, flags),
		addCertificates(mgr, flags, options.LeaderElectionID))
}

// reportCertificates reports the certificates with which this process serves, and those in the folders of the flags.
func reportCertificates(flags *Flags) {
	if flags.WebhookPort != 0 {
		expiry.ReportFolder(expiry.KindWebhook, flags.WebhookCertDir)
	}
	for _, dir := range flags.CertificateDirs {
		expiry.ReportFolder(expiry.KindManagementPlane, dir)
	}
}

func leaderElectionID(providers []reconciling.Provider) string {
	if len(providers) > 1 {
		return "controller-leader-election-capstan"
	}
	return "controller-leader-election-capstan-" + providers[0].Name
}

// indexByCluster adds the indexes of all providers. Two providers can list the same kind, and a cache accepts an index once.
func indexByCluster(ctx context.Context, mgr ctrl.Manager, providers []reconciling.Provider) error {
	indexed := map[reflect.Type]bool{}
	for _, p := range providers {
		for _, kind := range p.ByCluster {
			if indexed[reflect.TypeOf(kind)] {
				continue
			}
			indexed[reflect.TypeOf(kind)] = true
			if err := reconciling.IndexByCluster(ctx, mgr.GetFieldIndexer(), kind); err != nil {
				return err
			}
		}
	}
	return nil
}

func setup(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options, flags *Flags, providers []reconciling.Provider) error {
	for _, p := range providers {
		if err := p.Setup(ctx, mgr, opts); err != nil {
			return fmt.Errorf("%s provider: %w", p.Name, err)
		}
		info.WithLabelValues(p.Name, version.Version, flags.WatchNamespace, flags.WatchFilter).Set(1)
		if flags.WebhookPort == 0 || p.SetupWebhooks == nil {
			continue
		}
		if err := p.SetupWebhooks(ctx, mgr, opts); err != nil {
			return fmt.Errorf("webhooks of the %s provider: %w", p.Name, err)
		}
	}
	return nil
}

func addChecks(mgr ctrl.Manager, flags *Flags) error {
	check := healthz.Ping
	if flags.WebhookPort != 0 {
		check = mgr.GetWebhookServer().StartedChecker()
	}
	return errors.Join(mgr.AddReadyzCheck("serving", check), mgr.AddHealthzCheck("serving", check))
}

// shared creates the objects that all providers of the process share.
func shared(ctx context.Context, mgr ctrl.Manager, flags *Flags, providers []reconciling.Provider) (reconciling.Options, error) {
	opts, err := newOptions(mgr)
	if err != nil {
		return opts, err
	}
	opts.WatchNamespace, opts.WatchFilter = flags.WatchNamespace, flags.WatchFilter
	opts.StrictContract = flags.StrictContract
	opts.Concurrency = map[string]int{}
	for kind, n := range flags.Concurrency {
		opts.Concurrency[kind] = *n
	}
	var indexes []clustercache.CacheOptionsIndex
	for _, p := range providers {
		indexes = append(indexes, p.ClusterIndexes...)
	}
	for _, p := range providers {
		if !p.NeedsClusterCache || opts.ClusterCache != nil {
			continue
		}
		if err := index.AddDefaultIndexes(ctx, mgr); err != nil {
			return opts, err
		}
		opts.ClusterCache, err = clustercache.SetupWithManager(ctx, mgr, clustercache.Options{
			SecretClient:     kubeconfig.Reader{Secrets: opts.SecretCachingClient, Clusters: mgr.GetClient()},
			WatchFilterValue: flags.WatchFilter,
			ClusterFilter:    worthConnecting,
			Cache: clustercache.CacheOptions{
				DefaultTransform: ctrlcache.TransformStripManagedFields(),
				Indexes:          indexes,
			},
			Client: clustercache.ClientOptions{
				QPS: flags.ClusterCacheQPS, Burst: flags.ClusterCacheBurst,
				UserAgent: remote.DefaultClusterAPIUserAgent("capstan-manager"),
				Cache:     clustercache.ClientCacheOptions{DisableFor: append(uncached(), nodedrain.Uncached()...)},
			},
		}, controller.Options{MaxConcurrentReconciles: flags.ClusterCacheConcurrency})
		if err != nil {
			return opts, fmt.Errorf("cache of workload clusters: %w", err)
		}
	}
	return opts, nil
}

// worthConnecting delays the first connection until the API server answers, because ClusterCache waits for 30 s after a
// failure. Capstan's control plane provider reports the first answer. With another control plane provider the cache
// connects as usual.
func worthConnecting(cluster *clusterv1.Cluster) bool {
	ours := cluster.Spec.ControlPlaneRef.APIGroup == controlplanev1.GroupVersion.Group
	return !ours || ptr.Deref(cluster.Status.Initialization.ControlPlaneInitialized, false)
}

// newOptions returns options with the clients of a manager.
func newOptions(mgr ctrl.Manager) (reconciling.Options, error) {
	secrets, err := client.New(mgr.GetConfig(), client.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
		Cache: &client.CacheOptions{Reader: mgr.GetCache()},
	})
	if err != nil {
		return reconciling.Options{}, err
	}
	live, err := client.New(mgr.GetConfig(), client.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
	})
	return reconciling.Options{SecretCachingClient: secrets, LiveClient: reconciling.Live(live)}, err
}

// uncached contains the kinds that the manager's own client reads live.
func uncached() []client.Object { return []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}} }

func clientOptions() client.Options {
	return client.Options{Cache: &client.CacheOptions{DisableFor: uncached(), Unstructured: true}}
}

// cacheOptions limits the cache: only Secrets of clusters, and no managed fields.
func cacheOptions(flags *Flags) ctrlcache.Options {
	ofCluster, err := labels.NewRequirement(clusterv1.ClusterNameLabel, selection.Exists, nil)
	utilruntime.Must(err)
	options := ctrlcache.Options{
		SyncPeriod:       &flags.SyncPeriod,
		DefaultTransform: ctrlcache.TransformStripManagedFields(),
		ByObject: map[client.Object]ctrlcache.ByObject{
			&corev1.Secret{}: {Label: labels.NewSelector().Add(*ofCluster)},
		},
	}
	if flags.WatchNamespace != "" {
		options.DefaultNamespaces = map[string]ctrlcache.Config{flags.WatchNamespace: {}}
	}
	return options
}
