package infrastructure_test

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// hang lets calls of a host have no answer until release is called. The connection stays.
func (h rackHost) hang(methods ...string) (release func()) {
	hangs := make(chan struct{})
	for _, method := range methods {
		h.fake.Before(method, func() { <-hangs })
	}
	return func() {
		close(hangs)
		for _, method := range methods {
			h.fake.Before(method, nil)
		}
	}
}

// Two hosts fall silent at once: the one with the address of a Service, and the one that would get it. The third one gets it as soon as
// after the loss of one host. The test is not parallel: its cluster sees the Services of all tests.
func TestTwoHostsLost(t *testing.T) {
	p := newPublishing(t, 3, nil)
	p.allow("203.0.113.96/28")
	web := p.addService("twice", nil)
	p.provide("twice", "203.0.113.105")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.105"))
	first := p.where("twice")
	second := (first + 1) % 3
	if first == 1 {
		second = 0 // Without Services on both, the name decides.
	}
	p.movesAway(web, first, second)
	p.delete(web)
	p.gone(web)
}

// movesAway lets two of three hosts fall silent at once, and expects the address of a Service on the third one.
func (p *publishing) movesAway(web *corev1.Service, first, second int) {
	p.t.Helper()
	const margin = 8 * time.Second // Less than a call may take.
	third := 3 - first - second
	lost := time.Now()
	defer p.hosts[first].hang("Pulse", "SetServices")()
	defer p.hosts[second].hang("Pulse", "SetServices")()
	p.Eventually(p.on(third, web.Name)).WithTimeout(hostpb.Silence + margin).Should(Equal(p.address(third)))
	p.t.Logf("the third host had the address %s after the loss", time.Since(lost).Round(time.Millisecond))
	p.Eventually(func() string { return hostOf(p.claims()[web.Name]) }).Should(Equal(p.hosts[third].Name))
	p.Expect(p.ingress(web)()).To(Equal("203.0.113.105"))
}

// hostOf is the host that has the address of a claim.
func hostOf(claim client.Object) string {
	first, _, _ := strings.Cut(claim.GetAnnotations()[infrav1.ServiceHostsAnnotation], ",")
	return first
}

// beforeHang is less than the 20 s after which a call to a host that hangs fails: a caller that waits for it comes later.
const beforeHang = 18 * time.Second

// A host that does not answer does not delay the peers of the others, which come after it by name.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	b, hosts, _ := rackCluster(t)
	slices.SortFunc(hosts, func(a, b rackHost) int { return cmp.Compare(a.Name, b.Name) })
	defer hosts[0].hang("SetPeers")()
	news := b.placedOn(hosts[1])
	b.Eventually(b.peersOf(hosts[2])).WithTimeout(beforeHang).Should(ContainElement(peer(news, hosts[1])))
}

// IC-12: a deletion calls all hosts of the cluster at once, so that none waits for one that does not answer.
func TestSilentHostsDuringDeletion_IC12(t *testing.T) {
	t.Parallel()
	b, hosts, machines := rackCluster(t)
	b.delete(b.capstan)
	b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")
	defer hosts[0].hang("DeleteLoadBalancer")()
	defer hosts[1].hang("DeleteLoadBalancer")()
	defer hosts[2].hang("DeleteLoadBalancer")()
	for _, m := range machines {
		b.delete(m)
		b.gone(m)
	}
	for _, h := range hosts {
		b.Eventually(func() int { return h.fake.Calls("DeleteLoadBalancer") }).WithTimeout(beforeHang).Should(BeNumerically(">", 0))
	}
}

// IC-12: a deletion calls no host that has nothing of the cluster. Such a host can belong to a tenant who lets all calls fail.
func TestDeletionCallsNoOtherHost_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, hostile := newNamespace(t).addHost(nil)
	hostile.AddTenant(b.namespace) // It counts and refuses the calls for this namespace.
	for _, method := range []string{"DeleteLoadBalancer", "DeleteNetwork"} {
		hostile.Refuse(method, status.Error(codes.Internal, "no"))
	}
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.Expect(b.has(b.fake)()).To(neither)
	b.Expect(hostile.Calls("DeleteLoadBalancer")).To(BeZero())
}
