package infrastructure_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/addresses"
)

// IC-10, ALL-18: a cluster on hosts with virtual addresses has one of them as its endpoint. The first host has the address until
// the API server answers. After that, the hosts elect its holder. Another cluster that names the address gets no load balancer.
func TestVirtualAddress_IC10(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	hosts := b.rack(2)
	for _, h := range hosts {
		update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{"203.0.113.64/31"} })
	}
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	b.placedOn(hosts[0])
	b.placedOn(hosts[1])
	endpoint := b.capstan.Spec.ControlPlaneEndpoint
	b.Expect(endpoint.Host).To(HavePrefix("203.0.113.6"))
	b.Expect(endpoint.Port).To(Equal(int32(6443)))
	virtual := func(h rackHost) func() *hostpb.VirtualAddress {
		return func() *hostpb.VirtualAddress { return h.fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress() }
	}
	b.Expect(virtual(hosts[0])().GetFirst()).To(BeTrue())
	b.Eventually(b.has(hosts[1].fake)).Should(both)
	b.Expect(virtual(hosts[1])()).To(BeNil())
	for _, h := range hosts {
		b.Expect(h.fake.LoadBalancer(b.capstan.Spec.ID).GetEndpoint()).To(Equal(endpoint.Host + ":6443"))
		b.Expect(h.fake.LoadBalancer(b.capstan.Spec.ID).GetListen()).To(Equal([]string{":6443"}))
	}

	before := b.cluster.DeepCopy()
	b.cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	b.Expect(env.Client.Status().Patch(ctx, b.cluster, client.MergeFrom(before))).To(Succeed())
	for _, h := range hosts {
		b.Eventually(func() bool { v := virtual(h)(); return v.GetAddress() == endpoint.Host && !v.GetFirst() }).Should(BeTrue())
	}

	// The cluster no longer depends on the first host. MachineHealthChecks need its infrastructure to be ready.
	hosts[0].fake.Stop()
	b.condition(hosts[0].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionUnknown, infrav1.NoHostConnectedReason)
	hosts[1].fake.HoldVirtualAddress(b.capstan.Spec.ID)
	message := b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason)
	b.Expect(message).To(ContainSubstring("Host " + hosts[1].Name + " has the virtual address. Host " + hosts[0].Name + " is not connected"))
	b.condition(b.capstan, clusterv1.ReadyCondition, metav1.ConditionTrue, clusterv1.ReadyReason)
	hosts[0].fake.Start(t)
	b.condition(hosts[0].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionTrue, infrav1.HostConnectedReason)

	owner, id := b.capstan, b.capstan.Spec.ID
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName, c.Spec.ControlPlaneEndpoint = hosts[0].Name, endpoint
	})
	message = b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason)
	b.Expect(message).To(ContainSubstring(endpoint.Host + " of spec.controlPlaneEndpoint belongs to another CapstanCluster"))
	b.Expect(strings.Contains(message, owner.Name)).To(BeFalse())
	b.Expect(hosts[0].fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil())

	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName, c.Spec.ControlPlaneEndpoint = hosts[0].Name, clusterv1.APIEndpoint{Host: "203.0.113.99", Port: 6443}
	})
	b.waitProvisioned()
	b.Expect(hosts[0].fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress()).To(BeNil(), "an address that no administrator allows")

	for _, h := range hosts { // The administrator removes the addresses.
		update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = nil })
		b.Eventually(func() *hostpb.VirtualAddress { return h.fake.LoadBalancer(id).GetVirtualAddress() }).Should(BeNil())
	}
}

// ALL-18: objects of a namespace that the hosts do not admit, and clusters that need no host, keep no virtual address from others,
// even if they are older.
func TestSquattedVirtualAddress_ALL18(t *testing.T) {
	const only = "203.0.113.130"
	stranger, b := newNamespace(t), newNamespace(t)
	hosts := b.rack(1)
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{only + "/32"} })
	names := func(c *infrav1.CapstanCluster) {
		c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: only, Port: 6443}
	}
	stranger.addCluster(nil, func(c *infrav1.CapstanCluster) {
		names(c)
		c.Spec.LoadBalancer.HostName, c.Spec.Network.Overlay.VNI, c.Spec.Network.Overlay.MTU = hosts[0].Name, 8000, 1450
	})
	stranger.condition(stranger.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostsReason)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { names(c); c.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal })
	b.waitProvisioned()

	// Clusters on hosts of their own: one is older than the list of the administrator, and one is not.
	own := stranger.rack(1)
	elsewhere := func(c *infrav1.CapstanCluster) { names(c); c.Spec.LoadBalancer.HostName = own[0].Name }
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = nil })
	stranger.addCluster(nil, elsewhere)
	stranger.waitProvisioned()
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{only + "/32"} })
	stranger.addCluster(nil, elsewhere)
	b.Expect(stranger.condition(stranger.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason)).
		To(ContainSubstring(only + " of spec.controlPlaneEndpoint is one of CapstanHosts that do not admit the namespace"))

	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.Host).To(Equal(only))
	b.Expect(hosts[0].fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress().GetAddress()).To(Equal(only))
}

// poolEndpoint adds a cluster across hosts whose endpoint comes from a pool.
func (b *box) poolEndpoint(first rackHost, change func(*infrav1.CapstanCluster)) {
	b.t.Helper()
	b.addCluster(nil, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName, c.Spec.LoadBalancer.AddressFromPool = first.Name, &pools[0]
		if change != nil {
			change(c)
		}
	})
}

