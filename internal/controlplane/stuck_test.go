package controlplane

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestStuckIn (CP-10): when a Machine that cannot go counts as gone.
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
		{what: "not for long", machines: "a:v b:v z:xd", going: stuckAfter / 3, want: stuckAfter - stuckAfter/3},
		{what: "its infrastructure stays", machines: "a:v b:v z:xd", want: -1},
		{what: "our hook is on", machines: "a:v b:v z:xd", hook: true, going: time.Hour, want: -1},
		{what: "its member has a vote", machines: "a:v b:v z:ud", going: time.Hour, want: -1},
		{what: "nobody knows of members", machines: "a:v b:v z:-d", going: time.Hour, unknown: "silence", want: -1},
		{what: "an external etcd", machines: "a: b: z:d", external: true, going: time.Hour, want: 0},
		{what: "it is not deleted", machines: "a:v b:v z:x", going: time.Hour, want: -1},
	} {
		f := build(c.machines)
		f.stacked, f.unknown = !c.external, c.unknown
		z := f.find("z")
		if !c.hook {
			delete(z.machine.Annotations, controlplanev1.PreTerminateHookAnnotation)
		}
		going := map[string]time.Time{}
		if c.going > 0 {
			going["z"] = now.Add(-c.going)
		}
		if got := f.stuckIn(z, going["z"], now); got != c.want {
			t.Errorf("%s: got %s, want %s", c.what, got, c.want)
		}
		if left := f.withoutStuck(going, now); (left.find("z") == nil) != (c.want == 0) || left.find("a") == nil || f.find("z") == nil {
			t.Errorf("%s: %d of %d Machines count", c.what, len(left.instances), len(f.instances))
		}
	}
}

// TestPlanWithStuck (CP-03, CP-10): a Machine that counts as gone is replaced, and holds nothing back.
func TestPlanWithStuck(t *testing.T) {
	now := time.Unix(100000, 0)
	for _, c := range []struct{ what, machines, want string }{
		{"it is replaced", "a:v b:v z:xd", "create 1"},
		{"it was replaced", "a:v b:v c:v z:xd", "nothing"},
		{"a rollout goes on", "a:vo b:vo c:vo d:v z:xd", "remove a"},
		{"it was the only one", "z:xd", "wait"},
	} {
		f := build(c.machines)
		delete(f.find("z").machine.Annotations, controlplanev1.PreTerminateHookAnnotation)
		got := makePlan(f.withoutStuck(map[string]time.Time{"z": now.Add(-time.Hour)}, now), wish{replicas: 3, maxSurge: 1, initialized: true})
		if got.String() != c.want {
			t.Errorf("%s: got %s (%s), want %s", c.what, got, got.why, c.want)
		}
	}
}

// TestDeadHost (CP-10): a Machine on a host that is dead for good leaves etcd and is replaced, and everything goes on,
// although its infrastructure cannot be removed. It is still counted, and it is said why.
func TestDeadHost(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	w.fewest = 3
	lost := machinesOf(t, w.cluster)[0]
	infra := &infrav1.CapstanMachine{ObjectMeta: w.cluster.Meta(lost.Name)}
	w.dead[lost.Name], w.careful[lost.Name] = true, true
	w.until("it is seen", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, lost.Name)
	})
	unhealthy(w, &lost)
	w.until("its member is to leave", func() bool { m := w.member(lost.Name); return m != nil && m.Spec.Leave })
	w.cluster.Change(infra, func() { infra.Finalizers = []string{"test/host-is-dead"} })
	if err := env.Client.Delete(context.Background(), infra); err != nil {
		t.Fatal(err)
	}
	w.stubborn[lost.Name] = true
	w.careful = map[string]bool{}
	w.until("another one is made", func() bool {
		return len(w.made) == 4 && w.voting() == 3 && w.cluster.Get(cp) == nil && ptr.Deref(cp.Status.Replicas, 0) == 4 &&
			has(cp, clusterv1.ScalingDownCondition, metav1.ConditionTrue, "Machine "+lost.Name+" has left the cluster, and its CapstanMachine "+lost.Name+" is still there")
	})

	before := namesOfMachines(t, w)
	otherTemplate(w, cp, "other")
	w.until("a rollout replaces all others", func() bool {
		still := slices.DeleteFunc(namesOfMachines(t, w), func(name string) bool { return !slices.Contains(before, name) })
		return strings.Join(still, " ") == lost.Name && w.voting() == 3
	})
	if w.fewest < 2 {
		t.Errorf("%d members at least", w.fewest)
	}
	w.cluster.Change(infra, func() { infra.Finalizers = nil })
	w.stubborn = map[string]bool{}
	w.until("the host is back, and it goes", w.settled(cp, 3))
}
