package infrastructure_test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// rackHost is a host of a rack. It has its own box and a tunnel address.
type rackHost struct {
	*infrav1.CapstanHost
	fake *fakehost.Host
}

// rack adds hosts with different boxes that exchange the traffic of clusters. Their names sort in the order of creation.
func (b *box) rack(n int) (hosts []rackHost) {
	b.t.Helper()
	for i := range n {
		h, fake := b.onBox(fmt.Sprint("box-", i), fmt.Sprint("rack-", i))
		update(b, h, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = fmt.Sprint("192.0.2.", i+1) })
		hosts = append(hosts, rackHost{h, fake})
	}
	return hosts
}

// peersOf returns the peers of a host as text.
func (b *box) peersOf(h rackHost) func() []string {
	return func() (out []string) {
		for _, p := range h.fake.Peers(b.capstan.Spec.ID).GetPeers() {
			out = append(out, fmt.Sprint(p.GetAddresses(), "@", p.GetHost()))
		}
		return out
	}
}

// peer returns the entry of a machine on the hosts of other boxes.
func peer(m *infrav1.CapstanMachine, h rackHost) string {
	return fmt.Sprint([]string{m.Spec.Network.Addresses[0].Address}, "@", h.Spec.TunnelAddress)
}

// placedOn adds a machine on a host and waits until it runs.
func (b *box) placedOn(h rackHost) *infrav1.CapstanMachine {
	b.t.Helper()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = h.Name })
	b.running(m)
	return m
}

// rackCluster returns a cluster on three hosts of three boxes, with the load balancer on the first host and a machine on each.
func rackCluster(t *testing.T) (*box, []rackHost, []*infrav1.CapstanMachine) {
	t.Helper()
	b := newNamespace(t)
	hosts := b.rack(3)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	var machines []*infrav1.CapstanMachine
	for _, h := range hosts {
		machines = append(machines, b.placedOn(h))
	}
	b.Eventually(b.peersOf(hosts[0])).Should(ConsistOf(peer(machines[1], hosts[1]), peer(machines[2], hosts[2])))
	b.Eventually(b.peersOf(hosts[1])).Should(ConsistOf(peer(machines[0], hosts[0]), peer(machines[2], hosts[2])))
	b.Eventually(b.peersOf(hosts[2])).Should(ConsistOf(peer(machines[0], hosts[0]), peer(machines[1], hosts[1])))
	for _, h := range hosts {
		b.Eventually(b.has(h.fake)).Should(both)
	}
	b.Eventually(b.recorded).Should(ConsistOf(hosts[0].Name, hosts[1].Name, hosts[2].Name))
	return b, hosts, machines
}

