package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// becomes changes the CapstanHost into another host with the same name. This happens after a move to a management cluster that
// already has a host with this name.
func (b *box) becomes(fake *fakehost.Host) {
	b.t.Helper()
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Address = fake.Address() })
}

// CTL-13: machines and load balancers of a host are not expected on another host of the same name. They do not count as lost, and
// are neither created again nor removed. Conditions contain the cause. The normal state returns with the right host.
func TestAnotherHostOfTheSameName_CTL13(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(controlPlane, nil)
	b.running(m)
	b.get(b.capstan)
	b.Expect(m.Spec.HostID).NotTo(BeEmpty())
	b.Expect(b.capstan.Spec.LoadBalancer.HostID).To(Equal(m.Spec.HostID))

	stranger := fakehost.New(t)
	b.becomes(stranger)
	b.Expect(b.condition(m, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.HostMismatchReason)).
		To(And(ContainSubstring("the host with the id "+m.Spec.HostID+" was chosen"), ContainSubstring("spec.address")))
	b.condition(b.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionUnknown, infrav1.HostMismatchReason)
	b.Expect(m.Status.Initialization.Provisioned).To(HaveValue(BeTrue()))

	// The deletion waits, because this host cannot confirm the removal of the machine.
	b.delete(m)
	b.Expect(b.condition(m, "Deleting", metav1.ConditionTrue, infrav1.DeletionBlockedReason)).To(ContainSubstring("Capstan changes nothing on it"))
	for _, call := range []string{"EnsureNetwork", "EnsureLoadBalancer", "EnsureMachine", "DeleteMachine"} {
		b.Expect(stranger.Calls(call)).To(BeZero(), call)
	}
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made).NotTo(BeNil())
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID)).NotTo(BeNil())

	b.becomes(b.fake)
	b.gone(m)
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.Expect(stranger.Calls("DeleteMachine")).To(BeZero())
}

// The annotation abandons the machines of a lost host. The load balancer is created on the new host when the id of the old host
// is removed from the spec.
func TestHostSetUpAnew_CTL13(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.becomes(fakehost.New(t))
	b.condition(m, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.HostMismatchReason)
	b.delete(m)
	b.condition(m, "Deleting", metav1.ConditionTrue, infrav1.DeletionBlockedReason)
	update(b, m, func(m *infrav1.CapstanMachine) {
		m.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""}
	})
	b.gone(m)

	b.condition(b.capstan, "Ready", metav1.ConditionUnknown, infrav1.HostMismatchReason)
	old := b.capstan.Spec.LoadBalancer.HostID
	b.Expect(changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = "other" })).
		To(MatchError(ContainSubstring("remove hostID when you change hostName")))
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostID = "" })
	b.condition(b.capstan, "Ready", metav1.ConditionTrue, "Ready")
	b.Eventually(func() string { b.get(b.capstan); return b.capstan.Spec.LoadBalancer.HostID }).ShouldNot(BeElementOf("", old))

	b.becomes(b.fake)
	b.condition(b.capstan, "Ready", metav1.ConditionUnknown, infrav1.HostMismatchReason)
	b.delete(b.capstan)
	b.Expect(b.condition(b.capstan, "Deleting", metav1.ConditionTrue, infrav1.DeletionBlockedReason)).To(ContainSubstring("Capstan changes nothing on it"))
	update(b, b.capstan, func(c *infrav1.CapstanCluster) {
		c.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""}
	})
	b.gone(b.capstan)
}

// Objects of former versions have no host id. They get the id of the host that has their machine or load balancer.
func TestHostIDIsLearned_CTL13(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.LoadBalancer.HostName = b.host.Name })
	b.provisioned()
	b.Expect(b.capstan.Spec.LoadBalancer.HostID).NotTo(BeEmpty())
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.ID, m.Spec.HostName = "from-before-the-field", b.host.Name
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: b.address(200), Prefix: 21}}
	})
	b.running(m)
	b.Expect(m.Spec.HostID).To(Equal(b.capstan.Spec.LoadBalancer.HostID))
}
