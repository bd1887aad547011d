package infrastructure_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// lanCluster changes a new cluster to one in the LAN lab, with an endpoint of the user.
func lanCluster(c *infrav1.CapstanCluster) {
	c.Spec.Network.LAN.Name = "lab"
	c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal
	c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "192.0.2.5", Port: 6443}
}

// ALL-18: a cluster in a LAN waits until a host offers the LAN to its namespace, and has the network of the LAN then. Its machines
// have addresses of a pool that the host allows, and go only to hosts with the LAN. A machine that names its host, id and address
// itself gets nothing more.
func TestLAN_ALL18(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.Lans = true })
	_, _ = b.addHost(nil) // has no LAN
	b.addCluster(nil, lanCluster)
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason)).
		To(ContainSubstring("does not offer the LAN lab to namespace %s", b.namespace))
	offer := infrav1.LANNetwork{
		Name: "lab", Bridge: "br-lab", CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26"},
		AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{b.namespace}},
	}
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks = []infrav1.LANNetwork{offer} })
	b.provisioned()
	b.Expect(b.capstan.Spec.Network.MachineCIDR).To(Equal("192.0.2.0/24"))
	b.Expect(b.capstan.Status.FailureDomains).To(HaveLen(1))
	b.Expect(b.capstan.Status.FailureDomains[0].Name).To(Equal(b.host.Name))
	b.Expect(b.fake.Calls("EnsureNetwork") + b.fake.Calls("EnsureLoadBalancer")).To(BeZero())

	_, without := b.addMachine(nil, nil)
	b.Expect(b.condition(without, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)).
		To(ContainSubstring("set spec.network.addressesFromPools"))
	fromPool := func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] }
	_, stray := b.addMachine(nil, fromPool)
	b.fulfil(b.claim(stray.Name+"-0"), "192.0.2.9", 24, "192.0.2.254")
	b.Expect(b.condition(stray, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).
		To(ContainSubstring("does not allow machines of namespace %s to have the address 192.0.2.9 in the LAN lab", b.namespace))
	_, lost := b.addMachine(nil, fromPool)
	b.fulfil(b.claim(lost.Name+"-0"), "192.0.2.131", 24, "")
	b.Expect(b.condition(lost, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)).To(ContainSubstring("has no gateway"))
	_, forged := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.ID, m.Spec.HostName = "forged-"+m.Name, b.host.Name
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: "192.0.2.254", Prefix: 24, Gateway: "192.0.2.254"}}
	})
	b.Expect(b.condition(forged, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).To(ContainSubstring("the address 192.0.2.254"))

	_, m := b.addMachine(nil, fromPool)
	b.fulfil(b.claim(m.Name+"-0"), "192.0.2.130", 24, "192.0.2.254")
	b.running(m)
	b.Expect(m.Spec.HostName).To(Equal(b.host.Name))
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetNetwork().GetLan().GetBridge()).To(Equal("br-lab"))
	b.Expect(made.GetSpec().GetNetwork().GetLan().GetPods()).To(Equal([]string{"192.168.0.0/16"}))
	b.Expect(made.GetSpec().GetAddresses()[0].GetGateway()).To(Equal("192.0.2.254"))

	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks = nil })
	_, late := b.addMachine(nil, fromPool)
	b.fulfil(b.claim(late.Name+"-0"), "192.0.2.132", 24, "192.0.2.254")
	b.Expect(b.condition(late, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("does not offer the LAN lab"))
	b.running(m)
	b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
}