// IC-04, IC-10, IC-11, IC-12: a cluster on three boxes. Every host has the network, its peers and a load balancer, and the record
// lists all hosts. Hosts get no calls while nothing changes. A host without machines of the cluster loses the network and the
// load balancer, and a deletion removes everything on all hosts.
func TestOverlay_IC12(t *testing.T) {
	t.Parallel()
	b, hosts, machines := rackCluster(t)
	c := b.capstan
	b.Expect(c.Spec.Network.Overlay.MTU).To(Equal(int32(1450)))
	b.Expect(c.Status.FailureDomains).To(HaveLen(3))
	b.Expect(c.Spec.ControlPlaneEndpoint.Host).To(Equal("192.0.2.1"))
	b.Expect(c.Spec.ControlPlaneEndpoint.Port).To(And(BeNumerically(">=", 20000), BeNumerically("<=", 23999)))
	port := strconv.Itoa(int(c.Spec.ControlPlaneEndpoint.Port))
	for i, h := range hosts {
		overlay := h.fake.Network(c.Spec.ID).GetOverlay()
		b.Expect(overlay.GetVni()).To(Equal(uint32(c.Spec.Network.Overlay.VNI)))
		b.Expect(overlay.GetAddress()).To(Equal(h.Spec.TunnelAddress))
		lb := h.fake.LoadBalancer(c.Spec.ID)
		if i == 0 {
			b.Expect(lb.GetListen()).To(Equal([]string{":" + port, "192.0.2.1:" + port}))
			b.Expect(lb.GetEndpoint()).To(BeEmpty())
		} else {
			b.Expect(lb.GetListen()).To(Equal([]string{":" + port}))
			b.Expect(lb.GetEndpoint()).To(Equal("192.0.2.1:" + port))
		}
	}
	b.Eventually(func() []string { return hosts[0].fake.Peers(c.Spec.ID).GetHosts() }).Should(Equal([]string{"192.0.2.2", "192.0.2.3"}))
	before := hosts[1].fake.Calls("SetPeers") + hosts[2].fake.Calls("SetPeers")
	b.fake = hosts[1].fake
	b.unchanged(c)
	b.Expect(hosts[1].fake.Calls("SetPeers") + hosts[2].fake.Calls("SetPeers")).To(Equal(before))

	b.delete(machines[2])
	b.gone(machines[2])
	b.Eventually(b.has(hosts[2].fake)).Should(neither)
	b.Eventually(b.peersOf(hosts[1])).Should(ConsistOf(peer(machines[0], hosts[0])))
	b.Eventually(b.recorded).Should(ConsistOf(hosts[0].Name, hosts[1].Name))
	b.Eventually(func() []string { return hosts[1].fake.Peers(c.Spec.ID).GetHosts() }).Should(Equal([]string{"192.0.2.1"}))
	// A machine returns: the network is created again with its peers.
	again := b.placedOn(hosts[2])
	b.Eventually(b.peersOf(hosts[2])).Should(ConsistOf(peer(machines[0], hosts[0]), peer(machines[1], hosts[1])))
	for _, m := range []*infrav1.CapstanMachine{machines[0], machines[1], again} {
		b.delete(m)
		b.gone(m)
	}
	b.delete(c)
	b.gone(c)
	for _, h := range hosts {
		b.Expect(b.has(h.fake)()).To(neither)
	}
}

// A cluster whose load balancer's host encrypts has machines on hosts that encrypt, and each host gets the keys of the others. A
// host that ends the encryption is named, and the others exchange nothing with it.
func TestEncryptedOverlay_IM02(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(3)
	keys := map[string]string{}
	for i, h := range hosts[:2] {
		key := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{byte(i + 1)}, 32))
		keys[h.Spec.TunnelAddress] = key
		h.fake.SetInfo(func(info *hostpb.HostInfo) { info.OverlayPublicKey = key })
		b.Eventually(func() string { b.get(h.CapstanHost); return h.Status.OverlayPublicKey }).Should(Equal(key))
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	b.Expect(b.capstan.Spec.Network.Overlay.MTU).To(Equal(int32(1370)))
	machine := b.placedOn(hosts[1])
	b.Eventually(b.peersOf(hosts[0])).Should(ConsistOf(peer(machine, hosts[1])))
	for i, h := range hosts[:2] {
		other := hosts[1-i].Spec.TunnelAddress
		b.Eventually(func() map[string]string { return h.fake.Peers(b.capstan.Spec.ID).GetPublicKeys() }).Should(Equal(map[string]string{other: keys[other]}))
	}
	_, plain := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = hosts[2].Name })
	b.Expect(b.condition(plain, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).
		To(ContainSubstring(hosts[2].Name + " does not reach the cluster's network: it does not encrypt its overlays"))

	hosts[1].fake.SetInfo(func(info *hostpb.HostInfo) { info.OverlayPublicKey = "" })
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(ContainSubstring("Host " + hosts[1].Name + ": it does not encrypt its overlays"))
	b.Eventually(b.peersOf(hosts[0])).Should(BeEmpty())
	b.Expect(hosts[0].fake.Peers(b.capstan.Spec.ID).GetPublicKeys()).To(BeEmpty())
}

