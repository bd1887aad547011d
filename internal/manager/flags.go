package manager

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/feature"
	capiflags "sigs.k8s.io/cluster-api/util/flags"

	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/tracing/collector"
)

// Flags of a manager process; they are named as those of Cluster API's own managers (ALL-07).
type Flags struct {
	Kubeconfig string
	QPS        float32
	Burst      int

	WatchNamespace string
	WatchFilter    string
	SyncPeriod     time.Duration
	// StrictContract: see Options.
	StrictContract bool
	// Concurrency by kind.
	Concurrency map[string]*int

	LeaderElect          bool
	LeaderElectNamespace string
	LeaseDuration        time.Duration
	RenewDeadline        time.Duration
	RetryPeriod          time.Duration

	HealthAddr      string
	ProfilerAddress string
	// Serving of metrics and webhooks.
	Serving capiflags.ManagerOptions

	// WebhookPort is 0 when no webhooks are served.
	WebhookPort     int
	WebhookHost     string
	WebhookCertDir  string
	WebhookCertName string
	WebhookKeyName  string
	// HookClientCA is the authority of the clients of hooks; HookClientName is the name that they need. Without an authority,
	// every client can call the hooks, which change nothing.
	HookClientCA   string
	HookClientName string
	// CertificateDirs are folders of certificates whose expiry is reported, in addition to the webhooks' certificates.
	CertificateDirs []string

	ClusterCacheQPS         float32
	ClusterCacheBurst       int
	ClusterCacheConcurrency int

	Logs *logging.Flags
	// Tracing describes the collector of spans.
	Tracing collector.Flags
}

// AddFlags adds the flags of a process that runs the providers.
func AddFlags(fs *pflag.FlagSet, providers []reconciling.Provider) *Flags {
	f := &Flags{Concurrency: map[string]*int{}, Logs: logging.New()}
	f.Logs.AddAll(fs)
	f.Tracing.Add(fs)

	fs.StringVar(&f.Kubeconfig, "kubeconfig", "",
		"Kubeconfig of the management cluster. Without it: $KUBECONFIG, else the service account of the Pod, else ~/.kube/config.")
	fs.Float32Var(&f.QPS, "kube-api-qps", 100, "Most queries per second to the API server of the management cluster.")
	fs.IntVar(&f.Burst, "kube-api-burst", 200, "Most queries in one burst to the API server of the management cluster.")

	fs.StringVar(&f.WatchNamespace, "namespace", "", "Namespace to reconcile objects in; all namespaces when empty.")
	fs.StringVar(&f.WatchFilter, "watch-filter", "",
		fmt.Sprintf("Reconcile only objects whose label %s has this value; all objects when empty.", clusterv1.WatchLabel))
	fs.DurationVar(&f.SyncPeriod, "sync-period", 10*time.Minute, "Interval at which all objects are reconciled again.")

	fs.BoolVar(&f.StrictContract, "strict-contract", false,
		"Take no step ahead of Cluster API core: wait until core has written Cluster.spec.controlPlaneEndpoint and status.initialization.infrastructureProvisioned, and leave the finalizers, owner references and bootstrap data names of Machines to core. Clusters start some seconds later.")

	f.addElection(fs)
	f.addServing(fs)
	f.addWebhooks(fs)
	f.addClusterCache(fs)

	for _, p := range providers {
		for _, kind := range p.Kinds {
			f.Concurrency[kind] = fs.Int(strings.ToLower(kind)+"-concurrency", reconciling.DefaultConcurrency,
				fmt.Sprintf("%ss to reconcile at the same time.", kind))
		}
		if p.AddFlags != nil {
			p.AddFlags(fs)
		}
	}
	feature.MutableGates.AddFlag(fs)
	return f
}

func (f *Flags) addElection(fs *pflag.FlagSet) {
	fs.BoolVar(&f.LeaderElect, "leader-elect", false, "Elect one leader among several managers.")
	fs.StringVar(&f.LeaderElectNamespace, "leader-elect-namespace", "", "Namespace of the lease; that of the Pod when empty.")
	fs.DurationVar(&f.LeaseDuration, "leader-elect-lease-duration", 15*time.Second, "How long others wait before they take over from a leader that is silent.")
	fs.DurationVar(&f.RenewDeadline, "leader-elect-renew-deadline", 10*time.Second, "How long the leader tries to renew its lease before it gives up.")
	fs.DurationVar(&f.RetryPeriod, "leader-elect-retry-period", 2*time.Second, "Pause between attempts to get or renew the lease.")
}

func (f *Flags) addServing(fs *pflag.FlagSet) {
	fs.StringVar(&f.HealthAddr, "health-addr", ":9440", "Address of /healthz and /readyz; 0 for none.")
	fs.StringVar(&f.ProfilerAddress, "profiler-address", "", "Address of the pprof profiler, for example localhost:6060; none when empty.")
	capiflags.AddManagerOptions(fs, &f.Serving)
}

func (f *Flags) addWebhooks(fs *pflag.FlagSet) {
	fs.IntVar(&f.WebhookPort, "webhook-port", 9443, "Port of the webhooks; 0 for none.")
	fs.StringVar(&f.WebhookHost, "webhook-host", "", "Address of the webhooks; all addresses when empty.")
	fs.StringVar(&f.WebhookCertDir, "webhook-cert-dir", "/tmp/k8s-webhook-server/serving-certs/", "Folder with the certificate of the webhooks.")
	fs.StringVar(&f.WebhookCertName, "webhook-cert-name", "tls.crt", "Name of the certificate in --webhook-cert-dir.")
	fs.StringVar(&f.WebhookKeyName, "webhook-key-name", "tls.key", "Name of the private key in --webhook-cert-dir.")

	fs.StringVar(&f.HookClientCA, "runtime-extension-client-ca-file", "",
		"Certificate authority of the clients that may call the hooks of updates in place: that of core's flag --runtime-extension-client-cert-file. Every client may when empty.")
	fs.StringVar(&f.HookClientName, "runtime-extension-client-name", "", "Common name of the clients that may call the hooks; any when empty.")

	fs.StringSliceVar(&f.CertificateDirs, "certificate-dir", nil, "Folder of certificates (*.crt) whose expiry is reported in a metric, as that of the webhooks is. Repeatable.")
}

func (f *Flags) addClusterCache(fs *pflag.FlagSet) {
	fs.Float32Var(&f.ClusterCacheQPS, "clustercache-client-qps", 20, "Most queries per second to the API server of one workload cluster.")
	fs.IntVar(&f.ClusterCacheBurst, "clustercache-client-burst", 30, "Most queries in one burst to the API server of one workload cluster.")
	fs.IntVar(&f.ClusterCacheConcurrency, "clustercache-concurrency", 100, "Workload clusters to connect to at the same time.")
}
