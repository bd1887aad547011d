package controlplane

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestDomainsOf (CP-16, IC-04): the shapes of both contracts.
func TestDomainsOf(t *testing.T) {
	for name, c := range map[string]struct {
		status map[string]any
		want   string
		known  bool
	}{
		"v1beta2": {map[string]any{"failureDomains": []any{
			map[string]any{"name": "b", "controlPlane": true}, map[string]any{"name": "a", "controlPlane": false},
		}}, "b:true a:false", true},
		"v1beta1": {map[string]any{"failureDomains": map[string]any{
			"b": map[string]any{"controlPlane": true, "attributes": map[string]any{"k": "v"}}, "a": map[string]any{"controlPlane": false},
		}}, "a:false b:true", true},
		"none yet":       {map[string]any{}, "", false},
		"none, v1beta2":  {map[string]any{"initialization": map[string]any{"provisioned": true}}, "", true},
		"none, v1beta1":  {map[string]any{"ready": true}, "", true},
		"something else": {map[string]any{"failureDomains": "garbage"}, "", false},
		"an empty map":   {map[string]any{"failureDomains": map[string]any{}}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{}
			cluster.Spec.InfrastructureRef.Name = "demo"
			s := &scope{cluster: cluster, infraCluster: &unstructured.Unstructured{Object: map[string]any{"status": c.status}}}
			var got []string
			for _, d := range failureDomains(s) {
				got = append(got, fmt.Sprintf("%s:%v", d.Name, *d.ControlPlane))
			}
			if strings.Join(got, " ") != c.want || s.domainsKnown() != c.known {
				t.Errorf("got %v, known %v", got, s.domainsKnown())
			}
		})
	}
}

// TestPlaceByStatus (CP-16): where Machines stand counts, and not only where they were to stand.
func TestPlaceByStatus(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	in := func(spec, status string) *clusterv1.Machine {
		m := aMachine(fmt.Sprint(spec, status), "", true)
		m.Spec.FailureDomain, m.Status.FailureDomain = spec, status
		return m
	}
	for _, c := range []struct {
		machines []*clusterv1.Machine
		want     string
	}{
		{nil, "a"}, {[]*clusterv1.Machine{in("a", "")}, "b"}, {[]*clusterv1.Machine{in("", "a")}, "b"}, {[]*clusterv1.Machine{in("", "a"), in("b", "b")}, "c"},
		{[]*clusterv1.Machine{in("c", "a")}, "b"}, {[]*clusterv1.Machine{in("", "")}, "a"},
	} {
		if got := place(domains, c.machines, nil); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

// TestLabelsOfAnyName (CP-19): a control plane of any name has labels that are valid, and another name has others.
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
				s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, controlPlane: &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Name: string(name)}}}
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

// TestReady (CP-10): Ready, which tools wait for, is True once the control plane serves and its Machines are Ready and up to
// date, and False again as long as one of these does not hold.
func TestReady(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("Ready", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, clusterv1.ReadyCondition, metav1.ConditionTrue, "")
	})
	machine := machinesOf(t, w.cluster)[0]
	ready := func(status metav1.ConditionStatus) {
		w.cluster.ChangeStatus(&machine, func() {
			conditions.Set(&machine, metav1.Condition{Type: clusterv1.ReadyCondition, Status: status, Reason: "Test", Message: "as the test wants it"})
		})
		w.until("Ready follows", func() bool { return w.cluster.Get(cp) == nil && has(cp, clusterv1.ReadyCondition, status, "") })
	}
	ready(metav1.ConditionFalse)
	if !has(cp, clusterv1.ReadyCondition, metav1.ConditionFalse, machine.Name) {
		t.Errorf("it does not say why: %v", conditions.Get(cp, clusterv1.ReadyCondition))
	}
	ready(metav1.ConditionTrue)
	w.cluster.MachineTemplate("other")
	w.broken[machine.Name] = true
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "other" })
	becomes(t, w.cluster, cp, "not Ready during a rollout", func() bool { return has(cp, clusterv1.ReadyCondition, metav1.ConditionFalse, "not up-to-date") })
}