// IPAM-07, IC-10, IC-12: an address of a pool outside of the machine network is the virtual address of the endpoint, if the
// administrator of the hosts allows it. It is released when no host has the load balancer.
func TestVirtualAddressFromPool_IPAM07(t *testing.T) {
	t.Parallel()
	const address = "203.0.113.161"
	b := newNamespace(t)
	hosts := b.rack(2)
	b.poolEndpoint(hosts[0], nil)
	claim := b.claim(b.capstan.Name + "-endpoint")
	b.exhausted(claim)
	b.Eventually(func() string {
		return b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason)
	}).Should(ContainSubstring("PoolExhausted: 3 of 3 are taken"))
	b.fulfil(claim, address, 24, "")
	b.Expect(b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)).To(And(
		ContainSubstring(address), ContainSubstring("spec.virtualAddresses"), ContainSubstring(hosts[0].Name)))
	b.get(b.capstan)
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.IsZero()).To(BeTrue())
	b.Expect(hosts[0].fake.Calls("EnsureLoadBalancer")).To(BeZero())
	for _, h := range hosts { // The change of the host is the event.
		update(b, h.CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{"203.0.113.160/29"} })
	}
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint).To(Equal(clusterv1.APIEndpoint{Host: address, Port: 6443}))
	b.Expect(b.capstan.Spec.LoadBalancer.Address).To(Equal(address))
	machines := []*infrav1.CapstanMachine{b.placedOn(hosts[0]), b.placedOn(hosts[1])}
	b.Eventually(b.has(hosts[1].fake)).Should(both)
	for _, h := range hosts {
		lb := h.fake.LoadBalancer(b.capstan.Spec.ID)
		b.Expect(lb.GetListen()).To(Equal([]string{":6443"}), "no host has the address before it is elected")
		b.Expect(lb.GetEndpoint()).To(Equal(address + ":6443"))
	}
	b.Expect(hosts[0].fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress().GetAddress()).To(Equal(address))
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.AddressFromPool = &pools[1] })).
		To(MatchError(ContainSubstring("cannot be changed once the load balancer has its address")))
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.ControlPlaneEndpoint.Host = "203.0.113.162" })).NotTo(Succeed())
	b.restored(claim, otherVersions...)

	update(b, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"example.com/slow"} })
	for _, m := range machines {
		b.delete(m)
		b.gone(m)
	}
	hosts[0].fake.Stop()
	b.condition(hosts[0].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason)).To(ContainSubstring(hosts[0].Name))
	b.get(claim)
	b.Expect(claim.DeletionTimestamp.IsZero()).To(BeTrue(), "host %s may still have the address", hosts[0].Name)
	hosts[0].fake.Start(t)
	b.Eventually(func() bool { b.get(claim); return claim.DeletionTimestamp.IsZero() }).Should(BeFalse())
	for _, h := range hosts {
		b.Expect(h.fake.LoadBalancer(b.capstan.Spec.ID)).To(BeNil(), "the address is released after the load balancers are gone")
	}
	b.get(b.capstan)
	update(b, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	b.gone(b.capstan)
}

// IPAM-07: a manager that ended between the claim and the endpoint left a claim with an address. A paused cluster does not take it; the
// next manager does.
func TestClaimBeforeEndpoint_IPAM07(t *testing.T) {
	t.Parallel()
	const address = "203.0.113.177"
	b := newNamespace(t)
	hosts := b.rack(1)
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{"203.0.113.176/29"} })
	b.poolEndpoint(hosts[0], func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{clusterv1.PausedAnnotation: "yes"} })
	b.condition(b.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	pool := capiipamv1.IPPoolReference{APIGroup: pools[0].APIGroup, Kind: pools[0].Kind, Name: pools[0].Name}
	claim, err := addresses.EnsureClaim(ctx, env.Client, b.capstan, b.cluster.Name, pool, b.capstan.Name+"-endpoint")
	b.Expect(err).NotTo(HaveOccurred())
	b.fulfil(claim, address, 24, "")
	b.get(b.capstan)
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.IsZero()).To(BeTrue())
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Annotations = nil })
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.Host).To(Equal(address))
	b.Expect(b.claim(claim.Name).UID).To(Equal(claim.UID))

	// ALL-18: a pool gives the address of another cluster. That cluster keeps it, and its name is not shown.
	owner := b.capstan
	b.poolEndpoint(hosts[0], nil)
	b.fulfil(b.claim(b.capstan.Name+"-endpoint"), address, 24, "")
	message := b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)
	b.Expect(message).To(And(ContainSubstring("endpoint of another cluster has"), ContainSubstring("exclude it from the pool")))
	b.Expect(strings.Contains(message, owner.Name)).To(BeFalse())
	b.get(b.capstan)
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.IsZero()).To(BeTrue())

	// The endpoint that the user set is another one.
	b.poolEndpoint(hosts[0], func(c *infrav1.CapstanCluster) {
		c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "api.example.com", Port: 443}
	})
	b.fulfil(b.claim(b.capstan.Name+"-endpoint"), "203.0.113.178", 24, "")
	b.Expect(b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason)).
		To(ContainSubstring("the cluster has the endpoint api.example.com"))

	// An automatic choice leaves out the address of the first cluster.
	update(b, hosts[0].CapstanHost, func(h *infrav1.CapstanHost) { h.Spec.VirtualAddresses = []string{address + "/32"} })
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason)
}
