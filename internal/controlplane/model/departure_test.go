package model

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// TestDepart: a Machine is removed after its member has left etcd. The member leaves if the others keep a quorum without it.
func TestDepart(t *testing.T) {
	for _, c := range []struct {
		machines string
		before   bool
		want     DepartureStep
		member   string
		why      string
	}{
		{machines: "z:vd a:v b:v", want: KeepMachine},
		{machines: "z:vh a:v b:v", want: RemoveMember},
		{machines: "z:vhb a:v b:v", want: KeepMachine, why: "is leaving"},
		{machines: "z:xh a:v b:v", want: ReleaseMachine},
		{machines: "z:-h a:v b:v", want: ReleaseMachine},
		{machines: "z:lh a:v", want: RemoveMember},
		{machines: "z:uh a:v b:v", want: RemoveMember},
		{machines: "z:vh a:u b:v", want: KeepMachine, why: "lose its quorum"},
		{machines: "z:vh", want: KeepMachine, why: "the last voting member"},
		{machines: "z:vh a:l", want: KeepMachine, why: "the last voting member"},
		{machines: "z:vh a:v", want: RemoveMember},
		{machines: "z:vh a:vhb b:v", want: KeepMachine, why: "a is leaving"},
		{machines: "z:vh a:vU b:v", want: KeepMachine, why: "the update has to end first"},
		{machines: "z:vhU a:v b:v", want: RemoveMember},
		{machines: "z:uh a:vU b:v", want: RemoveMember},
		{machines: "z:vh a:vdU b:v", want: KeepMachine, why: "the update has to end first"},
		{machines: "z:vh a:vB b:v", want: RemoveMember},
		{machines: "z:ih a:v b:v", want: ReleaseMachine},
		// A member without a Machine can be that of a Machine whose name is unknown. It leaves first.
		{machines: "z:ih a:v b:v stray-x:v", want: RemoveMember, member: "stray-x"},
		{machines: "z:ih a:v b:v stray-x:vb", want: KeepMachine, why: "stray-x is leaving"},
		{machines: "z:ih a:v b:v stray-x:x", want: ReleaseMachine},
		{machines: "z:ih a:v b:v stray-x:x stray-y:v", want: RemoveMember, member: "stray-y"},
		{machines: "z:ih y:ih a:v b:v stray-x:v", want: RemoveMember, member: "stray-x"},
		// It can also be the member of a Machine that stays.
		{machines: "z:ih y:i a:v b:v stray-x:v", want: KeepMachine, why: "may run on this Machine or on Machine y"},
		{machines: "z:ih y:id a:v b:v stray-x:v", want: KeepMachine, why: "may run on this Machine or on Machine y"},
		{machines: "z:ih stray-x:v", want: KeepMachine, why: "the last voting member"},
		{machines: "z:ih a:v stray-x:v stray-y:v", want: KeepMachine, why: "no quorum"},
		{machines: "z:-h", before: true, want: ReleaseMachine},
	} {
		f := build(c.machines)
		if c.machines == "z:ih a:v stray-x:v stray-y:v" {
			f.Unassigned[0].health, f.Unassigned[1].health = metav1.ConditionFalse, metav1.ConditionFalse
		}
		if c.want == RemoveMember && c.member == "" {
			c.member = "z"
		}
		if got := PlanDeparture(f, f.Find("z"), !c.before); got.Step != c.want || got.Member != c.member || !strings.Contains(got.Why, c.why) {
			t.Errorf("%s: got %+v, want %s %s (%s)", c.machines, got, c.want, c.member, c.why)
		}
	}
	f := build("z:vh a:v b:v")
	f.Instances[0].Machine.Annotations[clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/other"] = ""
	if got := PlanDeparture(f, f.Find("z"), true); got.Step != KeepMachine || !strings.Contains(got.Why, "another pre-terminate hook") {
		t.Error("ours is not the last hook", got)
	}
	f.Unknown = "nobody knows"
	delete(f.Instances[0].Machine.Annotations, clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/other")
	if got := PlanDeparture(f, f.Find("z"), true); got.Step != KeepMachine {
		t.Error("goes while nothing is known", got)
	}
}

// TestDepartWithExternalEtcd: the Machines have no votes. The last one stays until its replacement exists.
func TestDepartWithExternalEtcd(t *testing.T) {
	for _, c := range []struct {
		machines string
		before   bool
		want     DepartureStep
	}{
		{machines: "z:-h a:- b:-", want: ReleaseMachine},
		{machines: "z:-h a:-", want: ReleaseMachine},
		{machines: "z:-h", want: KeepMachine},
		{machines: "z:-h a:-h b:-d", want: KeepMachine},
		{machines: "z:-h", before: true, want: ReleaseMachine},
	} {
		f := build(c.machines)
		f.Stacked, f.Unknown = false, "nobody knows"
		if got := PlanDeparture(f, f.Find("z"), !c.before); got.Step != c.want || got.Step == KeepMachine && !strings.Contains(got.Why, "last control plane machine") {
			t.Errorf("%s: got %+v, want %s", c.machines, got, c.want)
		}
		if p := PlanMachines(f, Target{Replicas: 1, initialized: true}); c.want == KeepMachine && p.Create != 1 {
			t.Errorf("%s: the replacement of the last Machine waits: %+v", c.machines, p)
		}
	}
}
