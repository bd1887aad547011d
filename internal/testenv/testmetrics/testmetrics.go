// Package testmetrics reads in tests the metrics of the managers that run in the process of the test.
package testmetrics

import (
	"testing"

	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
)

// Series is one series of a metric. Value is the value of a gauge or a counter.
type Series struct {
	Labels map[string]string
	Value  float64
}

// Gather returns the series of a metric that have all these labels.
func Gather(t testing.TB, metric string, labels map[string]string) (out []Series) {
	t.Helper()
	families, err := ctrlmetrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != metric {
			continue
		}
		for _, m := range f.GetMetric() {
			s := Series{Labels: map[string]string{}, Value: m.GetGauge().GetValue() + m.GetCounter().GetValue()}
			for _, l := range m.GetLabel() {
				s.Labels[l.GetName()] = l.GetValue()
			}
			if s.has(labels) {
				out = append(out, s)
			}
		}
	}
	return out
}

func (s Series) has(labels map[string]string) bool {
	for name, value := range labels {
		if s.Labels[name] != value {
			return false
		}
	}
	return true
}

// Sum returns the sum of the series of a metric that have all these labels.
func Sum(t testing.TB, metric string, labels map[string]string) (sum float64) {
	t.Helper()
	for _, s := range Gather(t, metric, labels) {
		sum += s.Value
	}
	return sum
}

// Reconciles returns the number of reconciles of a controller.
func Reconciles(t testing.TB, controller string) float64 {
	t.Helper()
	return Sum(t, "controller_runtime_reconcile_total", map[string]string{"controller": controller})
}