// ALL-18, IPAM-08: machines of a dual-stack cluster in a LAN have an address and a gateway of each family, from two pools. Pools of one
// family, and addresses that the host does not allow, are refused. Machines in the same LAN with IPv6 only have one address.
func TestLANIPv6_ALL18(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.Lans = true })
	offer := infrav1.LANNetwork{
		Name: "lab", Bridge: "br-lab", CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26"},
		AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{b.namespace}},
	}
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks = []infrav1.LANNetwork{offer} })
	families := func(c *clusterv1.Cluster) {
		c.Spec.ClusterNetwork.Pods.CIDRBlocks, c.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"192.168.0.0/16", "fd00:244::/48"}, []string{"10.96.0.0/16", "fd00:96::/112"}
	}
	b.addCluster(families, func(c *infrav1.CapstanCluster) { lanCluster(c); c.Spec.Network.MachineIPv6CIDR = "2001:db8:7::/64" })
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason)).To(ContainSubstring("has to set ipv6CIDR in spec.lanNetworks"))
	update(b, b.host, func(h *infrav1.CapstanHost) {
		h.Spec.LANNetworks[0].IPv6CIDR, h.Spec.LANNetworks[0].Addresses = "2001:db8:7::/64", []string{"192.0.2.128/26", "2001:db8:7::100/120"}
	})
	b.provisioned()
	b.Expect(b.capstan.Spec.Network.String()).To(Equal("192.0.2.0/24 2001:db8:7::/64"))

	machine := func(addresses ...[2]string) *infrav1.CapstanMachine {
		_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:len(addresses)] })
		for i, a := range addresses {
			bits := int32(24)
			if strings.Contains(a[0], ":") {
				bits = 64
			}
			b.fulfil(b.claim(fmt.Sprint(m.Name, "-", i)), a[0], bits, a[1])
		}
		return m
	}
	for _, tc := range []struct {
		addresses [][2]string
		why       string
	}{
		{[][2]string{{"192.0.2.140", "192.0.2.254"}, {"192.0.2.141", "192.0.2.254"}}, "name one pool for each family"},
		{[][2]string{{"2001:db8:7::140", "2001:db8:7::1"}}, "use an IPv4 pool as well"},
		{[][2]string{{"192.0.2.142", "192.0.2.254"}, {"2001:db8:7::142", ""}}, "2001:db8:7::142 has no gateway"},
	} {
		b.Expect(b.condition(machine(tc.addresses...), infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)).To(ContainSubstring(tc.why))
	}
	refused := machine([2]string{"192.0.2.143", "192.0.2.254"}, [2]string{"2001:db8:7::143", "2001:db8:7::1"})
	b.Expect(b.condition(refused, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("with IPv6 addresses to a LAN: upgrade its capstand"))
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.Ipv6Lans = true })
	stray := machine([2]string{"192.0.2.144", "192.0.2.254"}, [2]string{"2001:db8:7::9", "2001:db8:7::1"})
	b.Expect(b.condition(stray, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("to have the address 2001:db8:7::9 in the LAN lab"))

	m := machine([2]string{"2001:db8:7::145", "2001:db8:7::1"}, [2]string{"192.0.2.145", "192.0.2.254"})
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetNetwork().GetLan().GetPods()).To(Equal([]string{"192.168.0.0/16", "fd00:244::/48"}))
	b.Expect(made.GetSpec().GetNetwork().GetIpv6Cidr()).To(Equal("2001:db8:7::/64"))
	b.Expect(made.GetSpec().GetAddresses()).To(HaveLen(2))
	b.Expect(made.GetSpec().GetAddresses()[1].GetAddress() + " via " + made.GetSpec().GetAddresses()[1].GetGateway()).To(Equal("2001:db8:7::145 via 2001:db8:7::1"))
}