// IM-02: machines that are placed at the same time spread over the hosts, control plane machines and workers separately.
func TestOverlaySpreads_IM02(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(3)
	hosts[1].fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes *= 2 })
	b.addCluster(nil, nil)
	b.provisioned()
	names := map[string][]string{} // of hosts, by role
	for _, step := range []struct {
		role   string
		change func(*clusterv1.Machine)
		number int
	}{{"control plane", controlPlane, 1}, {"worker", nil, 3}, {"control plane", controlPlane, 2}} { // as in a new cluster
		update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
		var machines []*infrav1.CapstanMachine
		for range step.number {
			_, m := b.addMachine(step.change, nil)
			b.condition(m, "Paused", metav1.ConditionTrue, "Paused")
			machines = append(machines, m)
		}
		update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil }) // All of them are reconciled now.
		for _, m := range machines {
			b.running(m)
			names[step.role] = append(names[step.role], m.Spec.HostName)
		}
		// The host of the first machine is the smallest one from now on, so free memory does not lead the workers there.
		hosts[1].fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = 32 << 30 })
	}
	for role, on := range names {
		b.Expect(on).To(ConsistOf(hosts[0].Name, hosts[1].Name, hosts[2].Name), role)
	}
	// A backend that leaves is removed from the load balancers of all hosts.
	for _, h := range hosts {
		b.Eventually(func() int { return len(h.fake.LoadBalancer(b.capstan.Spec.ID).GetBackends()) }).Should(Equal(3))
	}
}

// The other hosts do not wait for an unreachable host. A message names it, and it is updated when it returns.
func TestOverlayWithAHostAway(t *testing.T) {
	t.Parallel()
	b, hosts, machines := rackCluster(t)
	hosts[2].fake.Stop()
	b.condition(hosts[2].CapstanHost, "Connected", metav1.ConditionFalse, "Unreachable")
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(ContainSubstring("Host " + hosts[2].Name + " is not connected"))
	added := b.placedOn(hosts[1])
	b.Eventually(b.peersOf(hosts[0])).Should(ConsistOf(peer(machines[1], hosts[1]), peer(added, hosts[1]), peer(machines[2], hosts[2])))
	b.Expect(b.peersOf(hosts[2])()).To(HaveLen(2))
	hosts[2].fake.Start(t)
	b.Eventually(b.peersOf(hosts[2])).Should(ConsistOf(peer(machines[0], hosts[0]), peer(machines[1], hosts[1]), peer(added, hosts[1])))
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(BeEmpty())

	// The same holds for the load balancer's host. The peers are set again after each new connection.
	hosts[0].fake.Stop()
	b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionUnknown, infrav1.NoHostConnectedReason)
	b.delete(added)
	b.gone(added)
	b.Eventually(b.peersOf(hosts[2])).Should(HaveLen(2))
	calls := hosts[0].fake.Calls("SetPeers")
	hosts[0].fake.Start(t)
	b.Eventually(b.peersOf(hosts[0])).Should(HaveLen(2))
	b.Expect(hosts[0].fake.Calls("SetPeers")).To(BeNumerically(">", calls))
	b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
}

// IC-12: a host is recorded before anything is created there, also if the host refuses.
func TestOverlayIsRecordedFirst_IC12(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(2)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	hosts[1].fake.Refuse("EnsureNetwork", status.Error(codes.Internal, "the kernel has no vxlan"))
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = hosts[1].Name })
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(ContainSubstring("Host " + hosts[1].Name + ": the kernel has no vxlan"))
	b.Expect(b.recorded()).To(ConsistOf(hosts[0].Name, hosts[1].Name))
	hosts[1].fake.Refuse("EnsureNetwork", nil)
	b.running(m)
	b.Eventually(b.has(hosts[1].fake)).Should(both)
}

