package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// onBox adds a host with a box id.
func (b *box) onBox(id, domain string) (*infrav1.CapstanHost, *fakehost.Host) {
	b.t.Helper()
	host, fake := b.addHost(func(h *infrav1.CapstanHost) { h.Spec.FailureDomain = domain })
	fake.SetInfo(func(i *hostpb.HostInfo) { i.BoxId = id })
	b.Eventually(func() string { b.get(host); return host.Status.BoxID }).Should(Equal(id))
	return host, fake
}

// IC-04, IM-02: the network of a cluster is limited to one box. The failure domains are those of the load balancer's box, and
// machines are placed only there. If a machine names a host of another box, its condition contains the cause.
func TestBoxes(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	first, _ := b.onBox("one", "rack-1")
	b.onBox("one", "rack-2")
	elsewhere, other := b.onBox("two", "rack-3")
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = first.Name })
	b.provisioned()
	b.get(b.capstan)
	var domains []string
	for _, d := range b.capstan.Status.FailureDomains {
		domains = append(domains, d.Name)
	}
	b.Expect(domains).To(Equal([]string{"rack-1", "rack-2"}))

	for range 3 {
		_, m := b.addMachine(nil, nil)
		b.running(m)
	}
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.HostName = elsewhere.Name })
	b.Expect(b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).
		To(ContainSubstring(elsewhere.Name + " is on another box than the cluster's load balancer"))
	b.notAsked(other)
}