// IC-10: the endpoint of a cluster in a LAN with IPv6 only is an IPv6 address of its hosts.
func TestLANIPv6Only_IC10(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	h := b.rack(1)[0]
	h.fake.SetInfo(func(i *hostpb.HostInfo) { i.Lans, i.Ipv6Lans = true, true })
	update(b, h.CapstanHost, func(h *infrav1.CapstanHost) {
		h.Spec.VirtualAddresses = []string{"192.0.2.113/32", "2001:db8:7::f1/128"}
		h.Spec.LANNetworks = []infrav1.LANNetwork{{
			Name: "lab", Bridge: "br-lab", CIDR: "192.0.2.0/24", IPv6CIDR: "2001:db8:7::/64", Addresses: []string{"2001:db8:7::100/120"},
			AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{b.namespace}},
		}}
	})
	b.addCluster(func(c *clusterv1.Cluster) {
		c.Spec.ClusterNetwork.Pods.CIDRBlocks, c.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"fd00:244::/48"}, []string{"fd00:96::/112"}
	}, func(c *infrav1.CapstanCluster) {
		c.Spec.Network.LAN.Name, c.Spec.Network.MachineCIDR = "lab", "2001:db8:7::/64"
	})
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: "2001:db8:7::f1", Port: 6443}))
	b.Expect(h.fake.LoadBalancer(b.capstan.Spec.ID).GetListen()).To(Equal([]string{"[2001:db8:7::f1]:6443"}))
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	b.fulfil(b.claim(m.Name+"-0"), "2001:db8:7::145", 64, "2001:db8:7::1")
	b.running(m)
	made, _ := h.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetNetwork().GetLan().GetPods()).To(Equal([]string{"fd00:244::/48"}))
}

// IC-10, IC-12: a cluster in a LAN has a virtual address of its hosts as endpoint, at which the load balancers listen. Every host with
// machines and with the address has one, after the first host has confirmed that it takes part in the election. A machine cannot have the
// address. Nothing remains after the deletion.
func TestLANEndpoint_IC10(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	offer := infrav1.LANNetwork{
		Name: "lab", Bridge: "br-lab", CIDR: "198.51.100.0/24", Addresses: []string{"198.51.100.128/26"},
		AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{b.namespace}},
	}
	hosts := b.rack(3)
	for _, h := range hosts {
		h.fake.SetInfo(func(i *hostpb.HostInfo) { i.Lans = true })
		update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks = []infrav1.LANNetwork{offer} })
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.Network.LAN.Name = "lab" })
	b.Expect(b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.NoHostReason)).
		To(ContainSubstring("add addresses of the LAN to spec.virtualAddresses"))
	const endpoint = "198.51.100.130"
	for _, h := range hosts[:2] {
		update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{"203.0.113.200/32", endpoint + "/32"} })
	}
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: endpoint, Port: 6443}))
	b.Expect(b.capstan.Spec.Network.Overlay.VNI).To(BeZero())
	first, second := hosts[0], hosts[1]
	if b.capstan.Spec.LoadBalancer.HostName == second.Name {
		first, second = second, first
	}
	b.Expect(b.capstan.Spec.LoadBalancer.HostName).To(Equal(first.Name))
	lb := first.fake.LoadBalancer(b.capstan.Spec.ID)
	b.Expect(lb.GetListen()).To(Equal([]string{endpoint + ":6443"}))
	b.Expect(lb.GetVirtualAddress().GetFirst()).To(BeTrue())

	machine := func(h rackHost, address string) *infrav1.CapstanMachine {
		_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
			m.Spec.ID, m.Spec.HostName = "in-lan-"+m.Name, h.Name
			m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: address, Prefix: 24, Gateway: "198.51.100.254"}}
		})
		return m
	}
	thief := machine(second, endpoint)
	b.Expect(b.condition(thief, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).
		To(ContainSubstring("keeps the address %s for the endpoints", endpoint))
	machines := []*infrav1.CapstanMachine{thief, machine(first, "198.51.100.140"), machine(second, "198.51.100.141"), machine(hosts[2], "198.51.100.142")}
	for _, m := range machines[1:] {
		b.running(m)
	}
	b.Expect(second.fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil(), "before the first host takes part in the election")
	before := b.cluster.DeepCopy()
	b.cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	b.Expect(env.Client.Status().Patch(ctx, b.cluster, client.MergeFrom(before))).To(Succeed())
	for _, h := range []rackHost{first, second} {
		b.Eventually(func() bool {
			v := h.fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress()
			return v.GetAddress() == endpoint && !v.GetFirst()
		}).Should(BeTrue(), h.Name)
	}
	b.Expect(hosts[2].fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil(), "it cannot have the address")

	update(b, second.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = nil })
	b.Eventually(func() *hostpb.LoadBalancer { return second.fake.LoadBalancer(b.capstan.Spec.ID) }).Should(BeNil())
	update(b, first.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = nil })
	b.Expect(b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason)).
		To(ContainSubstring("CapstanHost %s cannot have the endpoint %s", first.Name, endpoint))
	b.Eventually(func() *hostpb.LoadBalancer { return first.fake.LoadBalancer(b.capstan.Spec.ID) }).Should(BeNil())
	for _, m := range machines {
		b.Expect(env.Client.Delete(ctx, m)).To(Succeed())
	}
	b.Expect(env.Client.Delete(ctx, b.capstan)).To(Succeed())
	for _, h := range hosts {
		b.Eventually(b.has(h.fake)).Should(neither)
	}
}