// IC-12: as long as a watch shows a CapstanCluster without the record, the host gets no request for the network.
func TestOverlayMakesNothingWithoutARecord_IC12(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(2)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	versions := eachVersion[*infrav1.CapstanCluster](b, &infrav1.CapstanClusterList{})
	hosts[1].fake.Refuse("EnsureMachine", status.Error(codes.Internal, "not yet"))
	b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = hosts[1].Name })
	for c := range versions {
		made := hosts[1].fake.Calls("EnsureNetwork") > 0
		recorded := slices.ContainsFunc(c.Spec.LoadBalancerHosts, func(h infrav1.LoadBalancerHost) bool { return h.Name == hosts[1].Name })
		if recorded {
			break
		}
		b.Expect(made).To(BeFalse(), "the host was asked before it was on record")
	}
}

// A cluster with the VXLAN network identifier of another cluster gets no network, even if its object is older, because it could
// send packets into the other cluster. The identifier is free after the deletion of the other cluster.
func TestCopiedVNI_ALL18(t *testing.T) {
	t.Parallel()
	b, thief := newNamespace(t), newNamespace(t)
	host, fake := thief.onBox("thief", "")
	update(thief, host, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.99" })
	thief.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	hosts := b.rack(1)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	update(thief, thief.capstan, func(c *infrav1.CapstanCluster) {
		c.Annotations, c.Spec.Network.Overlay = nil, b.capstan.Spec.Network.Overlay
		// With the other fields of the controller, machines could get a host and addresses.
		c.Spec.ID, c.Spec.LoadBalancer.HostName, c.Spec.Network.MachineCIDR = unique("thief-cluster"), host.Name, "10.209.0.0/21"
	})
	thief.Expect(thief.condition(thief.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason)).
		To(And(ContainSubstring("belongs to another CapstanCluster"), Not(ContainSubstring(b.namespace))))
	// Its machines get none either, if its Cluster was provisioned with another CapstanCluster.
	before := thief.cluster.DeepCopy()
	thief.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	thief.Expect(env.Client.Status().Patch(ctx, thief.cluster, client.MergeFrom(before))).To(Succeed())
	_, m := thief.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = host.Name })
	thief.Expect(thief.condition(m, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForClusterInfrastructureReason)).
		To(ContainSubstring("Waiting for the network of CapstanCluster " + thief.capstan.Name))
	thief.notAsked(fake)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.delete(b.capstan)
	b.gone(b.capstan)
	thief.waitProvisioned()
	thief.running(m)
}

// If another management plane uses the VXLAN network identifier or the port on the host, the next one is chosen.
func TestRefusedVNIAndPort(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(1)
	_, err := hosts[0].fake.EnsureNetwork(ctx, &hostpb.Network{
		Id: "of-another-plane", Namespace: "other", Name: "other", Cidr: "10.220.0.0/21",
		Overlay: &hostpb.Overlay{Vni: 7000, Address: "192.0.2.1", Mtu: 1450},
	})
	b.Expect(err).NotTo(HaveOccurred())
	hosts[0].fake.Refuse("EnsureLoadBalancer", refusal.Errorf(hostpb.Refusal_PORT_IN_USE, "in use"))
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName = hosts[0].Name
		c.Spec.Network.Overlay = infrav1.NetworkOverlay{VNI: 7000, MTU: 1450}
	})
	ports := map[int32]bool{}
	b.Eventually(func() int {
		b.get(b.capstan)
		ports[b.capstan.Spec.LoadBalancer.Port] = true
		return len(ports)
	}).Should(BeNumerically(">", 3)) // The empty port and three refused ones.
	hosts[0].fake.Refuse("EnsureLoadBalancer", nil)
	b.waitProvisioned()
	b.Expect(b.capstan.Spec.Network.Overlay.VNI).To(Equal(int32(7001)))
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.Port).To(Equal(b.capstan.Spec.LoadBalancer.Port))
}

