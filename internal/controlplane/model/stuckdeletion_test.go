package model

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestStuckIn (CP-10): the time after which a Machine whose deletion is blocked counts as removed.
func TestStuckIn(t *testing.T) {
	now := time.Unix(100000, 0)
	for _, c := range []struct {
		what     string
		machines string
		hook     bool
		going    time.Duration // for how long its infrastructure has been going
		external bool
		unknown  string
		want     time.Duration
	}{
		{what: "its member has left", machines: "a:v b:v z:xd", going: time.Hour, want: 0},
		{what: "its member is not known any more", machines: "a:v b:v z:-d", going: time.Hour, want: 0},
		{what: "not for long", machines: "a:v b:v z:xd", going: StuckAfter / 3, want: StuckAfter - StuckAfter/3},
		{what: "its infrastructure stays", machines: "a:v b:v z:xd", want: -1},
		{what: "our hook is on", machines: "a:v b:v z:xd", hook: true, going: time.Hour, want: -1},
		{what: "its member has a vote", machines: "a:v b:v z:ud", going: time.Hour, want: -1},
		{what: "nobody knows of members", machines: "a:v b:v z:-d", going: time.Hour, unknown: "silence", want: -1},
		{what: "an external etcd", machines: "a: b: z:d", external: true, going: time.Hour, want: 0},
		{what: "it is not deleted", machines: "a:v b:v z:x", going: time.Hour, want: -1},
	} {
		f := build(c.machines)
		f.Stacked, f.Unknown = !c.external, c.unknown
		z := f.Find("z")
		if !c.hook {
			delete(z.Machine.Annotations, controlplanev1.PreTerminateHookAnnotation)
		}
		going := map[string]time.Time{}
		if c.going > 0 {
			going["z"] = now.Add(-c.going)
		}
		if got := f.stuckIn(z, going["z"], now); got != c.want {
			t.Errorf("%s: got %s, want %s", c.what, got, c.want)
		}
		if left := f.withoutStuck(going, now); (left.Find("z") == nil) != (c.want == 0) || left.Find("a") == nil || f.Find("z") == nil {
			t.Errorf("%s: %d of %d Machines count", c.what, len(left.Instances), len(f.Instances))
		}
	}
}

// TestPlanWithStuck (CP-03, CP-10): a Machine that counts as removed is replaced and blocks no other step.
func TestPlanWithStuck(t *testing.T) {
	now := time.Unix(100000, 0)
	for _, c := range []struct{ what, machines, want string }{
		{"it is replaced", "a:v b:v z:xd", "create 1"},
		{"it was replaced", "a:v b:v c:v z:xd", "nothing"},
		{"a rollout goes on", "a:vo b:vo c:vo d:v z:xd", "remove a"},
		{"it was the only one", "z:xd", "wait"},
	} {
		f := build(c.machines)
		delete(f.Find("z").Machine.Annotations, controlplanev1.PreTerminateHookAnnotation)
		got := PlanMachines(f.withoutStuck(map[string]time.Time{"z": now.Add(-time.Hour)}, now), Target{Replicas: 3, maxSurge: 1, initialized: true})
		if got.String() != c.want {
			t.Errorf("%s: got %s (%s), want %s", c.what, got, got.Why, c.want)
		}
	}
}

// TestFormerMachines: a restore names the Machines that it waits for, and those whose infrastructure stays for long.
func TestFormerMachines(t *testing.T) {
	now := time.Unix(100000, 0)
	var machines []*clusterv1.Machine
	for _, name := range []string{"a", "b", "c"} {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name}}
		m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanMachine", Name: name + "-infra"}
		machines = append(machines, m)
	}
	const names = "Control plane machines are being deleted: a, b, c"
	for _, c := range []struct {
		what  string
		going map[string]time.Duration
		want  string
		again time.Duration
	}{
		{what: "their infrastructure is not deleted yet", want: names},
		{what: "not for long", going: map[string]time.Duration{"a": StuckAfter / 3, "b": StuckAfter / 2}, want: names, again: StuckAfter / 2},
		{what: "one for long", going: map[string]time.Duration{"a": StuckAfter / 3, "b": StuckAfter}, again: StuckAfter - StuckAfter/3,
			want: names + "; Machine b is being deleted, and its CapstanMachine b-infra is still there: the host may not answer; bring it back, or see that object's conditions"},
	} {
		cp := &ControlPlane{Now: now, InfrastructureDeletedAt: map[string]time.Time{}}
		for name, going := range c.going {
			cp.InfrastructureDeletedAt[name] = now.Add(-going)
		}
		if got, again := cp.FormerMachines(machines); got != c.want || again != c.again {
			t.Errorf("%s: got %q after %s, want %q after %s", c.what, got, again, c.want, c.again)
		}
	}
}