// ALL-18: a cluster in a VLAN of a LAN waits for a host that offers this VLAN to its namespace. A machine that names its host itself does
// not get to a host whose capstand would ignore the VLAN.
func TestVLAN_ALL18(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	old, _ := b.addHost(nil)
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.Lans, i.Vlans = true, true })
	offer := infrav1.LANNetwork{
		Name: "lab", Bridge: "br-lab", VLANs: []int32{200}, CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26"},
		AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{b.namespace}},
	}
	for _, h := range []*infrav1.CapstanHost{b.host, old} {
		update(b, h, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks = []infrav1.LANNetwork{offer} })
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { lanCluster(c); c.Spec.Network.LAN.VLAN = 100 })
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason)).
		To(ContainSubstring("does not offer VLAN 100 of the LAN lab to namespace %s, only [200]", b.namespace))
	for _, h := range []*infrav1.CapstanHost{b.host, old} {
		update(b, h, func(h *infrav1.CapstanHost) { h.Spec.LANNetworks[0].VLANs = []int32{100, 200} })
	}
	b.provisioned()
	_, forged := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.ID, m.Spec.HostName = "forged-"+m.Name, old.Name
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: "192.0.2.140", Prefix: 24, Gateway: "192.0.2.254"}}
	})
	b.Expect(b.condition(forged, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).To(ContainSubstring("upgrade its capstand"))
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Network.AddressesFromPools = pools[:1] })
	b.fulfil(b.claim(m.Name+"-0"), "192.0.2.130", 24, "192.0.2.254")
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetNetwork().GetLan().GetVlan()).To(Equal(uint32(100)))
}

// vlanChanges creates a cluster in a VLAN, and returns the error of a change of the VLAN, unless the removal of it succeeds.
func vlanChanges(b *box) error {
	c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("v")}}
	lanCluster(c)
	c.Spec.Network.LAN.VLAN = 4094
	b.Expect(env.Client.Create(ctx, c)).To(Succeed())
	c.Spec.Network.LAN.VLAN = 0
	if err := env.Client.Update(ctx, c); err == nil {
		return nil
	}
	c.Spec.Network.LAN.VLAN = 4093
	return env.Client.Update(ctx, c)
}

// The CRDs refuse LANs that no host can have, and fields that have no effect there.
func TestLANValidation(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	for name, tc := range lanClusters() {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("v")}}
		lanCluster(c)
		tc.change(c)
		if err := env.Client.Create(ctx, c); tc.why == "" {
			b.Expect(err).NotTo(HaveOccurred(), name)
			c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerManaged
			b.Expect(env.Client.Update(ctx, c)).To(MatchError(ContainSubstring("cannot be changed to or from External")))
			c.Spec.LoadBalancer.Mode, c.Spec.Network.LAN.Name = infrav1.LoadBalancerExternal, "other"
			b.Expect(env.Client.Update(ctx, c)).To(MatchError(ContainSubstring("network.lan cannot be changed")))
			c.Spec.Network = infrav1.ClusterNetworkSpec{MachineCIDR: "192.0.2.0/24"}
			b.Expect(env.Client.Update(ctx, c)).To(MatchError(ContainSubstring("network.lan cannot be added or removed")))
		} else {
			b.Expect(err).To(MatchError(ContainSubstring(tc.why)), name)
		}
	}
	b.Expect(vlanChanges(b)).To(MatchError(ContainSubstring("network.lan cannot be changed")))
	checkRules(t, lanRules(b.namespace))
}