// ALL-18: a machine that names a host of another namespace gets no network and no load balancer there.
func TestOverlayOnTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b, owner := newNamespace(t), newNamespace(t)
	hosts := b.rack(1)
	host, fake := owner.onBox("box-of-others", "")
	foreign := rackHost{host, fake}
	update(owner, foreign.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.77" })
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.ID, m.Spec.HostName = unique("known"), foreign.Name
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: b.address(100), Prefix: 21}}
	})
	b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)
	b.Eventually(b.peersOf(hosts[0])).Should(HaveLen(1), "the cluster was reconciled with the machine")
	b.Consistently(b.recorded).Should(Equal([]string{hosts[0].Name}))
	owner.notAsked(foreign.fake)
}

// A cluster whose hosts have no tunnel address gets no overlay, also if they get an address later.
func TestNoOverlayLater(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.1" })
	b.unchanged(b.capstan)
	b.get(b.capstan)
	b.Expect(b.capstan.Spec.Network.Overlay).To(BeZero())
	b.Expect(b.capstan.Spec.LoadBalancer.Port).To(BeZero())
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.Host).To(Equal(b.address(1)))
	b.Expect(b.fake.Network(b.capstan.Spec.ID).GetOverlay()).To(BeNil())
	b.Expect(b.fake.Calls("SetPeers")).To(BeZero())
}

// The tunnel address of a host cannot change while the host has a network of a cluster across hosts: the endpoint of the cluster would end,
// and the other hosts would drop its packets.
func TestTunnelAddressChanges(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	h := b.rack(1)[0]
	change := func(address string) error {
		b.get(h.CapstanHost)
		changed := h.DeepCopy()
		changed.Spec.TunnelAddress = address
		return env.Client.Patch(ctx, changed, client.MergeFrom(h.CapstanHost))
	}
	b.Expect(change("192.0.2.50")).To(Succeed())
	b.Expect(change("192.0.2.1")).To(Succeed())
	b.addCluster(nil, nil)
	b.provisioned()
	b.Eventually(func() string { b.get(h.CapstanHost); return h.Status.TunnelAddress }).Should(Equal("192.0.2.1"))
	for _, address := range []string{"192.0.2.50", ""} {
		b.Expect(change(address)).To(MatchError(ContainSubstring("drain the host and move load balancers to other hosts first")), "%q", address)
	}
	update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.FailureDomain = "row-1" })
	b.delete(b.cluster)
	b.delete(b.capstan)
	b.Eventually(func() string { b.get(h.CapstanHost); return h.Status.TunnelAddress }).Should(BeEmpty())
	b.Expect(change("192.0.2.50")).To(Succeed())
}

// An older capstand does not report the tunnel address, which can then change. The host refuses another one, and a condition of the cluster
// contains the refusal.
func TestTunnelAddressOfAnOlderHost(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(1)
	b.addCluster(nil, nil)
	b.provisioned()
	hosts[0].fake.SetInfo(func(info *hostpb.HostInfo) { info.TunnelAddress = "" })
	b.Eventually(func() string { b.get(hosts[0].CapstanHost); return hosts[0].Status.TunnelAddress }).Should(BeEmpty())
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.50" })
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(And(ContainSubstring("Host "+hosts[0].Name), ContainSubstring("set it back")))
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.1" })
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason)
	}).Should(BeEmpty())
}

