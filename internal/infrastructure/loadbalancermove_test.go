package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// moveTo changes the host of the load balancer in the spec, as a user does.
func (b *box) moveTo(host *infrav1.CapstanHost) {
	b.t.Helper()
	update(b, b.capstan, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName, c.Spec.LoadBalancer.HostID = host.Name, ""
	})
}

// has returns whether the cluster's load balancer and network exist on a host.
func (b *box) has(fake *fakehost.Host) func() []bool {
	return func() []bool {
		return []bool{fake.LoadBalancer(b.capstan.Spec.ID) != nil, fake.Network(b.capstan.Spec.ID) != nil}
	}
}

// recorded returns the names of the hosts that a deletion of the cluster would wait for.
func (b *box) recorded() (names []string) {
	b.get(b.capstan)
	for _, h := range b.capstan.Spec.LoadBalancerHosts {
		b.Expect(h.ID).NotTo(BeEmpty())
		names = append(names, h.Name)
	}
	return names
}

var (
	both    = Equal([]bool{true, true})
	neither = Equal([]bool{false, false})
)

// IC-12: nothing remains of a moved load balancer. The old one is removed before the new one is created, because both can be on
// the same box with the same port.
func TestLoadBalancerMoves_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.Eventually(b.recorded).Should(Equal([]string{b.host.Name}))
	second, other := b.addHost(nil)
	other.Refuse("EnsureLoadBalancer", status.Error(codes.AlreadyExists, "the port is taken"))
	b.moveTo(second)
	b.Eventually(b.has(b.fake)).Should(neither)
	other.Refuse("EnsureLoadBalancer", nil)
	b.Eventually(b.has(other)).Should(both)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.Eventually(b.recorded).Should(Equal([]string{second.Name}))
	b.delete(b.host)
	b.gone(b.host)

	b.fake = other
	b.unchanged(b.capstan)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.Expect(b.has(other)()).To(neither)
}

// IC-12: a former host that keeps the load balancer is tried again, also while the new load balancer does not listen. The test is not
// parallel, because the hosts of other tests are events for all clusters.
func TestFormerHostIsTriedAgain_IC12(t *testing.T) {
	b := newBox(t).provisioned()
	second, other := b.addHost(nil)
	other.Deafen(true)
	b.fake.Refuse("DeleteLoadBalancer", status.Error(codes.Internal, "busy"))
	b.moveTo(second)
	b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "LoadBalancerNotServing")
	// The written condition is an event that leads to one more attempt. Further ones are retries.
	tried := func() int { return b.fake.Calls("DeleteLoadBalancer") }
	b.Eventually(tried).Should(BeNumerically(">", tried()+3))
	b.fake.Refuse("DeleteLoadBalancer", nil)
	b.Eventually(b.has(b.fake)).Should(neither)
	b.condition(b.capstan, "Ready", metav1.ConditionFalse, "LoadBalancerNotServing")
	other.Deafen(false)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
}

// IC-11: a former host that keeps the load balancer does not hold back a cluster that has not been provisioned yet.
func TestFormerHostHoldsNothingBack_IC11(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.fake.Deafen(true)
	b.addCluster(nil, nil)
	b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionFalse, "LoadBalancerNotServing")
	b.fake.Refuse("DeleteLoadBalancer", status.Error(codes.Internal, "busy"))
	second, _ := b.addHost(nil)
	b.moveTo(second)
	b.waitProvisioned()
	b.fake.Refuse("DeleteLoadBalancer", nil)
	b.Eventually(b.has(b.fake)).Should(neither)
}

// IC-12: the network stays on hosts with machines of the cluster, and is removed with the cluster at the latest.
func TestLoadBalancerLeavesTheNetworkToMachines_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	second, other := b.addHost(nil)
	b.moveTo(second)
	b.Eventually(b.has(b.fake)).Should(Equal([]bool{false, true}))
	b.Eventually(b.has(other)).Should(both)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.Expect(b.recorded()).To(ConsistOf(b.host.Name, second.Name))
	b.delete(m)
	b.gone(m)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.Expect(b.has(b.fake)()).To(neither)
	b.Expect(b.has(other)()).To(neither)
}

