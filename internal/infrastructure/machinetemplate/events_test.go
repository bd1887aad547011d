package machinetemplate

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// TestClusterChanged: only the pause of a Cluster and its CapstanCluster matter to templates.
func TestClusterChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*clusterv1.Cluster)
		want   bool
	}{
		"the pause":            {func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) }, true},
		"an explicit no pause": {func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(false) }, false},
		"the CapstanCluster":   {func(c *clusterv1.Cluster) { c.Spec.InfrastructureRef.Name = "c" }, true},
		"the endpoint": {func(c *clusterv1.Cluster) {
			c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "10.0.0.1", Port: 6443}
			c.Generation++
		}, false},
		"the status": {func(c *clusterv1.Cluster) { c.Status.Phase = "Provisioned" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(clusterChanged, &clusterv1.Cluster{}, tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	if !clusterChanged.Create(event.CreateEvent{Object: &clusterv1.Cluster{}}) || !clusterChanged.Delete(event.DeleteEvent{Object: &clusterv1.Cluster{}}) {
		t.Error("a Cluster that appears or disappears must reconcile its templates")
	}
}

// TestSelectorChanged: of a CapstanCluster, only its host selector matters to templates.
func TestSelectorChanged(t *testing.T) {
	selecting := func() *infrav1.CapstanCluster {
		return &infrav1.CapstanCluster{Spec: infrav1.CapstanClusterSpec{HostSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}
	}
	for name, tc := range map[string]struct {
		change func(*infrav1.CapstanCluster)
		want   bool
	}{
		"the selector":    {func(c *infrav1.CapstanCluster) { c.Spec.HostSelector.MatchLabels["a"] = "c" }, true},
		"no selector":     {func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = nil }, true},
		"another setting": {func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = "h"; c.Generation++ }, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(selectorChanged, selecting(), tc.change); got != tc.want {
				t.Errorf("passes: %v, want %v", got, tc.want)
			}
		})
	}
	for _, c := range []*infrav1.CapstanCluster{selecting(), {}} {
		want := c.Spec.HostSelector != nil
		if got := selectorChanged.Create(event.CreateEvent{Object: c}); got != want {
			t.Errorf("selects %v: creation passes: %v", want, got)
		}
		if got := selectorChanged.Delete(event.DeleteEvent{Object: c}); got != want {
			t.Errorf("selects %v: deletion passes: %v", want, got)
		}
	}
}

// TestTemplatesOfCluster: an event of a cluster reconciles its templates, and not those of the other clusters of the namespace.
func TestTemplatesOfCluster(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	meta := func(namespace, name, owner string) metav1.ObjectMeta {
		out := metav1.ObjectMeta{Namespace: namespace, Name: name}
		if owner != "" {
			out.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: owner}}
		}
		return out
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&infrav1.CapstanMachineTemplate{ObjectMeta: meta("ns", "of-a", "a")}, &infrav1.CapstanMachineTemplate{ObjectMeta: meta("ns", "of-b", "b")},
		&infrav1.CapstanMachineTemplate{ObjectMeta: meta("ns", "of-none", "")}, &infrav1.CapstanMachineTemplate{ObjectMeta: meta("other", "of-a", "a")},
		&infrav1.CapstanMachinePoolTemplate{ObjectMeta: meta("ns", "pool-of-a", "a")}, &infrav1.CapstanMachinePoolTemplate{ObjectMeta: meta("ns", "pool-of-b", "b")},
	).Build()
	machines, pools := &Reconciler{Client: c, Kind: Kinds[0]}, &Reconciler{Client: c, Kind: Kinds[1]}
	cluster := &clusterv1.Cluster{ObjectMeta: meta("ns", "a", "")}
	owned, unowned := &infrav1.CapstanCluster{ObjectMeta: meta("ns", "any", "a")}, &infrav1.CapstanCluster{ObjectMeta: meta("ns", "any", "")}
	names := func(requests []reconcile.Request) []string {
		var out []string
		for _, req := range requests {
			out = append(out, req.Namespace+"/"+req.Name)
		}
		slices.Sort(out)
		return out
	}
	for name, tc := range map[string]struct {
		got  []reconcile.Request
		want []string
	}{
		"a Cluster":                          {machines.ofCluster(t.Context(), cluster), []string{"ns/of-a"}},
		"a Cluster, for pools":               {pools.ofCluster(t.Context(), cluster), []string{"ns/pool-of-a"}},
		"a CapstanCluster":                   {machines.ofCapstanCluster(t.Context(), owned), []string{"ns/of-a"}},
		"a CapstanCluster, for pools":        {pools.ofCapstanCluster(t.Context(), owned), []string{"ns/pool-of-a"}},
		"a CapstanCluster without its owner": {machines.ofCapstanCluster(t.Context(), unowned), []string{"ns/of-a", "ns/of-b", "ns/of-none"}},
	} {
		if got := names(tc.got); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}