// The API server refuses invalid overlays and tunnel addresses, and changes of an overlay.
func TestOverlayIsValidated(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(1)
	for address, refused := range map[string]bool{
		"192.0.2.9": false, "2001:db8::9": false, "127.0.0.1": true, "224.0.0.1": true, "0.0.0.0": true, "rack-2": true, "fe80::1": true, "2001:DB8::9": true,
	} {
		h := hosts[0].DeepCopy()
		h.Spec.TunnelAddress = address
		err := env.Client.Patch(ctx, h, client.MergeFrom(hosts[0].CapstanHost), client.DryRunAll)
		b.Expect(err != nil).To(Equal(refused), "%s: %v", address, err)
		if refused {
			b.Expect(err).To(MatchError(ContainSubstring("tunnelAddress must be a unicast IP address")))
		}
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	for says, change := range map[string]func(*infrav1.NetworkOverlay){
		"cannot be added or removed":     func(o *infrav1.NetworkOverlay) { *o = infrav1.NetworkOverlay{} },
		"cannot be changed":              func(o *infrav1.NetworkOverlay) { o.VNI++ },
		"mtu is written once":            func(o *infrav1.NetworkOverlay) { o.MTU++ },
		"greater than or equal to 4096":  func(o *infrav1.NetworkOverlay) { o.VNI = 1 },
		"less than or equal to 16777215": func(o *infrav1.NetworkOverlay) { o.VNI = 1 << 24 },
	} {
		c := b.capstan.DeepCopy()
		change(&c.Spec.Network.Overlay)
		b.Expect(env.Client.Patch(ctx, c, client.MergeFrom(b.capstan), client.DryRunAll)).To(MatchError(ContainSubstring(says)))
	}
	template := &infrav1.CapstanClusterTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "t"}}
	template.Spec.Template.Spec.Network.Overlay = b.capstan.Spec.Network.Overlay
	b.Expect(env.Client.Create(ctx, template)).To(MatchError(ContainSubstring("each cluster gets an overlay of its own")))
}

// A new cluster across hosts fits through the smallest interface of the hosts that its namespace may use.
func TestSmallLinks(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(3)
	for i, links := range map[int]map[string]int32{1: {hosts[1].Spec.TunnelAddress: 1400}, 2: {"198.51.100.9": 1300}} { // no tunnel address
		hosts[i].fake.SetInfo(func(info *hostpb.HostInfo) { info.Cpus, info.LinkMtus = 77, links })
		b.Eventually(func(g Gomega) {
			h := &infrav1.CapstanHost{}
			g.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(hosts[i].CapstanHost), h)).To(Succeed())
			g.Expect(h.Status.Capacity.Cpu().Value()).To(BeEquivalentTo(77))
		}).Should(Succeed())
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.waitProvisioned()
	b.Expect(b.capstan.Spec.Network.Overlay.MTU).To(Equal(int32(1350)))
}

// The MTU of spec becomes that of the overlay, and cannot change afterwards. A cluster that would stay on one box waits.
func TestClusterMTU(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	host, fake := b.onBox("box-mtu", "")
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName, c.Spec.Network.MTU = host.Name, 8950
	})
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason)).
		To(ContainSubstring(host.Name + " of the load balancer has no spec.tunnelAddress"))
	fake.Refuse("EnsureNetwork", refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "interface eth1 is too small"))
	update(b, host, func(h *infrav1.CapstanHost) { h.Spec.TunnelAddress = "192.0.2.1" })
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason)).
		To(ContainSubstring("interface eth1 is too small"))
	fake.Refuse("EnsureNetwork", nil)
	b.waitProvisioned()
	b.Expect(b.capstan.Spec.Network.Overlay.MTU).To(Equal(int32(8950)))
	b.Expect(fake.Network(b.capstan.Spec.ID).GetOverlay().GetMtu()).To(Equal(int32(8950)))
	for says, mtu := range map[string]int32{
		"network.mtu cannot be changed": 0,
		"must be equal":                 1450,
		"greater than or equal to 1280": 1279,
		"less than or equal to 9000":    9001,
	} {
		c := b.capstan.DeepCopy()
		c.Spec.Network.MTU = mtu
		b.Expect(env.Client.Patch(ctx, c, client.MergeFrom(b.capstan), client.DryRunAll)).To(MatchError(ContainSubstring(says)))
	}
}
