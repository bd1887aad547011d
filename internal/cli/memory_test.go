package cli

import (
	"bytes"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/templates"
)

// hostWith returns a host with free memory; "" if it does not report it.
func hostWith(memory string) (h infrav1.CapstanHost) {
	if memory != "" {
		h.Status.Allocatable = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse(memory)}
	}
	return h
}

// TestWarnOfMemory: a machine needs the free memory of one host.
func TestWarnOfMemory(t *testing.T) {
	const mib = 1 << 20
	for name, test := range map[string]struct {
		limits []int64
		hosts  []infrav1.CapstanHost
		want   string
	}{
		"they fit":           {[]int64{512 * mib, 2048 * mib, 1000 * mib}, []infrav1.CapstanHost{hostWith("1023Mi"), hostWith("2560Mi")}, ""},
		"too many":           {[]int64{1024 * mib, 2048 * mib, 1024 * mib}, []infrav1.CapstanHost{hostWith("3Gi")}, "3 new machines with limits of 4096 MiB together do not fit: the hosts have free memory for 2 of them. The other machines wait for more hosts\n"},
		"no host has enough": {[]int64{2048 * mib}, []infrav1.CapstanHost{hostWith("1Gi"), hostWith("1Gi")}, "1 new machines with limits of 2048 MiB together do not fit: the hosts have free memory for 0 of them. The other machines wait for more hosts\n"},
		"an unknown host":    {[]int64{2048 * mib}, []infrav1.CapstanHost{hostWith("512Mi"), hostWith("")}, ""},
		"no hosts":           {[]int64{2048 * mib}, nil, ""},
		"no machines":        {nil, []infrav1.CapstanHost{hostWith("0")}, ""},
	} {
		var out bytes.Buffer
		(&app{errOut: &out}).warnOfMemory(test.limits, false, test.hosts)
		if out.String() != test.want {
			t.Errorf("%s: %q", name, out.String())
		}
	}
}

// TestMemoryLimits: the limits come from the templates of the machines, also in a pool and a topology.
func TestMemoryLimits(t *testing.T) {
	for _, flavor := range append(flavors(templates.FS), "") {
		o, _, objects := rendered(t, flavor, map[string]string{"CAPSTAN_WORKER_MEMORY": "768Mi", "CAPSTAN_MACHINE_CIDR": "10.0.0.0/24", "CAPSTAN_MACHINE_IPV6_CIDR": "fd00::/64"})
		want := slices.Concat(slices.Repeat([]int64{2 << 30}, o.controlPlanes), slices.Repeat([]int64{768 << 20}, o.workers))
		got := memoryLimits(objects)
		slices.Sort(got)
		slices.Reverse(got)
		if !slices.Equal(got, want) {
			t.Errorf("flavor %q: %d, want %d", flavor, got, want)
		}
	}
	unknown := []*unstructured.Unstructured{parseObject(t, controlPlaneA), parseObject(t, topologyCluster)}
	unknown[0].Object["spec"].(map[string]any)["machineTemplate"] = map[string]any{"spec": map[string]any{"infrastructureRef": map[string]any{"kind": "OtherTemplate", "name": "a"}}}
	if got := memoryLimits(unknown); !slices.Equal(got, slices.Repeat([]int64{smallestMachine}, 5)) {
		t.Errorf("machines without a known limit: %d", got)
	}
}

// managementWith returns a management cluster with a host, and with a Cluster unless it is nil.
func managementWith(t *testing.T, cluster *clusterv1.Cluster, host infrav1.CapstanHost) *management {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	host.Name, host.Status.Versions = "local", []string{"v1.36.3"}
	existing := []client.Object{&host}
	if cluster != nil {
		existing = append(existing, cluster)
	}
	return &management{client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(existing...).WithStatusSubresource(&infrav1.CapstanHost{}).Build()}
}