// IC-12: if a host is down while the load balancer moves, the old load balancer is removed when the host returns.
func TestLoadBalancerMovesOffAHostThatIsDown_IC12(t *testing.T) {
	t.Parallel()
	b, second, other := movedWhileDown(t)
	b.fake.Start(t)
	b.Eventually(b.has(b.fake)).Should(neither)
	b.Eventually(b.recorded).Should(Equal([]string{second.Name}))
	b.Expect(b.has(other)()).To(both)
}

// IC-12: if a load balancer was moved from a host that was down, the deletions of the cluster and of the host wait for the host.
func TestDeletionWaitsForFormerHosts_IC12(t *testing.T) {
	t.Parallel()
	b, _, other := movedWhileDown(t)
	b.delete(b.host)
	b.Expect(b.condition(b.host, "Deleting", metav1.ConditionTrue, "InUse")).To(ContainSubstring("load balancers of 1 CapstanClusters"))
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).
		To(And(ContainSubstring(b.host.Name), ContainSubstring(infrav1.HostAbandonedAnnotation)))
	b.Eventually(b.has(other)).Should(neither)
	b.fake.Start(t)
	b.gone(b.capstan)
	b.Expect(b.has(b.fake)()).To(neither)
	b.gone(b.host)
}

// IC-12: the annotation abandons a former host that is lost.
func TestFormerHostIsAbandoned_IC12(t *testing.T) {
	t.Parallel()
	b, _, _ := movedWhileDown(t)
	b.delete(b.capstan)
	b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""} })
	b.gone(b.capstan)
}

// movedWhileDown returns a cluster whose load balancer has moved to the second host while the first one was down.
func movedWhileDown(t *testing.T) (*box, *infrav1.CapstanHost, *fakehost.Host) {
	t.Helper()
	b := newBox(t).provisioned()
	second, other := b.addHost(nil)
	b.fake.Stop()
	b.condition(b.host, "Connected", metav1.ConditionFalse, "Unreachable")
	b.moveTo(second)
	b.Eventually(b.has(other)).Should(both)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.Expect(b.recorded()).To(ConsistOf(b.host.Name, second.Name))
	return b, second, other
}

// IC-12: without its CapstanHost, nothing confirms that a host is empty, so the deletion waits.
func TestDeletionWaitsForAMissingHost_IC12(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.Eventually(b.recorded).Should(Equal([]string{b.host.Name}))
	b.delete(b.host)
	b.condition(b.host, "Deleting", metav1.ConditionTrue, "InUse")
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Finalizers = nil })
	b.gone(b.host)
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, "DeletionBlocked")).
		To(And(ContainSubstring("CapstanHost "+b.host.Name+" does not exist"), ContainSubstring("annotate this CapstanCluster with "+infrav1.HostAbandonedAnnotation)))
	b.Expect(b.has(b.fake)()).To(both)

	// The CapstanHost exists again.
	b.create(&infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: b.host.Name}, Spec: b.host.Spec})
	b.gone(b.capstan)
	b.Expect(b.has(b.fake)()).To(neither)
}

// IC-12: the deletion does not wait for a host that never existed.
func TestDeletionIsNotHeldByAHostThatNeverWas_IC12(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = "never-was" })
	b.condition(b.capstan, "LoadBalancerReady", metav1.ConditionUnknown, "NoHostConnected")
	b.delete(b.capstan)
	b.gone(b.capstan)
}

// IC-05: a template cannot contain the record of former hosts.
func TestTemplateHasNoLoadBalancerHosts_IC05(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	template := &infrav1.CapstanClusterTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "t"}}
	template.Spec.Template.Spec.LoadBalancerHosts = []infrav1.LoadBalancerHost{{Name: "host", ID: "id"}}
	b.Expect(env.Client.Create(ctx, template)).To(MatchError(ContainSubstring("written by the controller")))
}
