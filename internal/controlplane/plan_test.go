package controlplane

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// build makes a fleet from one word per Machine, the oldest first. A word is its name, then letters:
//
//	v voting and healthy    u voting, unhealthy   s voting, unhealthy for long   ? voting, health unknown
//	l learner               n member not started  - no member                    x its member has left
//	a its API server does not answer any more   A nobody knows whether it does
//	o outdated   d being deleted   h waits for the hook   m marked for deletion   b leaving etcd
//	f found unhealthy by a MachineHealthCheck   i known by no name yet
//	r has to be Ready for a while   R has been
func build(words string) fleet {
	f := fleet{stacked: true}
	for n, word := range strings.Fields(words) {
		name, letters, _ := strings.Cut(word, ":")
		if stray, ok := strings.CutPrefix(name, "stray-"); ok {
			f.strays = append(f.strays, *memberOf("stray-"+stray, letters))
			continue
		}
		f.instances = append(f.instances, anInstance(name, letters, n))
	}
	return f
}

func anInstance(name, letters string, n int) instance {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(n), 0)), Annotations: map[string]string{
		controlplanev1.PreTerminateHookAnnotation: "",
	}}}
	m.Spec.Bootstrap.DataSecretName = ptr.To(name)
	i := instance{machine: m, names: []string{name}, apiServer: metav1.ConditionTrue, member: memberOf(name, letters), served: !strings.ContainsAny(letters, "ln-i")}
	for _, letter := range letters {
		switch letter {
		case 'a', 'l', 'n', '-', 'i':
			i.apiServer = metav1.ConditionFalse
		case 'A':
			i.apiServer = metav1.ConditionUnknown
		case 'o':
			i.outdated = []string{"it is old"}
		case 'd', 'h':
			m.DeletionTimestamp = &metav1.Time{Time: time.Unix(1000, 0)}
		case 'm':
			m.Annotations[clusterv1.DeleteMachineAnnotation] = ""
		case 'f':
			m.Status.Conditions = append(m.Status.Conditions,
				metav1.Condition{Type: clusterv1.MachineHealthCheckSucceededCondition, Status: metav1.ConditionFalse},
				metav1.Condition{Type: clusterv1.MachineOwnerRemediatedCondition, Status: metav1.ConditionFalse})
		}
		if letter == 'r' || letter == 'R' {
			m.Spec.MinReadySeconds = ptr.To[int32](10)
		}
		if letter == 'R' {
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue})
		}
		if letter == 'i' {
			i.names = nil
		}
		if letter == 'h' {
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineDeletingWaitingForPreTerminateHookReason})
		}
	}
	return i
}

func memberOf(name, letters string) *member {
	if strings.ContainsAny(letters, "-i") {
		return nil
	}
	m := &member{name: name, voting: true, health: metav1.ConditionTrue}
	for _, letter := range letters {
		switch letter {
		case 'u':
			m.health = metav1.ConditionFalse
		case 's':
			m.health, m.sick = metav1.ConditionFalse, true
		case '?':
			m.health = metav1.ConditionUnknown
		case 'l', 'n':
			m.voting, m.health = false, metav1.ConditionUnknown
		case 'x':
			m.voting, m.left, m.leave = false, true, true
		case 'b':
			m.leave = true
		}
	}
	return m
}

func (p plan) String() string {
	switch {
	case p.create > 0 && p.first:
		return fmt.Sprintf("first %d", p.create)
	case p.create > 0:
		return fmt.Sprintf("create %d", p.create)
	case p.remove != nil:
		return "remove " + p.remove.Name
	case p.why != "":
		return "wait"
	}
	return "nothing"
}

