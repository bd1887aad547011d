package infrastructure_test

import (
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

	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = hosts[0].Name })
	b.provisioned()
	b.Expect(b.capstan.Spec.ControlPlaneEndpoint.Host).To(Equal(only))
	b.Expect(hosts[0].fake.LoadBalancer(b.capstan.Spec.ID).GetVirtualAddress().GetAddress()).To(Equal(only))
}
