package infrastructure_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// After an absence, a host waits for the confirmation of its machines. The manager confirms those that exist, and not those
// that are being replaced.
func TestReturnOfALostHost(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.provisioned()
	_, stays := b.addMachine(nil, nil)
	replacedMachine, replaced := b.addMachine(func(m *clusterv1.Machine) { m.Finalizers = []string{"test/drains"} }, nil)
	b.running(stays)
	b.running(replaced)
	b.fake.Stop()
	b.Expect(b.condition(stays, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason)).To(ContainSubstring(b.host.Name))
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	b.delete(replacedMachine)
	for _, m := range []*infrav1.CapstanMachine{stays, replaced} {
		b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) { s.Phase, s.Unconfirmed = hostpb.MachineStatus_PENDING, true })
	}
	b.fake.Start(t)
	b.condition(stays, infrav1.MachineRunningCondition, metav1.ConditionTrue, infrav1.MachineRunningReason)
	b.condition(replaced, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineStartingReason)
	held, _ := b.fake.Machine(replaced.Spec.ID)
	b.Expect(held.GetStatus().GetUnconfirmed()).To(BeTrue())
	update(b, replacedMachine, func(m *clusterv1.Machine) { m.Finalizers = nil })
}

// The Machines of a drained host are deleted one after another, each only while the other Machines of the cluster are Available.
func TestDrain(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.provisioned()
	status := func(obj client.Object, change func()) {
		t.Helper()
		before := obj.DeepCopyObject().(client.Object)
		change()
		b.Expect(env.Client.Status().Patch(ctx, obj, client.MergeFrom(before))).To(Succeed())
	}
	owned := func() *clusterv1.Machine {
		machine, capstan := b.addMachine(func(m *clusterv1.Machine) {
			m.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "MachineSet", Name: "set", UID: "1", Controller: ptr.To(true)}}
		}, nil)
		b.running(capstan)
		b.get(machine)
		status(machine, func() {
			machine.Status.Conditions = []metav1.Condition{{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Available", LastTransitionTime: metav1.Now()}}
		})
		return machine
	}
	machines := []*clusterv1.Machine{owned(), owned()}
	b.get(b.cluster)
	status(b.cluster, func() { b.cluster.Status.Workers = &clusterv1.WorkersStatus{DesiredReplicas: ptr.To[int32](2)} })
	left := func() (n int) {
		list := &clusterv1.MachineList{}
		b.Expect(env.Client.List(ctx, list, client.InNamespace(b.namespace))).To(Succeed())
		return len(list.Items)
	}
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Drain = ptr.To(true) })
	b.Eventually(left).Should(Equal(1))
	b.Eventually(func() string {
		return b.condition(b.host, infrav1.HostDrainedCondition, metav1.ConditionFalse, infrav1.HostDrainingReason)
	}).
		Should(ContainSubstring("1 of 2 Machines exist"))

	_, waiting := b.addMachine(nil, nil) // Its owner replaces the first Machine. The only host accepts no machine.
	b.Expect(b.condition(waiting, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("unschedulable"))
	other, _ := b.addHost(nil)
	b.Eventually(func() string { b.get(waiting); return waiting.Spec.HostName }).Should(Equal(other.Name))
	b.running(waiting)
	replacement := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: waiting.Name}}
	b.get(replacement)
	status(replacement, func() {
		replacement.Status.Conditions = []metav1.Condition{{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Available", LastTransitionTime: metav1.Now()}}
	})
	b.Eventually(left).Should(Equal(1))
	for _, m := range machines { // Core does this with a deleted Machine.
		infra := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: m.Name}}
		b.Expect(client.IgnoreNotFound(env.Client.Delete(ctx, infra))).To(Succeed())
	}
	b.condition(b.host, infrav1.HostDrainedCondition, metav1.ConditionTrue, infrav1.HostDrainedReason)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Drain = nil })
	b.Eventually(func() int {
		b.get(b.host)
		n := 0
		for _, c := range b.host.Status.Conditions {
			if c.Type == infrav1.HostDrainedCondition {
				n++
			}
		}
		return n
	}).Should(BeZero())
}

// A reboot waits for the drain, is asked for once, and opens the host when it is back. A host that cannot reboot is not drained.
func TestReboot(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.provisioned()
	machine, m := b.addMachine(nil, nil)
	b.running(m)
	request := func(after time.Duration) {
		update(b, b.host, func(h *infrav1.CapstanHost) {
			h.Spec.RebootRequestedAt = metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(after))
		})
	}
	booted := func(id string) {
		b.fake.SetInfo(func(i *hostpb.HostInfo) { i.BootId, i.BootedAt = id, timestamppb.New(time.Unix(1, 0)) })
	}
	request(0)
	b.Expect(b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionFalse, infrav1.HostRebootUnsupportedReason)).To(ContainSubstring("by hand"))
	b.get(b.host)
	b.Expect(conditions.Has(b.host, infrav1.HostDrainedCondition)).To(BeFalse())

	booted("first")
	request(time.Minute)
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionFalse, infrav1.HostRebootDrainingReason)
	b.Expect(b.condition(b.host, infrav1.HostDrainedCondition, metav1.ConditionFalse, infrav1.HostDrainingReason)).To(ContainSubstring("1 machines are left"))
	b.Expect(b.fake.Calls("Reboot")).To(BeZero())
	b.delete(machine)
	b.delete(m)
	b.Eventually(func() int { return b.fake.Calls("Reboot") }).ShouldNot(BeZero())
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionFalse, infrav1.HostRebootingReason)
	_, waiting := b.addMachine(nil, nil)
	b.Expect(b.condition(waiting, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("unschedulable"))

	b.fake.Stop()
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	asked := b.fake.Calls("Reboot")
	booted("second")
	b.fake.Start(t)
	b.condition(b.host, infrav1.HostRebootedCondition, metav1.ConditionTrue, infrav1.HostRebootedReason)
	b.running(waiting)
	b.Expect(b.host.Status.Reboot.BootID).To(Equal("first"))
	b.Expect(b.fake.Calls("Reboot")).To(Equal(asked))

	b.get(b.host)
	earlier := b.host.DeepCopy()
	earlier.Spec.RebootRequestedAt = metav1.NewTime(time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC))
	b.Expect(env.Client.Patch(ctx, earlier, client.MergeFrom(b.host))).To(MatchError(ContainSubstring("can only be replaced by a later time")))
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.RebootRequestedAt = metav1.Time{} })
	b.Eventually(func() bool {
		b.get(b.host)
		return conditions.Has(b.host, infrav1.HostRebootedCondition) || !b.host.Status.Reboot.RequestedAt.IsZero()
	}).Should(BeFalse())
}
