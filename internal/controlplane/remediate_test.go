package controlplane

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// TestRepairsInARow (CP-10): all three Machines and their replacements are unhealthy. They are replaced one at a time, so etcd
// has at least two members. Each replacement records the Machine that it replaces, so the number of retries is limited.
func TestRepairsInARow(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Replicas = ptr.To[int32](3)
		cp.Spec.Remediation.MaxRetry = ptr.To[int32](0)
	})
	w.until("three", w.settled(cp, 3))
	w.fewest = 3
	before := namesOfMachines(t, w)
	for _, name := range before {
		unhealthy(w, &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: name}})
	}
	w.until("all are replaced", func() bool {
		if voting := w.voting(); len(w.made) > 3 && voting < 2 {
			t.Fatalf("%d members vote", voting)
		}
		for _, name := range namesOfMachines(t, w) {
			if slices.Contains(before, name) {
				return false
			}
		}
		return w.settled(cp, 3)()
	})
	if w.fewest < 2 || len(w.made) != 6 {
		t.Errorf("at least %d voting members, %d Machines were created", w.fewest, len(w.made))
	}
	var replaced []string
	for _, m := range machinesOf(t, w.cluster) {
		if r := model.ReadRemediationRecord(&m, controlplanev1.RemediationForAnnotation); r != nil {
			replaced = append(replaced, r.Machine)
		}
	}
	slices.Sort(replaced)
	if slices.Sort(before); !slices.Equal(replaced, before) {
		t.Errorf("%v were replaced, and the new Machines record %v", before, replaced)
	}
	again := machinesOf(t, w.cluster)[0]
	unhealthy(w, &again)
	w.until("maxRetry binds", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "maxRetry")
	})
}