// changedLANCluster is a change of a cluster in a LAN that is accepted, or refused with a message.
type changedLANCluster struct {
	change func(*infrav1.CapstanCluster)
	why    string // empty: accepted
}

func lanClusters() map[string]changedLANCluster {
	return map[string]changedLANCluster{
		"in a LAN":    {func(*infrav1.CapstanCluster) {}, ""},
		"its network": {func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "192.0.2.0/24" }, ""},
		"bind address": {func(c *infrav1.CapstanCluster) {
			c.Spec.LoadBalancer = infrav1.LoadBalancerSpec{BindAddress: "192.0.2.5"}
		}, "cannot be set together with loadBalancer.bindAddress"},
		"MTU":        {func(c *infrav1.CapstanCluster) { c.Spec.Network.MTU = 1400 }, "lan cannot be set together with overlay or mtu"},
		"overlay":    {func(c *infrav1.CapstanCluster) { c.Spec.Network.Overlay = infrav1.NetworkOverlay{VNI: 5000, MTU: 1450} }, "lan cannot be set together with overlay or mtu"},
		"dual stack": {func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineIPv6CIDR = "fd00:1::/64" }, ""},
		"IPv6": {func(c *infrav1.CapstanCluster) {
			c.Spec.Network.MachineCIDR, c.Spec.ControlPlaneEndpoint.Host = "fd00:1::/64", "fd00:1::5"
		}, ""},
		"IPv6, IPv4 endpoint": {func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "fd00:1::/64" }, "is IPv4, and the machines in fd00:1::/64 have IPv6 addresses only"},
		"IPv6 twice": {func(c *infrav1.CapstanCluster) {
			c.Spec.Network.MachineCIDR, c.Spec.Network.MachineIPv6CIDR = "fd00:1::/64", "fd00:2::/64"
		}, "machineCIDR must be IPv4 if machineIPv6CIDR is set"},
		"Services": {func(c *infrav1.CapstanCluster) {
			c.Spec.Services.LoadBalancer = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pools[0]}
		}, "lan cannot be set together with services"},
		"VLAN 0 is none": {func(c *infrav1.CapstanCluster) { c.Spec.Network.LAN.VLAN = 0 }, ""},
		"VLAN 4095":      {func(c *infrav1.CapstanCluster) { c.Spec.Network.LAN.VLAN = 4095 }, "4094"},
		"VLAN -1":        {func(c *infrav1.CapstanCluster) { c.Spec.Network.LAN.VLAN = -1 }, "greater than or equal to 1"},
		"malformed name": {func(c *infrav1.CapstanCluster) { c.Spec.Network.LAN.Name = "br_0" }, "should match"},
	}
}

