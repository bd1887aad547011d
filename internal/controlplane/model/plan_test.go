package model

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func (p Plan) String() string {
	switch {
	case p.Create > 0 && p.First:
		return fmt.Sprintf("first %d", p.Create)
	case p.Create > 0:
		return fmt.Sprintf("create %d", p.Create)
	case p.Remove != nil:
		return "remove " + p.Remove.Name
	case p.Update != nil:
		return "update " + p.Update.Name()
	case p.Why != "":
		return "wait"
	}
	return "nothing"
}

// TestPlan (CP-03, CP-04, CP-18, CP-20): the next step of scaling and rollouts.
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
		{what: "all are gone", replicas: 1, surge: 1, want: "wait", why: "all control plane machines and the cluster"},

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
		{what: "the last one waits for a new one that hangs", replicas: 1, surge: 1, machines: "a:vd b:-", want: "wait", why: "a is being deleted"},
		{what: "the last one waits for a new one that hung, and the spec is mended", replicas: 1, surge: 1, machines: "a:vd b:-o", want: "remove b"},
		{what: "the last one waits for a new one that hung as a learner, and the spec is mended", replicas: 1, surge: 1, machines: "a:vd b:lo", want: "remove b"},
		{what: "the last one waits for a new one whose member has left", replicas: 1, surge: 1, machines: "a:vd b:x", want: "remove b"},
		{what: "the new one goes, and another one joins before the last one leaves", replicas: 1, surge: 1, machines: "a:vd b:-od", want: "create 1"},
		{what: "the last one is dead, and nothing replaces it", replicas: 1, surge: 1, machines: "a:ud b:-o", want: "wait", why: "a is being deleted"},
		{what: "the last one waits for an outdated one that has joined", replicas: 1, surge: 1, machines: "a:vd b:vo", want: "wait", why: "a is being deleted"},
		{what: "the last one waits for one that may have joined under a name that is not known", replicas: 1, surge: 1, machines: "a:vd b:io stray-x:v", want: "wait", why: "a is being deleted"},
		{what: "all of three are deleted, and one of the new ones hung", replicas: 3, surge: 1, machines: "a:vd b:- c:-o d:-o", want: "remove c"},

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
		{what: "an outdated one that is dead goes first, because the new one cannot be added", replicas: 3, surge: 1, machines: "a:so b:vo c:vo d:-", want: "remove a"},
		{what: "an outdated one that is dead goes first, because the new one cannot start", replicas: 3, surge: 1, machines: "a:so b:vo c:vo d:n", want: "remove a"},
		{what: "the new one is a learner already and needs no removal", replicas: 3, surge: 1, machines: "a:so b:vo c:vo d:l", want: "wait", why: "d has not joined"},
		{what: "an outdated one blinks before the new one joins", replicas: 3, surge: 1, machines: "a:uo b:vo c:vo d:-", want: "wait", why: "d has not joined"},
		{what: "a healthy one waits for the new one", replicas: 3, surge: 1, machines: "a:vom b:vo c:vo d:n", want: "wait", why: "d has not joined"},
		{what: "an outdated one is dead, and another one blinks", replicas: 3, surge: 1, machines: "a:so b:uo c:vo d:-", want: "wait", why: "b is not healthy"},
		{what: "an outdated one is dead, and the API server of another one is", replicas: 3, surge: 1, machines: "a:so b:vao c:vo d:-", want: "wait", why: "API server of Machine b"},
		{what: "one of two is dead", replicas: 1, surge: 1, machines: "a:so b:v c:-", want: "wait", why: "no quorum"},
		{what: "two of three are dead, and one boots", replicas: 3, surge: 1, machines: "a:so b:so c:vo d:-", want: "wait", why: "not healthy"},
		{what: "one too many is dead, and others boot", replicas: 3, surge: 1, machines: "a:v b:v c:s d:- e:n", want: "remove c"},
		{what: "two of three are dead", replicas: 3, surge: 1, machines: "a:vo b:so c:so", want: "wait"},
		{what: "one whose member has left", replicas: 3, surge: 1, machines: "a:v b:v c:x", want: "remove c"},
		{what: "scaled down in the middle", replicas: 1, surge: 1, machines: "a:vo b:vo c:v", want: "remove a"},
		{what: "the new one finds no place, and the surge is given up", replicas: 3, surge: 0, machines: "a:vo b:vo c:vo d:-", want: "remove d"},
		{what: "the new one finds no place, and the control plane is scaled down", replicas: 1, surge: 1, machines: "a:vo b:vo c:vo d:-", want: "remove d"},
		{what: "the new one has joined, and the surge is given up", replicas: 3, surge: 0, machines: "a:vo b:vo c:vo d:v", want: "remove a"},
		{what: "the new one finds no place, and another one is marked", replicas: 3, surge: 0, machines: "a:vom b:vo c:vo d:-", want: "wait", why: "d has not joined"},
		{what: "scaled up in the middle", replicas: 5, surge: 1, machines: "a:vo b:vo c:v", want: "create 3"},
		{what: "another encryption, no surge: nothing goes", replicas: 3, surge: 0, machines: "a:voE b:voE c:voE", want: "wait", why: "former encryption setting"},
		{what: "a member has no machine and is ill", replicas: 1, surge: 1, machines: "a:v b:v c:v stray-x:u", want: "wait", why: "stray-x"},
	} {
		t.Run(c.what, func(t *testing.T) {
			got := PlanMachines(build(c.machines), Target{Replicas: c.replicas, maxSurge: c.surge, initialized: !c.before})
			if got.String() != c.want || !strings.Contains(got.Why, c.why) {
				t.Errorf("got %s (%s), want %s (%s)", got, got.Why, c.want, c.why)
			}
		})
	}
}