// TestPlan (CP-03, CP-04, CP-18, CP-20): what is done about the number of Machines, and in which order.
func TestPlan(t *testing.T) {
	for _, c := range []struct {
		what     string
		replicas int
		surge    int
		before   bool // the API server has not answered yet
		machines string
		want     string
		why      string
	}{
		{what: "the first", replicas: 1, surge: 1, before: true, want: "first 1"},
		{what: "the first of three", replicas: 3, surge: 1, before: true, want: "first 1"},
		{what: "the first is starting", replicas: 3, surge: 1, before: true, machines: "a:-", want: "wait", why: "not ready yet"},
		{what: "the first had a bad spec", replicas: 3, surge: 1, before: true, machines: "a:-o", want: "remove a"},
		{what: "the first had a bad spec and goes", replicas: 3, surge: 1, before: true, machines: "a:-od", want: "wait", why: "being deleted"},
		{what: "enough", replicas: 1, surge: 1, machines: "a:v", want: "nothing"},
		{what: "all are gone", replicas: 1, surge: 1, want: "wait", why: "every control plane machine is gone"},

		{what: "two more at once", replicas: 3, surge: 1, machines: "a:v", want: "create 2"},
		{what: "four more at once", replicas: 5, surge: 1, machines: "a:v", want: "create 4"},
		{what: "killed after the first of two", replicas: 3, surge: 1, machines: "a:v b:-", want: "create 1"},
		{what: "they are joining", replicas: 3, surge: 1, machines: "a:v b:l c:n", want: "nothing"},
		{what: "unhealthy, nobody joins", replicas: 3, surge: 1, machines: "a:u", want: "wait", why: "not healthy"},
		{what: "unknown is not safe", replicas: 3, surge: 1, machines: "a:?", want: "wait", why: "not healthy"},
		{what: "a stray goes first", replicas: 3, surge: 1, machines: "a:v stray-x:v", want: "wait", why: "belongs to no Machine"},
		{what: "one that has left is no stray", replicas: 3, surge: 1, machines: "a:v stray-x:x", want: "create 2"},
		{what: "one goes first", replicas: 3, surge: 1, machines: "a:v b:v c:vd", want: "wait", why: "c is being deleted"},
		{what: "the last one is deleted: another joins first", replicas: 1, surge: 1, machines: "a:vd", want: "create 1"},
		{what: "the last one is deleted, and dead", replicas: 1, surge: 1, machines: "a:ud", want: "wait", why: "not healthy"},
		{what: "the last one waits for the new one", replicas: 1, surge: 1, machines: "a:vd b:l", want: "wait", why: "a is being deleted"},

		{what: "down, the oldest", replicas: 1, surge: 1, machines: "a:v b:v c:v", want: "remove a"},
		{what: "down, one at a time", replicas: 1, surge: 1, machines: "a:vd b:v c:v", want: "wait", why: "a is being deleted"},
		{what: "down, the marked one", replicas: 1, surge: 1, machines: "a:v b:v c:vm", want: "remove c"},
		{what: "down, the unhealthy one", replicas: 3, surge: 1, machines: "a:v b:v c:u d:v e:v", want: "remove c"},
		{what: "down, the one whose API server is dead", replicas: 3, surge: 1, machines: "a:v b:v c:va d:v e:v", want: "remove c"},
		{what: "down, one is unhealthy, another marked", replicas: 3, surge: 1, machines: "a:v b:v c:u d:vm e:v", want: "wait", why: "c is not healthy"},
		{what: "down, what has not joined goes", replicas: 1, surge: 1, machines: "a:v b:- c:-", want: "remove b"},
		{what: "down, no quorum", replicas: 1, surge: 1, machines: "a:v b:u c:u", want: "wait"},
		{what: "down, unknown", replicas: 1, surge: 1, machines: "a:v b:? c:v", want: "remove b"},

		{what: "surge", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo", want: "create 1"},
		{what: "surge of one", replicas: 1, surge: 1, machines: "a:vo", want: "create 1"},
		{what: "the new one is joining", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo d:l", want: "wait", why: "d has not joined"},
		{what: "the new one's API server is not there", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo d:va", want: "wait", why: "API server of Machine d"},
		{what: "the new one has joined", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo d:v", want: "remove a"},
		{what: "the new one has not been ready for long", replicas: 3, surge: 1, machines: "a:vor b:vor c:vor d:vr", want: "wait", why: "d has to be Ready for 10 seconds"},
		{what: "the new one is available, and whether the old ones are does not matter", replicas: 3, surge: 1, machines: "a:vor b:vor c:vor d:vR", want: "remove a"},
		{what: "the old one goes", replicas: 3, surge: 1, machines: "a:vod b:vo c:vo d:v", want: "wait", why: "a is being deleted"},
		{what: "the next", replicas: 3, surge: 1, machines: "b:vo c:vo d:v", want: "create 1"},
		{what: "no surge: first one goes", replicas: 3, surge: 0, machines: "a:vo b:vo c:vo", want: "remove a"},
		{what: "no surge: then one comes", replicas: 3, surge: 0, machines: "b:vo c:vo", want: "create 1"},
		{what: "no surge: it joins", replicas: 3, surge: 0, machines: "b:vo c:vo d:l", want: "wait", why: "d has not joined"},
		{what: "the marked one first", replicas: 3, surge: 0, machines: "a:vo b:vom c:vo", want: "remove b"},
		{what: "the new one hangs", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo d:-", want: "wait", why: "d has not joined"},
		{what: "the new one hung and the spec is mended", replicas: 3, surge: 1, machines: "a:vo b:vo c:vo d:-o", want: "remove d"},
		{what: "a mended spec that is the old one", replicas: 3, surge: 1, machines: "a:v b:v c:v d:-o", want: "remove d"},
		{what: "an outdated one that is dead goes first", replicas: 3, surge: 1, machines: "a:vo b:so c:vo", want: "remove b"},
		{what: "an outdated one that blinks is waited for", replicas: 3, surge: 1, machines: "a:vo b:uo c:vo", want: "wait", why: "b is not healthy"},
		{what: "two of three are dead", replicas: 3, surge: 1, machines: "a:vo b:so c:so", want: "wait"},
		{what: "one whose member has left", replicas: 3, surge: 1, machines: "a:v b:v c:x", want: "remove c"},
		{what: "scaled down in the middle", replicas: 1, surge: 1, machines: "a:vo b:vo c:v", want: "remove a"},
		{what: "scaled up in the middle", replicas: 5, surge: 1, machines: "a:vo b:vo c:v", want: "create 3"},
		{what: "a member has no machine and is ill", replicas: 1, surge: 1, machines: "a:v b:v c:v stray-x:u", want: "wait", why: "stray-x"},
	} {
		t.Run(c.what, func(t *testing.T) {
			got := makePlan(build(c.machines), wish{replicas: c.replicas, maxSurge: c.surge, initialized: !c.before})
			if got.String() != c.want || !strings.Contains(got.why, c.why) {
				t.Errorf("got %s (%s), want %s (%s)", got, got.why, c.want, c.why)
			}
		})
	}
}

// TestPlanUnknown: while nothing is known of etcd nothing is made and nothing goes.
func TestPlanUnknown(t *testing.T) {
	for _, machines := range []string{"a:v", "a:v b:v c:v d:v e:v", "a:vo b:vo c:vo", "a:vo b:-o", "a:v b:x", "a:vd"} {
		f := build(machines)
		f.unknown = "nobody knows"
		if got := makePlan(f, wish{replicas: 3, maxSurge: 1, initialized: true}); got.acts() {
			t.Errorf("%s: %s", machines, got)
		}
		if got := makePlan(build("a:v"), wish{replicas: 1, maxSurge: 1, initialized: true}); got.String() != "nothing" {
			t.Error(got)
		}
	}
}

// TestPlanExternalEtcd: no quorum to keep, but an API server, and what is not known to be there may be.
func TestPlanExternalEtcd(t *testing.T) {
	for _, c := range []struct {
		what     string
		replicas int
		unknown  string
		machines string
		want     string
	}{
		{"one is missing", 2, "", "a:-v", "create 1"},
		{"none has ever served", 2, "", "a:-o b:-o", "remove a"},
		{"one too many", 1, "", "a: b:", "remove a"},
		{"one too many, one is dead", 1, "", "a: b:a", "remove b"},
		{"surge and one is missing", 3, "", "a:o b:o", "create 2"},
		{"the new one serves", 2, "", "a:o b:o c:", "remove a"},
		{"the new one is dead", 2, "", "a:o b:o c:a", "wait"},
		{"the new one hung and the spec is mended", 1, "", "a:o b:-o", "remove b"},
		{"rollout, nobody can be asked", 1, "there is no connection", "a:Ao b:A", "wait"},
		{"rollout of three, nobody can be asked", 3, "there is no connection", "a:Ao b:Ao c:Ao d:A", "wait"},
		{"rollout, nothing is known of the old ones yet", 2, "", "a:Ao b:Ao c:", "wait"},
		{"rollout, nothing is known of an old one yet, and the others are enough", 2, "", "a:o b:Ao c:", "remove b"},
		{"rollout, nobody can be asked, and none has served before", 2, "there is no connection", "a:-o b:-o", "create 1"},
		{"rollout, all have been away with their etcd", 2, "", "a:ao b:ao c:a", "wait"},
		{"rollout, an old one is dead", 2, "", "a:o b:ao c:", "remove b"},
		{"one too many, nothing is known of the others yet", 2, "", "a:A b: c:A", "wait"},
	} {
		f := build(c.machines)
		f.stacked, f.unknown = false, c.unknown
		if got := makePlan(f, wish{replicas: c.replicas, maxSurge: 1, initialized: true}); got.String() != c.want {
			t.Errorf("%s, %d of %q: got %s (%s), want %s", c.what, c.replicas, c.machines, got, got.why, c.want)
		}
	}
}

// TestUnsafe: the quorum is projected, and what is unknown is not healthy.
func TestUnsafe(t *testing.T) {
	for _, c := range []struct{ machines, leaves, want string }{
		{"a:v b:v c:v", "a", ""},
		{"a:v b:v c:u", "c", ""},
		{"a:v b:v c:u", "a", "of the 2 other voting members 1 are healthy"},
		{"a:v b:v c:?", "a", "of the 2 other voting members 1 are healthy"},
		{"a:v b:u c:u", "c", "no quorum: 1 of 3"},
		{"a:v b:v", "a", ""},
		{"a:v b:u", "b", "no quorum"},
		{"a:v", "a", "the last voting member"},
		{"a:v b:l", "a", "the last voting member"},
		{"a:v b:l", "b", ""},
		{"a:u b:n", "b", "no quorum"},
		{"a:v b:v c:v d:u e:v", "a", ""},
		{"a:v b:v c:v d:u e:u", "d", ""},
		{"a:v b:v c:v d:u e:u", "a", "are needed"},
		{"a:v b:v c:vb", "a", "c is leaving"},
		{"a:v b:v c:vb", "c", ""},
		{"a:u b:v c:vb", "a", ""},
		{"a:? b:v c:vb", "a", "c is leaving"},
		{"a:u b:v c:ub", "a", "c is leaving"},
		{"a:v b:v stray-x:u", "stray-x", ""},
		{"a:v b:v stray-x:u", "a", "of the 2 other"},
	} {
		got := build(c.machines).unsafe(c.leaves)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s leaves %s: got %q, want %q", c.leaves, c.machines, got, c.want)
		}
	}
}

// TestVictim: the same Machines always give the same victim, and its failure domain counts (CP-16).
func TestVictim(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "x"}, {Name: "y"}}
	for _, c := range []struct{ machines, in, want string }{
		{"a:v b:v c:v", "x y y", "b"},
		{"a:v b:v c:v", "y y x", "a"},
		{"a:v b:v c:v", "x y gone", "c"},
		{"a:v b:v c:vm", "y y x", "c"},
		{"a:v b:vo c:vm", "y y x", "c"},
		{"a:vm b:vom c:v", "y y x", "b"},
		{"a:v b:v c:vo", "y y x", "c"},
		{"a:v b:v c:vf", "y y x", "c"},
		{"a:vo b:vo c:u", "y y x", "a"},
	} {
		f := build(c.machines)
		for n, domain := range strings.Fields(c.in) {
			f.instances[n].machine.Spec.FailureDomain = domain
		}
		if got := f.victim(f.active(), domains); got.name() != c.want {
			t.Errorf("%s in %s: got %s, want %s", c.machines, c.in, got.name(), c.want)
		}
	}
}

// TestPlace (CP-16): the fewest Machines that stay, then the fewest, then the name.
func TestPlace(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "z"}, {Name: "x"}, {Name: "y"}}
	for _, c := range []struct{ machines, in, want string }{
		{"", "", "x"}, {"a:v", "x", "y"}, {"a:v b:v", "x y", "z"}, {"a:v b:v c:v", "x y z", "x"},
		{"a:vo b:v c:v", "x y z", "x"}, {"a:vo b:vo c:v", "x x y", "z"}, {"a:v b:vd", "x y", "z"}, {"a:v", "gone", "x"},
	} {
		var machines []*clusterv1.Machine
		old := map[string][]string{}
		f := build(c.machines)
		for n, domain := range strings.Fields(c.in) {
			f.instances[n].machine.Spec.FailureDomain = domain
			machines = append(machines, f.instances[n].machine)
			old[f.instances[n].name()] = f.instances[n].outdated
		}
		if got := place(domains, machines, old); got != c.want {
			t.Errorf("%s in %s: got %s, want %s", c.machines, c.in, got, c.want)
		}
	}
	if place(nil, nil, nil) != "" {
		t.Error("a domain where there is none")
	}
}

