package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// A user who deletes the claim of a Service does not free its address before the host gave it up, also if the host is away. A cluster that
// does not exist any more keeps no address.
func TestDeletedClaim_IPAM07(t *testing.T) {
	p := newPublishing(t, 2, nil)
	p.allow("203.0.113.96/28")
	web := p.addService("claimed", nil)
	p.provide("claimed", "203.0.113.106")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.106"))
	h := p.where("claimed")
	claim, address := p.claims()["claimed"], p.addressOf("claimed")
	p.Expect(address.Finalizers).To(ContainElement(infrav1.ServiceAddressFinalizer))

	p.hosts[h].fake.Stop()
	p.condition(p.hosts[h].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	update(p.box, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"example.com/provider"} })
	p.delete(claim)
	p.delete(address) // as the provider does
	p.Eventually(func() string {
		return p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason)
	}).Should(ContainSubstring("is being deleted"))
	p.get(address)
	p.hosts[h].fake.Start(t)
	p.gone(address)
	p.Expect(p.on(h, "claimed")()).To(BeEmpty(), "the host had the address when it became free")
	update(p.box, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	p.Eventually(func() bool { c := p.claims()["claimed"]; return c != nil && c.UID != claim.UID }).Should(BeTrue())

	// Another provider does not keep the claim.
	p.provide("claimed", "203.0.113.107")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.107"))
	h = p.where("claimed")
	address = p.addressOf("claimed")
	p.hosts[h].fake.Stop()
	p.condition(p.hosts[h].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	update(p.box, address, func(a *capiipamv1.IPAddress) {
		a.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(p.claims()["claimed"], capiipamv1.GroupVersion.WithKind("IPAddressClaim"))}
	})
	p.delete(p.claims()["claimed"])
	p.delete(address)
	p.Eventually(func() string {
		return p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason)
	}).Should(ContainSubstring("has no address yet"))
	p.get(address)
	p.hosts[h].fake.Start(t)
	p.gone(address)
	p.Expect(p.on(h, "claimed")()).To(BeEmpty(), "the host had the address when it became free")

	p.provide("claimed", "203.0.113.108")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.108"))
	address = p.addressOf("claimed")
	update(p.box, p.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	p.condition(p.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	p.delete(p.capstan)
	p.delete(address)
	p.get(address)
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Finalizers = nil })
	p.gone(address)
	p.delete(web)
	update(p.box, web, func(s *corev1.Service) { s.Finalizers = nil })
	p.gone(web)
}

// addressOf returns the IPAddress of a Service.
func (p *publishing) addressOf(service string) *capiipamv1.IPAddress {
	p.t.Helper()
	claim := p.claims()[service]
	address := &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name}}
	p.get(address)
	return address
}
