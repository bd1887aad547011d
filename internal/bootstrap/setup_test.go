package bootstrap

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"capstan.dev/capstan/internal/testenv"
)

func TestMachineChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*clusterv1.Machine)
		want   bool
	}{
		"condition": {change: func(m *clusterv1.Machine) {
			conditions.Set(m, metav1.Condition{Type: clusterv1.ReadyCondition, Status: metav1.ConditionTrue, Reason: "A"})
		}},
		"phase":     {change: func(m *clusterv1.Machine) { m.Status.Phase = "Running" }},
		"addresses": {change: func(m *clusterv1.Machine) { m.Status.Addresses = clusterv1.MachineAddresses{{Address: "10.0.0.1"}} }},
		"node":      {change: func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "a" }, want: true},
		"infrastructure": {change: func(m *clusterv1.Machine) {
			m.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
		}, want: true},
		"spec":   {change: func(m *clusterv1.Machine) { m.Generation++ }, want: true},
		"resync": {change: func(m *clusterv1.Machine) { m.ResourceVersion = "1" }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := testenv.Passes(machineChanged(), &clusterv1.Machine{}, tc.change); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
	if !machineChanged().Create(event.CreateEvent{Object: &clusterv1.Machine{}}) || !machineChanged().Delete(event.DeleteEvent{Object: &clusterv1.Machine{}}) {
		t.Error("a Machine that appears or disappears must reconcile its config")
	}
}
