package manager_test

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/cluster-api/feature"

	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/reconciling"
)

// ALL-07: the flags and their defaults are those of Cluster API's managers.
func TestFlags_ALL07(t *testing.T) {
	fs := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	f := manager.AddFlags(fs, []reconciling.Provider{{Name: "x", Kinds: []string{"CapstanMachine"}}})
	for _, name := range []string{
		"namespace", "watch-filter", "leader-elect", "leader-elect-lease-duration", "leader-elect-renew-deadline", "leader-elect-retry-period",
		"kubeconfig", "diagnostics-address", "insecure-diagnostics", "tls-min-version", "health-addr", "webhook-port", "webhook-cert-dir",
		"sync-period", "kube-api-qps", "kube-api-burst", "capstanmachine-concurrency", "profiler-address", "feature-gates", "logging-format", "v",
	} {
		if fs.Lookup(name) == nil {
			t.Errorf("no flag --%s", name)
		}
	}
	if f.SyncPeriod != 10*time.Minute || f.WebhookPort != 9443 || f.LeaderElect || *f.Concurrency["CapstanMachine"] != reconciling.DefaultConcurrency {
		t.Errorf("defaults: %+v", f)
	}
	if !feature.Gates.Enabled(feature.ReconcilerRateLimiting) {
		t.Error("ReconcilerRateLimiting is on by default in core")
	}
	if err := fs.Parse([]string{"--capstanmachine-concurrency=7", "--namespace=ns"}); err != nil || *f.Concurrency["CapstanMachine"] != 7 || f.WatchNamespace != "ns" {
		t.Errorf("%v: %+v", err, f)
	}
}
