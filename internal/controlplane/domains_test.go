package controlplane

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestLabelsOfAnyName: control planes of any name have valid labels, and different names have different labels.
func TestLabelsOfAnyName(t *testing.T) {
	seen := map[string]string{}
	for length := 1; length <= 253; length++ {
		for _, end := range []string{"a", "-b", ".c"} {
			if len(end) > length {
				continue
			}
			for dash := range length - len(end) {
				name := []byte(strings.Repeat("x", length-len(end)) + end)
				if dash > 0 {
					name[dash] = '-'
				}
				s := &scope{ControlPlane: &model.ControlPlane{Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, Object: &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Name: string(name)}}}}
				value := ownLabels(s)[clusterv1.MachineControlPlaneNameLabel]
				if problems := validation.IsValidLabelValue(value); len(problems) > 0 {
					t.Fatalf("%s: %s: %v", name, value, problems)
				}
				if other, ok := seen[value]; ok && other != string(name) && len(name) <= 63 {
					t.Fatalf("%s and %s have the same label", name, other)
				}
				seen[value] = string(name)
			}
		}
	}
}

// TestReady (CP-10): Ready is True while the control plane serves and its Machines are Ready and up to date. Otherwise it is
// False.
func TestReady(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("Ready", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.ReadyCondition, metav1.ConditionTrue, "")
	})
	machine := machinesOf(t, w.cluster)[0]
	ready := func(status metav1.ConditionStatus) {
		w.cluster.ChangeStatus(&machine, func() {
			conditions.Set(&machine, metav1.Condition{Type: clusterv1.ReadyCondition, Status: status, Reason: "Test", Message: "as the test wants it"})
		})
		w.until("Ready follows", func() bool {
			return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.ReadyCondition, status, "")
		})
	}
	ready(metav1.ConditionFalse)
	if !testcluster.Has(cp, clusterv1.ReadyCondition, metav1.ConditionFalse, machine.Name) {
		t.Errorf("Ready does not contain the cause: %v", conditions.Get(cp, clusterv1.ReadyCondition))
	}
	ready(metav1.ConditionTrue)
	w.cluster.MachineTemplate("other")
	w.broken[machine.Name] = true
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "other" })
	w.cluster.Becomes(t, cp, "not Ready during a rollout", func() bool {
		return testcluster.Has(cp, clusterv1.ReadyCondition, metav1.ConditionFalse, "not up-to-date")
	})
}
