package machine

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// IM-02: a machine counts for its host, or for the host that was just chosen for it.
func TestMembersOf_IM02(t *testing.T) {
	machine := func(name, host string) infrav1.CapstanMachine {
		m := infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Name: name}}
		m.Spec.HostName = host
		return m
	}
	leaving := machine("leaving", "b")
	leaving.DeletionTimestamp = ptr.To(metav1.Now())
	list := []infrav1.CapstanMachine{machine("one", "a"), machine("two", "a"), machine("new", ""), leaving, machine("self", "b"), machine("moved", "b")}
	chosen := map[string]string{"new": "c", "unseen": "c", "leaving": "b", "moved": "a"}
	got := membersOf(list, chosen, func(name string) bool { return name != "self" })
	if want := map[string]int{"a": 2, "b": 1, "c": 2}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := membersOf(list[:1], nil, func(string) bool { return true }); !maps.Equal(got, map[string]int{"a": 1}) {
		t.Errorf("without a choice: %v", got)
	}
}

// IM-02: a control plane machine spreads away from those that stay, and then from the outdated ones. A worker spreads away from all workers.
func TestPeersOf_IM02(t *testing.T) {
	machine := func(name string, upToDate metav1.ConditionStatus) clusterv1.Machine {
		m := clusterv1.Machine{}
		m.Spec.InfrastructureRef.Name = name
		m.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineUpToDateCondition, Status: upToDate}}
		return m
	}
	controlPlane := []clusterv1.Machine{machine("new", metav1.ConditionTrue), machine("former", metav1.ConditionFalse), machine("other", metav1.ConditionTrue)}
	for _, c := range []struct {
		self           string
		isControlPlane bool
		outdated       bool
		want           string
	}{
		{"new", true, false, "other"}, {"new", true, true, "former"}, {"former", true, false, "new other"}, {"former", true, true, ""},
		{"a", false, false, "b"}, {"a", false, true, ""},
	} {
		var got []string
		for _, name := range []string{"new", "former", "other", "a", "b"} {
			if peersOf(c.self, c.isControlPlane, controlPlane)(c.outdated)(name) {
				got = append(got, name)
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v: got %v", c, got)
		}
	}
}

// A volume in another failure domain needs no deletion of data.
func TestKeepData(t *testing.T) {
	for reason, want := range map[placement.Reason]bool{placement.Domain: true, placement.Unavailable: false} {
		err := fmt.Errorf("a reason: %w", &placement.Refused{Reasons: []placement.Reason{placement.Volume, reason}})
		if got := strings.Contains(keepData(err), "To keep the data, delete the Machine"); got != want {
			t.Errorf("%s: %q", reason, keepData(err))
		}
	}
}