// lanRules are hosts with a LAN.
func lanRules(namespace string) rules {
	names := infrav1.AllowedNamespaces{Names: []string{namespace}}
	out := rules{}
	for name, tc := range map[string]struct {
		change func(*infrav1.LANNetwork)
		why    string
	}{
		"good":             {func(*infrav1.LANNetwork) {}, ""},
		"link of capstand": {func(n *infrav1.LANNetwork) { n.Bridge = "cap0123456789" }, "bridge of the host's own configuration"},
		"path":             {func(n *infrav1.LANNetwork) { n.Bridge = ".." }, "bridge of the host's own configuration"},
		"long bridge":      {func(n *infrav1.LANNetwork) { n.Bridge = "a-bridge-too-long" }, "15"},
		"host bits":        {func(n *infrav1.LANNetwork) { n.CIDR = "192.0.2.1/24" }, "without host bits"},
		"IPv6":             {func(n *infrav1.LANNetwork) { n.CIDR, n.Addresses = "2001:db8::/64", []string{"2001:db8::100/120"} }, ""},
		"dual stack": {func(n *infrav1.LANNetwork) {
			n.IPv6CIDR, n.Addresses = "2001:db8::/64", []string{"192.0.2.128/26", "2001:db8::100/120", "2001:db8::1:1/128"}
		}, ""},
		"IPv6 twice": {func(n *infrav1.LANNetwork) {
			n.CIDR, n.IPv6CIDR, n.Addresses = "2001:db8::/64", "2001:db8:1::/64", []string{"2001:db8::100/120"}
		}, "cidr must be IPv4 if ipv6CIDR is set"},
		"IPv4 twice":              {func(n *infrav1.LANNetwork) { n.IPv6CIDR = "198.51.100.0/24" }, "ipv6CIDR must be an IPv6 network"},
		"IPv6 host bits":          {func(n *infrav1.LANNetwork) { n.IPv6CIDR = "2001:db8::1/64" }, "without host bits"},
		"IPv6, small":             {func(n *infrav1.LANNetwork) { n.IPv6CIDR = "2001:db8::/126" }, "from /16 to /125"},
		"IPv6, large":             {func(n *infrav1.LANNetwork) { n.IPv6CIDR = "2000::/3" }, "from /16 to /125"},
		"malformed IPv6":          {func(n *infrav1.LANNetwork) { n.IPv6CIDR = "2001:db8" }, "ipv6CIDR must be an IPv6 network"},
		"IPv6 elsewhere":          {func(n *infrav1.LANNetwork) { n.IPv6CIDR, n.Addresses = "2001:db8::/64", []string{"2001:db8:1::/120"} }, "addresses must be parts of cidr or ipv6CIDR"},
		"IPv6 of a LAN with IPv4": {func(n *infrav1.LANNetwork) { n.Addresses = []string{"2001:db8::100/120"} }, "addresses must be parts of cidr or ipv6CIDR"},
		"addresses elsewhere":     {func(n *infrav1.LANNetwork) { n.Addresses = []string{"192.0.3.0/26"} }, "addresses must be parts of cidr"},
		"malformed address":       {func(n *infrav1.LANNetwork) { n.Addresses = []string{"192.0.2.130"} }, "addresses must be parts of cidr"},
		"no addresses":            {func(n *infrav1.LANNetwork) { n.Addresses = nil }, "addresses"},
		"VLANs":                   {func(n *infrav1.LANNetwork) { n.VLANs = []int32{1, 4094} }, ""},
		"VLAN 0":                  {func(n *infrav1.LANNetwork) { n.VLANs = []int32{0} }, "greater than or equal to 1"},
		"VLAN 4095":               {func(n *infrav1.LANNetwork) { n.VLANs = []int32{4095} }, "4094"},
		"VLAN twice":              {func(n *infrav1.LANNetwork) { n.VLANs = []int32{7, 7} }, "Duplicate value"},
		"no namespaces":           {func(n *infrav1.LANNetwork) { n.AllowedNamespaces = infrav1.AllowedNamespaces{} }, "allowedNamespaces"},
	} {
		n := infrav1.LANNetwork{Name: "lab", Bridge: "br-lab", CIDR: "192.0.2.0/24", Addresses: []string{"192.0.2.128/26", "192.0.2.10/32"}, AllowedNamespaces: names}
		tc.change(&n)
		out[name] = rule{why: tc.why, obj: &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: unique("v")}, Spec: infrav1.CapstanHostSpec{
			Address: "unix:///nothing", AllowedNamespaces: &names, LANNetworks: []infrav1.LANNetwork{n},
		}}}
	}
	return out
}
