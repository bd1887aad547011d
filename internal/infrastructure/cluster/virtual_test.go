package cluster

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/expect"
)

// virtualCIDR is the network of the cluster of poolWithVirtual.
const virtualCIDR = "10.200.8.0/21"

// poolWithVirtual returns a pool with a host that has reported its load balancer for the cluster ns/c with a virtual address.
func poolWithVirtual(t *testing.T, name, address string) (*connections.Pool, *infrav1.CapstanHost) {
	t.Helper()
	server := fakehost.New(t)
	_, err := server.EnsureNetwork(t.Context(), &hostpb.Network{Id: "net", Namespace: "ns", Name: "c", Cidr: virtualCIDR})
	expect.NoError(t, err)
	_, err = server.EnsureLoadBalancer(t.Context(), &hostpb.LoadBalancer{
		Id: "net", Namespace: "ns", Name: "c", NetworkId: "net", Listen: []string{":6443"},
		Endpoint: address + ":6443", VirtualAddress: &hostpb.VirtualAddress{Address: address},
	})
	expect.NoError(t, err)
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{Address: server.Address()}}
	pool := connections.NewPool(t.Context(), nil)
	conn, err := pool.Connect(t.Context(), host)
	expect.NoError(t, err)
	expect.True(t, "the host has reported its load balancer", func() bool { return conn.LoadBalancer("net") != nil })
	return pool, host
}

// ALL-18: the report of a host reserves an address for a new cluster only if the administrator has listed the address on this host. Root on
// any host can report any address.
func TestReportedEndpoint_ALL18(t *testing.T) {
	const address = "203.0.113.64"
	pool, host := poolWithVirtual(t, "h", address)
	for name, tc := range map[string]struct {
		namespace, listed string
		boots, want       bool
	}{
		"not listed":                  {namespace: "ns"},
		"another address listed":      {namespace: "ns", listed: "203.0.113.65/32"},
		"listed":                      {namespace: "ns", listed: "203.0.113.64/28", want: true},
		"its machines may boot":       {namespace: "ns", boots: true, want: true},
		"the load balancer of others": {namespace: "thief", listed: "203.0.113.64/28"},
		"of others, its machines run": {namespace: "thief", boots: true},
	} {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: tc.namespace, Name: "c"}}
		c.Spec.ID, c.Spec.ControlPlaneEndpoint.Host = "net", address
		c.Spec.Network.MachineCIDR, c.Spec.Network.Overlay.VNI = virtualCIDR, 5000
		c.Status.Initialization.Provisioned = ptr.To(tc.boots)
		if host.Spec.VirtualAddresses = nil; tc.listed != "" {
			host.Spec.VirtualAddresses = []string{tc.listed}
		}
		if got := (&Reconciler{Pool: pool}).hasEndpoint(c, []infrav1.CapstanHost{*host}); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A new host takes part in the election of the virtual address while the load balancer's host is unknown to the manager, because another
// host of the cluster reports that it takes part.
func TestElectionWithoutFirstHost(t *testing.T) {
	const address = "203.0.113.64"
	pool, _ := poolWithVirtual(t, "second", address)
	third := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "third"}, Spec: infrav1.CapstanHostSpec{VirtualAddresses: []string{address + "/32"}}}
	added, err := pool.Connect(t.Context(), &infrav1.CapstanHost{ObjectMeta: third.ObjectMeta, Spec: infrav1.CapstanHostSpec{Address: fakehost.New(t).Address()}})
	expect.NoError(t, err)
	for name, want := range map[string]bool{"c": true, "copy": false} {
		s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}, capstan: &infrav1.CapstanCluster{}}
		s.cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		spec := &s.capstan.Spec
		spec.ID, spec.ControlPlaneEndpoint.Host, spec.LoadBalancer.HostName = "net", address, "lost"
		spec.Network.MachineCIDR, spec.Network.Overlay.VNI = virtualCIDR, 5000
		spec.LoadBalancerHosts = []infrav1.LoadBalancerHost{{Name: "lost"}, {Name: "second"}, {Name: "third"}}
		if v := (&Reconciler{Pool: pool}).virtualAddress(s, third, added); (v.GetAddress() == address) != want || v.GetFirst() {
			t.Errorf("cluster %s: found %v, want a part in the election: %v", name, v, want)
		}
	}
}
