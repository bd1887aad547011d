package machine

import (
	"maps"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
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
