package manager

import (
	"github.com/prometheus/client_golang/prometheus"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
)

// info has a series in each scrape of a manager, so that its absence means that no manager of a provider answers. Several managers can
// share the objects of a provider by their flags. Prometheus gives the namespace of the Pod to the label namespace.
var info = prometheus.NewGaugeVec(prometheus.GaugeOpts{
	Name: "capstan_manager_info",
	Help: "Version of a provider that runs in the manager, and the flags --namespace and --watch-filter of the manager; always 1.",
}, []string{"provider", "version", "watched_namespace", "watch_filter"})

func init() { ctrlmetrics.Registry.MustRegister(info) }
