package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// ALL-18: no object of a namespace keeps a Service published that a host does not allow any more. The Cluster is paused, has lost its
// CapstanCluster, and the manager has sent the host nothing on its present connection.
func TestWithdrawnWhilePaused_ALL18(t *testing.T) {
	p := newPublishing(t, 2, nil)
	for _, h := range p.hosts {
		h.fake.SetInfo(func(i *hostpb.HostInfo) { i.HostPorts = true })
	}
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer.HostPorts = ptr.To(true) })
	permit := func(port int32, networks ...string) {
		for i, h := range p.hosts {
			update(p.box, h.CapstanHost, func(h *infrav1.CapstanHost) {
				names := infrav1.AllowedNamespaces{Names: []string{p.namespace}}
				h.Spec.Services = &infrav1.HostServices{
					HostAddresses: []string{[]string{"192.0.2.1", "192.0.2.2"}[i]},
					HostPorts:     []infrav1.HostPorts{{Protocol: infrav1.HostPortTCP, Port: port, AllowedNamespaces: names}},
				}
				if len(networks) > 0 {
					h.Spec.Services.Addresses, h.Spec.Services.AllowedNamespaces = networks, names
				}
			})
		}
	}
	permit(81, "203.0.113.96/28", "203.0.113.112/28")
	first, second, port := p.addService("kept-first", nil), p.addService("kept-second", nil), p.portService("kept-port", 81)
	p.provide("kept-first", "203.0.113.105")
	p.provide("kept-second", "203.0.113.115")
	p.Eventually(p.ingress(first)).Should(Equal("203.0.113.105"))
	p.Eventually(p.ingress(second)).Should(Equal("203.0.113.115"))
	p.Eventually(p.shows(port)).Should(Equal("192.0.2.1 192.0.2.2"))

	update(p.box, p.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	p.condition(p.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	for _, h := range p.hosts {
		h.fake.Stop()
		p.condition(h.CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
		h.fake.Start(t)
		p.condition(h.CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionTrue, infrav1.HostConnectedReason)
	}
	everywhere := func(service string) func() string {
		return func() string { return p.on(0, service)() + p.on(1, service)() }
	}
	permit(81, "203.0.113.112/28")
	p.Eventually(everywhere("kept-first")).Should(BeEmpty(), "an address that was withdrawn")
	p.Expect(everywhere("kept-second")()).NotTo(BeEmpty(), "an address that is still allowed")
	p.Expect(everywhere("kept-port")()).NotTo(BeEmpty(), "a port that is still authorised")
	permit(82, "203.0.113.112/28")
	p.Eventually(everywhere("kept-port")).Should(BeEmpty(), "a port that was withdrawn")
	p.Expect(everywhere("kept-second")()).NotTo(BeEmpty())

	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.OwnerReferences = nil })
	p.allow()
	p.Eventually(everywhere("kept-second")).Should(BeEmpty(), "all permissions were withdrawn")

	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) {
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: p.cluster.Name, UID: p.cluster.UID}}
	})
	update(p.box, p.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	p.allow("203.0.113.96/28")
	p.Eventually(everywhere("kept-first")).ShouldNot(BeEmpty(), "the pause ended")
	p.delete(first)
	p.delete(second)
	p.delete(port)
	p.gone(first)
	p.gone(second)
	p.gone(port)
}
