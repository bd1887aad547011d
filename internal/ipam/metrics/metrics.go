// Package metrics contains the provider's Prometheus metrics. They are registered with controller-runtime's registry,
// which the manager serves.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/ipam/ledger"
)

var (
	poolLabels = []string{"kind", "namespace", "pool"}

	addresses = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_ipam_pool_addresses",
		Help: "Addresses (or prefixes) of a pool by state: total, free, used, resting, out_of_range.",
	}, append(poolLabels[:3:3], "state"))

	waiting = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_ipam_pool_waiting_claims",
		Help: "Claims that wait for an address of a pool.",
	}, poolLabels)

	allocations = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_ipam_allocations_total",
		Help: "Addresses chosen for claims.",
	}, poolLabels)

	batches = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "capstan_ipam_batch_claims",
		Help:    "Claims that shared one write of a pool's record.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 9),
	}, poolLabels)

	recordEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_ipam_record_total",
		Help: "Writes of pools' records by outcome: write, conflict, takeover.",
	}, append(poolLabels[:3:3], "outcome"))
)

func init() {
	ctrlmetrics.Registry.MustRegister(addresses, waiting, allocations, batches, recordEvents)
}

// SetPool sets the gauges of a pool.
func SetPool(key ledger.Key, v ledger.View) {
	set := func(state string, n float64) {
		addresses.WithLabelValues(key.Kind, key.Namespace, key.Name, state).Set(n)
	}
	set("total", v.Total.Float())
	set("free", v.Free.Float())
	set("used", float64(v.Used))
	set("resting", float64(v.Resting))
	set("out_of_range", float64(v.OutOfRange))
	waiting.WithLabelValues(key.Kind, key.Namespace, key.Name).Set(float64(v.Waiting))
}

// DropPool removes the metrics of a deleted pool.
func DropPool(key ledger.Key) {
	labels := prometheus.Labels{"kind": key.Kind, "namespace": key.Namespace, "pool": key.Name}
	for _, vec := range []*prometheus.GaugeVec{addresses, waiting} {
		vec.DeletePartialMatch(labels)
	}
	allocations.DeletePartialMatch(labels)
	batches.DeletePartialMatch(labels)
	recordEvents.DeletePartialMatch(labels)
}

// Observe counts a write of a pool's record.
func Observe(event string, key ledger.Key, claims int) {
	recordEvents.WithLabelValues(key.Kind, key.Namespace, key.Name, event).Inc()
	if event == "write" && claims > 0 {
		allocations.WithLabelValues(key.Kind, key.Namespace, key.Name).Add(float64(claims))
		batches.WithLabelValues(key.Kind, key.Namespace, key.Name).Observe(float64(claims))
	}
}
