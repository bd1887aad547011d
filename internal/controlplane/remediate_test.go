package controlplane

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestUnreplaced (CP-10): which of the repairs that are written down still wait for a replacement.
func TestUnreplaced(t *testing.T) {
	y := &record{Machine: "y"}
	x := &record{Machine: "x", Retries: 2, Open: y}
	for _, c := range []struct {
		what     string
		machines string
		replaces string // the Machine b replaces this one
		open     *record
		want     *record
	}{
		{what: "nothing was repaired", machines: "a:v b:v"},
		{what: "it is gone", machines: "a:v b:v", open: y, want: y},
		{what: "it goes", machines: "a:v b:v y:vd", open: y, want: y},
		{what: "it is about to go", machines: "a:v b:v y:vf", open: y, want: y},
		{what: "it has healed before it went", machines: "a:v b:v y:v", open: y},
		{what: "it has a replacement, and another Machine is missing", machines: "a:v b:v", replaces: "y", open: y},
		{what: "it has a replacement that joined before it goes", machines: "b:v y:vd", replaces: "y", open: y},
		{what: "there are as many as are wanted", machines: "a:v b:v c:v", open: y},
		{what: "one of them goes", machines: "a:v b:v c:vd", open: y, want: y},
		{what: "two are gone", machines: "a:v b:v", open: x, want: x},
		{what: "two are gone, and one has a replacement", machines: "a:v b:v", replaces: "x", open: x, want: y},
	} {
		f := build(c.machines)
		if c.replaces != "" {
			f.find("b").machine.Annotations[controlplanev1.RemediationForAnnotation] = (&record{Machine: c.replaces}).String()
		}
		if got := f.unreplaced(c.open, 3); got != c.want {
			t.Errorf("%s: got %s, want %s", c.what, got, c.want)
		}
	}
}

// TestRepairsInARow (CP-10): all three Machines are unhealthy, and so is what replaces them. They are replaced one at a time:
// etcd has two members at least, and each replacement knows what it replaces, so that retries are limited.
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
		t.Errorf("%d members at least, %d Machines were made", w.fewest, len(w.made))
	}
	var replaced []string
	for _, m := range machinesOf(t, w.cluster) {
		if r := readRecord(&m, controlplanev1.RemediationForAnnotation); r != nil {
			replaced = append(replaced, r.Machine)
		}
	}
	slices.Sort(replaced)
	if slices.Sort(before); !slices.Equal(replaced, before) {
		t.Errorf("replaced were %v, and the new Machines know of %v", before, replaced)
	}
	again := machinesOf(t, w.cluster)[0]
	unhealthy(w, &again)
	w.until("maxRetry binds", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "maxRetry")
	})
}
