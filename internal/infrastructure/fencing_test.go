package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// The host gets spec.fencing, and status.fencing is what it has acknowledged. The machine of a host that is lost waits as long as
// it may run.
func TestFencing(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.provisioned()
	machine, m := b.addMachine(nil, nil)
	b.running(m)
	acknowledged := func(seconds int32) {
		t.Helper()
		b.Eventually(func() int32 { b.get(b.host); return ptr.Deref(b.host.Status.Fencing.StopAfterSeconds, 0) }).Should(Equal(seconds))
	}
	for _, seconds := range []int32{60, 600, 30} {
		update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Fencing.StopAfterSeconds = &seconds })
		acknowledged(seconds)
		b.condition(b.host, infrav1.HostFencingCondition, metav1.ConditionTrue, infrav1.HostFencingSetReason)
	}
	calls := b.fake.Calls("SetFencing")
	b.Expect(calls).To(Equal(3))
	b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) {
		s.Phase, s.Unconfirmed, s.Fenced, s.Message = hostpb.MachineStatus_PENDING, true, true, "cut off"
	})
	b.running(m) // The manager confirms it.
	b.fake.Stop()
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	b.delete(machine)
	b.delete(m)
	b.Expect(b.condition(m, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason)).
		To(ContainSubstring("it stops its machines if it stays cut off"))
	b.fake.Start(t)
	b.gone(m)
	b.Expect(b.fake.Calls("SetFencing")).To(Equal(calls))
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Fencing = infrav1.HostFencing{} })
	b.Eventually(func() int { return b.fake.Calls("SetFencing") }).Should(Equal(calls + 1))
	b.Eventually(func() bool { b.get(b.host); return conditions.Has(b.host, infrav1.HostFencingCondition) }).Should(BeFalse())
}

// A host whose capstand is too new or too old is reported, and gets no machines. Its machines are not touched. A capstand without
// a version has version 1.
func TestIncompatibleVersion(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.provisioned()
	machine, m := b.addMachine(nil, nil)
	b.running(m)
	for name, tc := range map[string]struct {
		version, minimum int32
		says             string
	}{
		"a newer capstand":                {version: hostpb.MaximumHostVersion + 1, says: "upgrade the manager first"},
		"a capstand for newer managers":   {version: hostpb.ProtocolVersion, minimum: hostpb.ProtocolVersion + 1, says: "upgrade the manager first"},
		"a version that no capstand has":  {version: -1, says: ""},
		"a capstand from before versions": {version: 0, says: ""},
	} {
		b.fake.SetInfo(func(i *hostpb.HostInfo) { i.ProtocolVersion, i.MinimumManagerVersion = tc.version, tc.minimum })
		if tc.says == "" {
			b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionTrue, infrav1.HostConnectedReason)
			continue
		}
		message := b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostIncompatibleVersionReason)
		b.Expect(message).To(ContainSubstring(tc.says), name)
		b.condition(b.host, clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.HostIncompatibleVersionReason)
	}
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.ProtocolVersion, i.MinimumManagerVersion = hostpb.MaximumHostVersion+1, 0 })
	b.condition(b.host, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostIncompatibleVersionReason)
	calls := func() int {
		return b.fake.Calls("EnsureMachine") + b.fake.Calls("DeleteMachine") + b.fake.Calls("SetFencing") + b.fake.Calls("EnsureNetwork")
	}
	before := calls()
	_, waits := b.addMachine(nil, nil)
	b.Expect(b.condition(waits, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("upgrade the manager first"))
	b.delete(machine)
	b.delete(m)
	b.condition(m, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason)
	b.Expect(calls()).To(Equal(before))
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.ProtocolVersion = hostpb.ProtocolVersion })
	b.running(waits)
	b.gone(m)
}
