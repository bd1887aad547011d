package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// IM-02: a machine that no host accepts has the reason of each host in its condition, and is placed when one of them accepts it. A
// toleration opens a tainted host.
func TestTaints_IM02(t *testing.T) {
	b := newBox(t).provisioned()
	taint := []infrav1.HostTaint{{Key: "example.com/gpu", Value: "yes", Effect: infrav1.HostTaintNoSchedule}}
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Taints = taint })
	full, _ := b.addHost(func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })

	_, m := b.addMachine(nil, nil)
	b.Eventually(func() string {
		return b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	}).Should(And(
		ContainSubstring(b.host.Name+" has the taint example.com/gpu=yes:NoSchedule, which spec.hostTolerations does not tolerate"),
		ContainSubstring(full.Name+" is unschedulable")))

	_, tolerant := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.HostTolerations = []infrav1.HostToleration{{Key: "example.com/gpu", Operator: infrav1.HostTolerationExists}}
	})
	b.Eventually(func() string { b.get(tolerant); return tolerant.Spec.HostName }).Should(Equal(b.host.Name))
	b.get(m)
	b.Expect(m.Spec.HostName).To(BeEmpty())

	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Taints = nil })
	b.Eventually(func() string { b.get(m); return m.Spec.HostName }).Should(Equal(b.host.Name))
}

// ALL-18: neither selectors nor tolerations open a host of other namespaces, and no message names it.
func TestSelectorsOpenNoHost_ALL18(t *testing.T) {
	others := newNamespace(t)
	foreign, _ := others.addHost(func(h *infrav1.CapstanHost) { h.Labels = map[string]string{"disk": "foreign-ssd"} })
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		m.Spec.HostSelector = &metav1.LabelSelector{MatchLabels: foreign.Labels}
		m.Spec.HostTolerations = []infrav1.HostToleration{{Operator: infrav1.HostTolerationExists}}
	})
	message := b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	b.Expect(message).To(ContainSubstring("no CapstanHost admits this namespace and matches the host selectors"))
	b.Expect(message).NotTo(ContainSubstring(foreign.Name))

	// An event of the other host changes nothing. Then a host of this namespace gets the label.
	update(others, foreign, func(h *infrav1.CapstanHost) { h.Labels["touched"] = "yes" })
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Labels = map[string]string{"disk": "foreign-ssd"} })
	b.Eventually(func() string { b.get(m); return m.Spec.HostName }).Should(Equal(b.host.Name))
}
