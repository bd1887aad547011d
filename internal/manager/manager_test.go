package manager_test

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/feature"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manager"
)

// ALL-07: the flags are those of Cluster API's managers, with their defaults.
func TestFlags_ALL07(t *testing.T) {
	fs := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	f := manager.AddFlags(fs, []manager.Provider{{Name: "x", Kinds: []string{"CapstanMachine"}}})
	for _, name := range []string{
		"namespace", "watch-filter", "leader-elect", "leader-elect-lease-duration", "leader-elect-renew-deadline", "leader-elect-retry-period",
		"kubeconfig", "diagnostics-address", "insecure-diagnostics", "tls-min-version", "health-addr", "webhook-port", "webhook-cert-dir",
		"sync-period", "kube-api-qps", "kube-api-burst", "capstanmachine-concurrency", "profiler-address", "feature-gates", "logging-format", "v",
	} {
		if fs.Lookup(name) == nil {
			t.Errorf("no flag --%s", name)
		}
	}
	if f.SyncPeriod != 10*time.Minute || f.WebhookPort != 9443 || f.LeaderElect || *f.Concurrency["CapstanMachine"] != manager.DefaultConcurrency {
		t.Errorf("defaults: %+v", f)
	}
	if !feature.Gates.Enabled(feature.ReconcilerRateLimiting) {
		t.Error("ReconcilerRateLimiting is on by default in core")
	}
	if err := fs.Parse([]string{"--capstanmachine-concurrency=7", "--namespace=ns"}); err != nil || *f.Concurrency["CapstanMachine"] != 7 || f.WatchNamespace != "ns" {
		t.Errorf("%v: %+v", err, f)
	}
}

// ALL-07
func TestOptions_ALL07(t *testing.T) {
	o := manager.Options{WatchFilter: "blue", Concurrency: map[string]int{"A": 3}}
	if n := o.For("A").MaxConcurrentReconciles; n != 3 {
		t.Error(n)
	}
	if n := o.For("B").MaxConcurrentReconciles; n != manager.DefaultConcurrency {
		t.Error(n)
	}
	with := func(value string) client.Object {
		return &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1.WatchLabel: value}}}
	}
	if !o.Watches(with("blue")) || o.Watches(with("red")) || o.Watches(&infrav1.CapstanMachine{}) {
		t.Error("the watch filter lets the wrong objects through")
	}
	if !(manager.Options{}).Watches(with("red")) {
		t.Error("no filter watches all")
	}
}

func TestIgnoreStatus(t *testing.T) {
	now := metav1.Now()
	for name, tc := range map[string]struct {
		change func(*infrav1.CapstanMachine)
		want   bool
	}{
		"status":      {change: func(m *infrav1.CapstanMachine) { m.Status.FailureDomain = "a" }},
		"finalizers":  {change: func(m *infrav1.CapstanMachine) { m.Finalizers = []string{"a/b"} }},
		"resync":      {change: func(m *infrav1.CapstanMachine) { m.ResourceVersion = "1" }, want: true},
		"spec":        {change: func(m *infrav1.CapstanMachine) { m.Generation++ }, want: true},
		"labels":      {change: func(m *infrav1.CapstanMachine) { m.Labels = map[string]string{"a": "b"} }, want: true},
		"annotations": {change: func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{"a": "b"} }, want: true},
		"owner":       {change: func(m *infrav1.CapstanMachine) { m.OwnerReferences = []metav1.OwnerReference{{UID: "a"}} }, want: true},
		"deletion":    {change: func(m *infrav1.CapstanMachine) { m.DeletionTimestamp = &now }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			before := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}}
			after := before.DeepCopy()
			after.ResourceVersion = "2"
			tc.change(after)
			if got := manager.IgnoreStatus().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
}

func TestOwnedOrDeleting(t *testing.T) {
	machine := clusterv1.GroupVersion.WithKind("Machine").GroupKind()
	now := metav1.Now()
	owned := func(apiVersion, kind string) client.Object {
		return &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind}}}}
	}
	for name, tc := range map[string]struct {
		obj  client.Object
		want bool
	}{
		"no owner":        {obj: &infrav1.CapstanMachine{}},
		"another owner":   {obj: owned("cluster.x-k8s.io/v1beta2", "MachineSet")},
		"another group":   {obj: owned("example.com/v1", "Machine")},
		"owner":           {obj: owned("cluster.x-k8s.io/v1beta2", "Machine"), want: true},
		"another version": {obj: owned("cluster.x-k8s.io/v1beta1", "Machine"), want: true},
		"deleting":        {obj: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := manager.OwnedOrDeleting(machine).Create(event.CreateEvent{Object: tc.obj}); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
}

// ALL-09: Ready says why, over the whole life.
func TestSetReady_ALL09(t *testing.T) {
	type c = metav1.Condition
	for name, tc := range map[string]struct {
		conditions     []c
		status, reason string
	}{
		"nothing was tried": {},
		"all well":          {conditions: []c{{Type: "A", Status: "True", Reason: "X"}, {Type: "B", Status: "True", Reason: "Y"}}, status: "True", reason: "Ready"},
		"first reason":      {conditions: []c{{Type: "A", Status: "False", Reason: "X"}, {Type: "B", Status: "False", Reason: "Y"}}, status: "False", reason: "X"},
		"order of types":    {conditions: []c{{Type: "B", Status: "False", Reason: "Y"}, {Type: "A", Status: "False", Reason: "X"}}, status: "False", reason: "X"},
		"unknown":           {conditions: []c{{Type: "A", Status: "Unknown", Reason: "X"}, {Type: "B", Status: "True", Reason: "Y"}}, status: "Unknown", reason: "X"},
		"missing is fine":   {conditions: []c{{Type: "B", Status: "True", Reason: "Y"}}, status: "True", reason: "Ready"},
		"deleting":          {conditions: []c{{Type: "A", Status: "True", Reason: "X"}, {Type: "Deleting", Status: "True", Reason: "Z"}}, status: "False", reason: "Z"},
	} {
		t.Run(name, func(t *testing.T) {
			m := &infrav1.CapstanMachine{}
			m.SetConditions(tc.conditions)
			if err := manager.SetReady(m, "A", "B"); err != nil {
				t.Fatal(err)
			}
			got := conditions.Get(m, "Ready")
			if got == nil {
				got = &metav1.Condition{}
			}
			if string(got.Status) != tc.status || got.Reason != tc.reason {
				t.Errorf("Ready: %+v", got)
			}
		})
	}
}
