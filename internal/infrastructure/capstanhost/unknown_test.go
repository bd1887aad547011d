package capstanhost

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Ids are public. Objects of another namespace with the ids of a machine and of its cluster do not hide the machine: the owner of the
// host could neither find nor remove it, and a machine without an object prevents a reboot.
func TestCopiesHideNoMachine_ALL18(t *testing.T) {
	machine := func(namespace, id string) *hostpb.Machine {
		return &hostpb.Machine{
			Spec:   &hostpb.MachineSpec{Id: id, Namespace: namespace, Network: &hostpb.Network{Id: "n-" + id, Namespace: namespace}},
			Status: &hostpb.MachineStatus{ManagementCluster: "self"},
		}
	}
	object := func(namespace, id string) infrav1.CapstanMachine {
		return infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}, Spec: infrav1.CapstanMachineSpec{ID: id}}
	}
	machines := []*hostpb.Machine{machine("a", "copied"), machine("a", "known"), machine("a", "paused"), machine("a", "gone")}
	out := withoutObject(machines, []infrav1.CapstanMachine{object("thief", "copied"), object("a", "known")})
	out = ours(out, map[scopedID]bool{{"thief", "n-gone"}: false, {"a", "n-paused"}: false}, "self")
	var ids []string
	for _, m := range out {
		ids = append(ids, m.GetSpec().GetId())
	}
	if got := strings.Join(ids, " "); got != "copied gone" {
		t.Errorf("%q, want the copied machine and that of the copied cluster", got)
	}
}