// TestDepart: a Machine goes once its member has left, and that leaves when the others can do without.
func TestDepart(t *testing.T) {
	for _, c := range []struct {
		machines string
		before   bool
		want     departure
		why      string
	}{
		{machines: "z:vd a:v b:v", want: stay},
		{machines: "z:vh a:v b:v", want: askToLeave},
		{machines: "z:vhb a:v b:v", want: stay, why: "is leaving"},
		{machines: "z:xh a:v b:v", want: letGo},
		{machines: "z:-h a:v b:v", want: letGo},
		{machines: "z:lh a:v", want: askToLeave},
		{machines: "z:uh a:v b:v", want: askToLeave},
		{machines: "z:vh a:u b:v", want: stay, why: "lose its quorum"},
		{machines: "z:vh", want: stay, why: "the last voting member"},
		{machines: "z:vh a:l", want: stay, why: "the last voting member"},
		{machines: "z:vh a:v", want: askToLeave},
		{machines: "z:vh a:vhb b:v", want: stay, why: "a is leaving"},
		{machines: "z:ih a:v b:v", want: letGo},
		{machines: "z:ih a:v b:v stray-x:v", want: letGo},
		{machines: "z:ih a:v stray-x:v stray-y:v", want: stay, why: "no quorum"},
		{machines: "z:-h", before: true, want: letGo},
	} {
		f := build(c.machines)
		if c.machines == "z:ih a:v stray-x:v stray-y:v" {
			f.strays[0].health, f.strays[1].health = metav1.ConditionFalse, metav1.ConditionFalse
		}
		if got, why := depart(f, f.find("z"), !c.before); got != c.want || !strings.Contains(why, c.why) {
			t.Errorf("%s: got %s (%s), want %s (%s)", c.machines, got, why, c.want, c.why)
		}
	}
	f := build("z:vh a:v b:v")
	f.instances[0].machine.Annotations[clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/other"] = ""
	if got, why := depart(f, f.find("z"), true); got != stay || !strings.Contains(why, "another pre-terminate hook") {
		t.Error("ours is not the last hook", got, why)
	}
	f.unknown = "nobody knows"
	delete(f.instances[0].machine.Annotations, clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/other")
	if got, _ := depart(f, f.find("z"), true); got != stay {
		t.Error("goes while nothing is known", got)
	}
	f.stacked = false
	if got, _ := depart(f, f.find("z"), true); got != letGo {
		t.Error("an external etcd keeps the Machine", got)
	}
}

// TestRepair: which unhealthy Machine is replaced, and when (CP-10).
func TestRepair(t *testing.T) {
	now := time.Unix(100000, 0)
	after := func(age time.Duration, retries int) string {
		return fmt.Sprintf(`{"machine":"former","timestamp":%q,"retryCount":%d}`, now.Add(-age).UTC().Format(time.RFC3339), retries)
	}
	retries := func(n int32) controlplanev1.RemediationSpec {
		return controlplanev1.RemediationSpec{MaxRetry: &n, RetryPeriodSeconds: ptr.To[int32](600)}
	}
	for _, c := range []struct {
		what     string
		machines string
		before   bool
		spec     controlplanev1.RemediationSpec
		history  string
		open     *record
		machine  string
		act      bool
		message  string
		again    time.Duration
		count    int32
	}{
		{what: "healthy", machines: "a:v b:v c:v"},
		{what: "one of three", machines: "a:v b:v z:uf", machine: "z", act: true},
		{what: "one of three that still votes", machines: "a:v b:v z:vf", machine: "z", act: true},
		{what: "two of three", machines: "a:v b:uf z:uf", machine: "b", message: "no quorum"},
		{what: "two of five", machines: "a:v b:v c:v y:uf z:uf", machine: "y", act: true},
		{what: "another one blinks", machines: "a:v b:u z:uf", machine: "z", message: "no quorum"},
		{what: "not known", machines: "a:v b:? z:vf", machine: "z", message: "lose its quorum"},
		{what: "one at a time", machines: "a:v b:vd z:uf", machine: "z", message: "b is being deleted"},
		{what: "one that leaves waits for it", machines: "a:v b:vhb z:uf", machine: "z", act: true},
		{what: "one that leaves does not wait for it", machines: "a:v b:vhb z:vf", machine: "z", message: "b is being deleted"},
		{what: "another one is starting", machines: "a:v b:v c:l z:uf", machine: "z", message: "c is still starting"},
		{what: "it has not joined itself", machines: "a:v b:v z:-f", machine: "z", act: true},
		{what: "no API server would be left", machines: "a:va b:va z:vf", machine: "z", message: "no other Machine has an API server"},
		{what: "the only one, whose node is ill", machines: "z:vf", machine: "z", act: true},
		{what: "the only one, dead", machines: "z:uf", machine: "z", message: "the only control plane machine"},
		{what: "before there is data", machines: "z:-f", before: true, machine: "z", act: true},
		{what: "what has not joined first", machines: "a:v b:v c:v y:uf z:-f", machine: "z", act: true},
		{what: "a replacement, soon after", machines: "a:v b:v z:uf", history: after(5*time.Minute, 0), spec: retries(3), machine: "z", message: "retryPeriodSeconds are not over", again: 5 * time.Minute, count: 1},
		{what: "a replacement, later", machines: "a:v b:v z:uf", history: after(15*time.Minute, 1), spec: retries(3), machine: "z", act: true, count: 2},
		{what: "a replacement too many", machines: "a:v b:v z:uf", history: after(15*time.Minute, 3), spec: retries(3), machine: "z", message: "3 replacements have failed", count: 4},
		{what: "no retries", machines: "a:v b:v z:uf", history: after(15*time.Minute, 0), spec: retries(0), machine: "z", message: "maxRetry", count: 1},
		{what: "long after", machines: "a:v b:v z:uf", history: after(2*time.Hour, 3), spec: retries(3), machine: "z", act: true},
		{what: "the one before has no replacement yet", machines: "a:v z:vf", open: &record{Machine: "gone"}, machine: "z", message: "gone was repaired, and its replacement is not made yet"},
		{what: "the one before has no replacement yet, and a dead member keeps it from being made", machines: "a:v b:v c:v z:uf", open: &record{Machine: "gone"}, machine: "z", act: true},
		{what: "the one before has no replacement yet, and the majority needs it", machines: "a:v z:uf", open: &record{Machine: "gone"}, machine: "z", message: "no quorum"},
		{what: "it was written down and not done", machines: "a:v b:v z:vf", open: &record{Machine: "z"}, machine: "z", act: true},
		{what: "history that somebody spoilt", machines: "a:v b:v z:uf", history: "{", spec: retries(0), machine: "z", act: true},
	} {
		t.Run(c.what, func(t *testing.T) {
			f := build(c.machines)
			if c.history != "" {
				f.find("z").machine.Annotations[controlplanev1.RemediationForAnnotation] = c.history
			}
			got := planRepair(f, c.spec, !c.before, c.open, now)
			if c.machine == "" {
				if got.machine != nil {
					t.Error("repairs", got.machine.name())
				}
				return
			}
			if got.machine == nil || got.machine.name() != c.machine || got.act != c.act || !strings.Contains(got.message, c.message) || got.again != c.again || got.record.Retries != c.count {
				t.Errorf("got %+v", got)
			}
			if !got.act && got.reason == "" {
				t.Error("no reason is given")
			}
		})
	}
}