// TestPlanWithVolumes: a Machine whose volumes its successor needs goes first. The only Machine cannot, so the message has a remedy.
func TestPlanWithVolumes(t *testing.T) {
	for _, c := range []struct {
		replicas       int
		machines, want string
		why            string
	}{
		{replicas: 3, machines: "a:vo b:vo c:vo", want: "remove a"},
		{replicas: 3, machines: "b:vo c:vo", want: "create 1"},
		{replicas: 3, machines: "b:vo c:vo d:l", want: "wait", why: "d has not joined"},
		{replicas: 1, machines: "a:vo", want: "wait", why: "Set spec.replicas to 3"},
		{replicas: 3, machines: "a:vo", want: "create 2"},
		{replicas: 1, machines: "a:vo b:v", want: "remove a"},
	} {
		got := PlanMachines(build(c.machines), Target{Replicas: c.replicas, maxSurge: 1, initialized: true, inherits: true})
		if got.String() != c.want || !strings.Contains(got.Why, c.why) {
			t.Errorf("%d of %s: got %s (%s), want %s (%s)", c.replicas, c.machines, got, got.Why, c.want, c.why)
		}
	}
}

// TestLeavesVolumes: only volumes that the template has too are left to a successor, and only those of outdated Machines matter.
func TestLeavesVolumes(t *testing.T) {
	with := func(names ...string) (spec infrav1.CapstanMachineSpec) {
		for _, name := range names {
			spec.Volumes = append(spec.Volumes, infrav1.MachineVolume{Name: name})
		}
		return spec
	}
	machine := func(names ...string) *infrav1.CapstanMachine { return &infrav1.CapstanMachine{Spec: with(names...)} }
	for name, c := range map[string]struct {
		parts Parts
		want  bool
	}{
		"another template with one of them": {Parts{InfraMachine: machine("data", "logs"), Desired: ptr.To(with("logs"))}, true},
		"another template with others":      {Parts{InfraMachine: machine("data"), Desired: ptr.To(with("logs"))}, false},
		"another template with none":        {Parts{InfraMachine: machine("data"), Desired: ptr.To(with())}, false},
		"a machine without volumes":         {Parts{InfraMachine: machine(), Desired: ptr.To(with("data"))}, false},
		"the same template":                 {Parts{InfraMachine: machine("data")}, true},
		"another provider's template":       {Parts{InfraMachine: machine("data"), Foreign: true}, false},
	} {
		if got := c.parts.LeavesVolumes(); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	cp := &ControlPlane{Object: &controlplanev1.CapstanControlPlane{}, Cluster: &clusterv1.Cluster{}, Volumes: map[string]bool{"a": true}}
	for outdated, want := range map[string]bool{"a": true, "b": false} {
		cp.Outdated = map[string][]string{"a": nil, outdated: {"another version"}}
		if got := cp.Target().inherits; got != want {
			t.Errorf("%s is outdated: %v", outdated, got)
		}
	}
}

// TestPlanUnknown: while the state of etcd is unknown, no Machine is created or removed.
func TestPlanUnknown(t *testing.T) {
	for _, machines := range []string{"a:v", "a:v b:v c:v d:v e:v", "a:vo b:vo c:vo", "a:vo b:-o", "a:v b:x", "a:vd", "a:vd b:-o"} {
		f := build(machines)
		f.Unknown = "nobody knows"
		if got := PlanMachines(f, Target{Replicas: 3, maxSurge: 1, initialized: true}); got.Acts() {
			t.Errorf("%s: %s", machines, got)
		}
		if got := PlanMachines(build("a:v"), Target{Replicas: 1, maxSurge: 1, initialized: true}); got.String() != "nothing" {
			t.Error(got)
		}
	}
}

// TestPlanExternalEtcd: with external etcd, at least one API server must remain. A Machine of unknown state counts as existing.
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
		{"the old one goes, and the only other one remains", 1, "", "a:d b:-o", "wait"},
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
		f.Stacked, f.Unknown = false, c.unknown
		if got := PlanMachines(f, Target{Replicas: c.replicas, maxSurge: 1, initialized: true}); got.String() != c.want {
			t.Errorf("%s, %d of %q: got %s (%s), want %s", c.what, c.replicas, c.machines, got, got.Why, c.want)
		}
	}
}
