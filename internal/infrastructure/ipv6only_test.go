package infrastructure_test

import (
	"net"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

const onlySixCIDR = "fd00:78:8::/64"

// sixNetworks are the networks of pods and Services in a cluster with IPv6 only.
func sixNetworks(c *clusterv1.Cluster) {
	c.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{"fd00:10:244::/56"}
	c.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"fd00:10:96::/112"}
}

func onlySix(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = onlySixCIDR }

// With an IPv6 machineCIDR, the endpoint, the machines and the members of the load balancer have IPv6 addresses only. A pool can
// provide them.
func TestIPv6Only(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(sixNetworks, onlySix)
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: "fd00:78:8::1", Port: 6443}))
	made := b.fake.Network(b.capstan.Spec.ID)
	b.Expect([]string{made.GetCidr(), made.GetIpv6Cidr()}).To(Equal([]string{onlySixCIDR, ""}))

	_, first := b.addMachine(controlPlane, nil)
	_, pooled := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[1:] })
	b.fulfil(b.claim(pooled.Name+"-0"), "fd00:78:8::77", 64, "fd00:78:8::1")
	b.running(first)
	b.running(pooled)
	b.Expect(first.Spec.Network.Addresses).To(Equal([]infrav1.InterfaceAddress{{Address: "fd00:78:8::2", Prefix: 64, Gateway: "fd00:78:8::1"}}))
	b.Expect(pooled.Spec.Network.Addresses).To(Equal([]infrav1.InterfaceAddress{{Address: "fd00:78:8::77", Prefix: 64, Gateway: "fd00:78:8::1"}}))
	b.Eventually(b.backends).Should(ConsistOf("[fd00:78:8::2]:6443"))
	for _, m := range []*infrav1.CapstanMachine{first, pooled} {
		b.delete(m)
		b.gone(m)
	}
}

// A condition reports families that do not match, and the cluster continues after a correction.
func TestFamiliesThatDoNotMatch(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	refused := func() string {
		b.t.Helper()
		return b.condition(b.capstan, "NetworkReady", metav1.ConditionFalse, "NetworkInvalid")
	}
	b.addCluster(nil, onlySix)
	b.Expect(refused()).To(ContainSubstring("has another family than the machines, which have IPv6 addresses only"))
	update(b, b.cluster, sixNetworks)
	b.waitProvisioned()

	b.addCluster(sixNetworks, nil)
	b.Expect(refused()).To(ContainSubstring("set spec.network.machineCIDR of the CapstanCluster to an IPv6 network"))

	b.addCluster(func(c *clusterv1.Cluster) {
		c.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: "controlplane.capstan.dev", Kind: "CapstanControlPlane", Name: "cp"}
		c.Spec.ClusterNetwork = clusterv1.ClusterNetwork{}
	}, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "fd00:78:9::/64" })
	b.Expect(refused()).To(ContainSubstring("set IPv6 networks in spec.clusterNetwork.pods and spec.clusterNetwork.services"))

	b.addCluster(func(c *clusterv1.Cluster) {
		sixNetworks(c)
		c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "192.0.2.10", Port: 6443}
	}, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "fd00:78:10::/64" })
	b.Expect(refused()).To(ContainSubstring("the control plane endpoint 192.0.2.10 is IPv4"))
}

// IC-10: on hosts with virtual addresses of both families, the endpoint of a cluster with IPv6 only has an IPv6 address, and that of
// another cluster an IPv4 address.
func TestVirtualAddressesOfBothFamilies_IC10(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	host := b.rack(1)[0]
	for _, bad := range []string{"2001:db8:5::/64", "2001:db8:5::1/127", "ff02::/120", "203.0.0.0/15"} {
		b.Expect(changed(host.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{bad} })).
			To(MatchError(ContainSubstring("must be networks of at most 65536 addresses and without host bits")), bad)
	}
	update(b, host.CapstanHost, func(h *infrav1.CapstanHost) {
		h.Spec.VirtualAddresses = []string{"203.0.113.90/32", "2001:db8:5::90/128"}
	})
	for want, create := range map[string]func(){
		"203.0.113.90":   func() { b.addCluster(nil, nil) },
		"2001:db8:5::90": func() { b.addCluster(sixNetworks, onlySix) },
	} {
		create()
		b.waitProvisioned()
		b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: want, Port: 6443}))
		lb := host.fake.LoadBalancer(b.capstan.Spec.ID)
		b.Expect([]string{lb.GetEndpoint(), lb.GetVirtualAddress().GetAddress()}).To(Equal([]string{net.JoinHostPort(want, "6443"), want}))
	}
}
