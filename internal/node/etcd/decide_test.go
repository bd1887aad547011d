package etcd

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

var (
	noon    = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	errDead = errors.New("no answer")
)

const leaderID = 1

// voter is a healthy voting member.
func voter(id uint64, name string) Member {
	ip := "10.0.0." + string(rune('0'+id))
	return Member{
		ID: id, Name: name, PeerURLs: []string{"https://" + ip + ":2380"}, ClientURLs: []string{"https://" + ip + ":2379"},
		Probe: Probe{Leader: leaderID, Size: 20 << 20, InUse: 10 << 20, Quota: 2 << 30, Revision: 100},
	}
}

func with(m Member, change func(*Member)) Member { change(&m); return m }

func dead(m Member) Member { return with(m, func(m *Member) { m.Probe = Probe{Err: errDead} }) }

func learner(m Member) Member { return with(m, func(m *Member) { m.Learner = true }) }

func unstarted(m Member) Member {
	return with(m, func(m *Member) { m.Name, m.ClientURLs, m.Learner, m.Err = "", nil, true, errNotProbed })
}

// object is the EtcdMember of a member; leave sets spec.leave.
func object(m Member, name string, leave bool, conditions ...string) etcdv1.EtcdMember {
	o := etcdv1.EtcdMember{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: etcdv1.EtcdMemberSpec{PeerURL: m.PeerURLs[0], Leave: leave}}
	for _, c := range conditions {
		kind, status, _ := strings.Cut(c, "=")
		o.Status.Conditions = append(o.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionStatus(status)})
	}
	return o
}

func viewOf(members []Member, objects ...etcdv1.EtcdMember) view {
	v := view{now: noon, self: leaderID, members: members, objects: map[string]etcdv1.EtcdMember{}, memory: memory{
		unstarted: map[uint64]time.Time{}, approved: map[string]time.Time{}, failing: map[uint64]time.Time{}, learning: map[uint64]time.Time{}, defragments: map[uint64]time.Time{},
	}}
	for _, o := range objects {
		v.objects[o.Name] = o
	}
	return v
}

const (
	mayLeave = etcdv1.LeavingCondition + "=True"
	stopped  = etcdv1.ServingCondition + "=False"
)

func TestDecide(t *testing.T) {
	a, b, c := voter(1, "a"), voter(2, "b"), voter(3, "c")
	full := func(m Member) Member {
		return with(m, func(m *Member) { m.Alarms, m.Quota, m.Revision = []string{alarmNoSpace}, m.Size, 100 })
	}
	wasteful := func(m Member) Member { return with(m, func(m *Member) { m.Size, m.InUse = 400<<20, 100<<20 }) }
	for _, test := range []struct {
		name   string
		v      view
		change func(*view)
		want   string
	}{
		{"all members are healthy", viewOf([]Member{a, b, c}, object(a, "a", false), object(b, "b", false), object(c, "c", false)), nil, ""},

		// Joining.
		{"a new learner promotes itself", viewOf([]Member{a, learner(b)}, object(b, "b", false)), func(v *view) { v.learning[2] = noon }, ""},
		{"the leader promotes a learner after a while", viewOf([]Member{a, learner(b)}, object(b, "b", false)), func(v *view) { v.learning[2] = noon.Add(-promoteAfter) }, "promote learner b"},
		{"an unreachable learner is not promoted", viewOf([]Member{a, dead(learner(b))}, object(b, "b", false)), nil, ""},
		{"a leaving learner is removed", viewOf([]Member{a, learner(b)}, object(b, "b", true)), nil, "remove member b"},

		// Never started.
		{"an unstarted member with an object stays", viewOf([]Member{a, unstarted(b)}, object(b, "b", false)), func(v *view) { v.unstarted[2] = noon.Add(-time.Hour) }, ""},
		{"a leaving unstarted member is removed", viewOf([]Member{a, unstarted(b)}, object(b, "b", true)), func(v *view) { v.unstarted[2] = noon }, "remove member 2"},
		{"a new unstarted member without an object stays", viewOf([]Member{a, unstarted(b)}), func(v *view) { v.unstarted[2] = noon.Add(-unstartedTimeout + time.Second) }, ""},
		{"an old unstarted member without an object is removed", viewOf([]Member{a, unstarted(b)}), func(v *view) { v.unstarted[2] = noon.Add(-unstartedTimeout) }, "remove member 2"},
		{
			"an address that a machine has which left before", viewOf([]Member{a, unstarted(b)}, object(b, "b-old", true), object(b, "b-new", false)),
			func(v *view) { v.unstarted[2] = noon.Add(-time.Hour) }, "",
		},

		// Leaving.
		{"a leaving member is first approved", viewOf([]Member{a, b, c}, object(b, "b", true)), nil, ""},
		{"an approved member has time to stop its API server", viewOf([]Member{a, b, c}, object(b, "b", true, mayLeave)), func(v *view) { v.approved["b"] = noon.Add(-time.Second) }, ""},
		{"a member whose API server stopped is removed", viewOf([]Member{a, b, c}, object(b, "b", true, mayLeave, stopped)), nil, "remove member b"},
		{"a member is removed after the stop timeout", viewOf([]Member{a, b, c}, object(b, "b", true, mayLeave)), func(v *view) { v.approved["b"] = noon.Add(-stopTimeout) }, "remove member b"},
		{"a leaving leader moves the leadership", viewOf([]Member{a, b, c}, object(a, "a", true), object(b, "b", false)), nil, "move leadership b"},
		{"the leadership does not move to a leaving member", viewOf([]Member{a, b, c}, object(a, "a", true, mayLeave), object(b, "b", true)), nil, "move leadership c"},
		{"the leadership does not move to an unhealthy member", viewOf([]Member{a, dead(b), c, voter(4, "d")}, object(a, "a", true)), nil, "move leadership c"},
		{"a dead leaving member is removed at once", viewOf([]Member{a, dead(b), c}, object(b, "b", true)), nil, "remove member b"},
		{"dead leaving members are removed first", viewOf([]Member{a, b, dead(c)}, object(b, "b", true, mayLeave, stopped), object(c, "c", true)), nil, "remove member c"},
		{"a dead member stays without spec.leave", viewOf([]Member{a, dead(b), c}, object(b, "b", false)), nil, ""},
		{"two leaving members are removed in turn", viewOf([]Member{a, b, c}, object(b, "b", true), object(c, "c", true, mayLeave, stopped)), nil, "remove member c"},
		{"no removal if the others have no quorum", viewOf([]Member{a, dead(b), c}, object(c, "c", true, mayLeave, stopped)), nil, ""},
		{"no removal of one of two if the other is unhealthy", viewOf([]Member{a, dead(b)}, object(a, "a", true)), nil, ""},
		{"the last member stays", viewOf([]Member{a}, object(a, "a", true, mayLeave, stopped)), nil, ""},
		{"the last voter stays beside a learner", viewOf([]Member{a, dead(learner(b))}, object(a, "a", true)), nil, ""},
		{"a member with another leader is not healthy", viewOf([]Member{a, with(b, func(m *Member) { m.Leader = 9 }), c}, object(c, "c", true, mayLeave, stopped)), nil, ""},

		// Care.
		{"little free space in a small file", viewOf([]Member{with(a, func(m *Member) { m.Size, m.InUse = 100<<20, 10<<20 })}), nil, ""},
		{"little free space in a large file", viewOf([]Member{with(a, func(m *Member) { m.Size, m.InUse = 1000<<20, 600<<20 })}), nil, ""},
		{"much free space", viewOf([]Member{wasteful(a)}), nil, "defragment a"},
		{"the leader is defragmented last", viewOf([]Member{wasteful(a), b, wasteful(c)}), nil, "defragment c"},
		{"the leader is defragmented after the others", viewOf([]Member{wasteful(a), b, wasteful(c)}), func(v *view) { v.defragments[3] = noon.Add(-time.Minute) }, "defragment a"},
		{"no defragmentation beside a learner", viewOf([]Member{wasteful(a), dead(learner(b))}), nil, ""},
		{"no defragmentation beside an unhealthy member", viewOf([]Member{wasteful(a), b, dead(c)}), nil, ""},
		{"out of space: compact the history first", viewOf([]Member{full(a), b, c}), nil, "compact history a"},
		{"out of space: defragment after the compaction, whatever is in use", viewOf([]Member{full(a), b, c}), func(v *view) {
			v.members[0].InUse, v.compacted, v.compactedRevision, v.defragments[1] = v.members[0].Size, noon.Add(-time.Second), 100, noon.Add(-time.Hour)
		}, "defragment a"},
		{"space is free again: disarm the alarm", viewOf([]Member{full(a), b, c}), func(v *view) {
			v.compacted, v.compactedRevision, v.defragments[1], v.members[0].Quota = noon.Add(-time.Second), 100, noon, 2*v.members[0].Size
		}, "disarm alarm a"},
		{"out of space: nothing can be freed", viewOf([]Member{full(a), b, c}), func(v *view) {
			v.compacted, v.compactedRevision, v.defragments[1] = noon.Add(-time.Hour), 100, noon
		}, ""},
		{"out of space: objects were deleted since", viewOf([]Member{full(a), b, c}), func(v *view) {
			v.compacted, v.compactedRevision, v.defragments[1] = noon.Add(-compactEvery), 99, noon
		}, "compact history a"},
		{"out of space: the member was removed, or is from before a restore", viewOf([]Member{a, b, c}), func(v *view) { v.former = []Member{{ID: 9}} }, "disarm alarm 9"},
		{"out of space: the member did not answer once", viewOf([]Member{a, full(dead(b)), c}), func(v *view) { v.failing[2] = noon }, ""},
		{"out of space: the member does not answer", viewOf([]Member{a, full(dead(b)), c}), func(v *view) { v.failing[2] = noon.Add(-unreachableAfter) }, "disarm alarm b"},
		{"out of space: no second compaction at once", viewOf([]Member{full(a), b, c}), func(v *view) {
			v.compacted, v.compactedRevision, v.defragments[1] = noon.Add(-time.Second), 99, noon
		}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.change != nil {
				test.change(&test.v)
			}
			got := decide(test.v)
			name := got.member.Name
			if name == "" && got.kind != actNone {
				name = hexID(got.member.ID)
			}
			if text := strings.TrimSpace(string(got.kind) + " " + name); text != test.want {
				t.Errorf("got %q (%s), want %q", text, got.why, test.want)
			}
		})
	}
}

// An approved member stays the next one to leave, even if other members ask later.
func TestLeaversInTurn(t *testing.T) {
	a, b, c := voter(1, "a"), voter(2, "b"), voter(3, "c")
	v := viewOf([]Member{a, b, c}, object(a, "a", true), object(b, "b", true), object(c, "c", true, mayLeave))
	var names []string
	for _, m := range v.leavers() {
		names = append(names, m.Name)
	}
	if diff := cmp.Diff([]string{"c", "b", "a"}, names); diff != "" {
		t.Error(diff)
	}
	for _, m := range []Member{a, b} {
		if d := v.departure(m); d.reason != etcdv1.QuorumAtRiskReason || !strings.Contains(d.message, "c is the next") {
			t.Errorf("%s: %+v", m.Name, d)
		}
	}
}

func TestStatus(t *testing.T) {
	a, b := voter(1, "a"), voter(2, "b")
	for _, test := range []struct {
		name string
		v    view
		o    string
		want map[string]string // by type of condition: status and reason
	}{
		{"leader", viewOf([]Member{a, b}, object(a, "a", false)), "a", map[string]string{"Joined": "True Voting", "Healthy": "True Healthy"}},
		{"learner", viewOf([]Member{a, learner(b)}, object(b, "b", false)), "b", map[string]string{"Joined": "False Learner", "Healthy": "True Healthy"}},
		{"added", viewOf([]Member{a, unstarted(b)}, object(b, "b", false)), "b", map[string]string{"Joined": "False NotStarted", "Healthy": "Unknown NotProbed"}},
		{"announced", viewOf([]Member{a}, object(b, "b", false)), "b", map[string]string{"Joined": "False NotStarted", "Healthy": "Unknown NotProbed"}},
		{"left", viewOf([]Member{a}, object(b, "b", true)), "b", map[string]string{"Joined": "False Left", "Healthy": "Unknown NotProbed"}},
		{"dead", viewOf([]Member{a, dead(b)}, object(b, "b", false)), "b", map[string]string{"Joined": "True Voting", "Healthy": "False Unreachable"}},
		{
			"alarm", viewOf([]Member{a, with(b, func(m *Member) { m.Alarms = []string{"CORRUPT"} })}, object(b, "b", false)), "b",
			map[string]string{"Joined": "True Voting", "Healthy": "False Alarm"},
		},
		{
			"astray", viewOf([]Member{a, with(b, func(m *Member) { m.Leader = 0 })}, object(b, "b", false)), "b",
			map[string]string{"Joined": "True Voting", "Healthy": "False NoLeader"},
		},
		{
			"the last one is to leave", viewOf([]Member{a}, object(a, "a", true)), "a",
			map[string]string{"Joined": "True Voting", "Healthy": "True Healthy", "Leaving": "False QuorumAtRisk"},
		},
		{
			"may leave", viewOf([]Member{a, b}, object(b, "b", true)), "b",
			map[string]string{"Joined": "True Voting", "Healthy": "True Healthy", "Leaving": "True Approved"},
		},
		{
			"leads, and is to leave", viewOf([]Member{a, b}, object(a, "a", true)), "a",
			map[string]string{"Joined": "True Voting", "Healthy": "True Healthy", "Leaving": "False MovingLeadership"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := test.v.objects[test.o]
			status := test.v.status(o)
			got := map[string]string{}
			for _, c := range status.Conditions {
				got[c.Type] = string(c.Status) + " " + c.Reason
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			// An unchanged status is not written again.
			o.Status = status
			if again := test.v.status(o); differs(o.Status, again) {
				t.Error(cmp.Diff(status, again))
			}
		})
	}
}

// A member stays Healthy after one failed probe. It becomes unhealthy when probes fail for a while.
func TestUnreachableForAWhile(t *testing.T) {
	a, b := voter(1, "a"), voter(2, "b")
	v := viewOf([]Member{a, b}, object(b, "b", false))
	o := v.objects["b"]
	o.Status = v.status(o)
	silent := viewOf([]Member{a, dead(b)}, o)
	silent.failing[2] = noon.Add(-time.Second)
	if differs(o.Status, silent.status(o)) {
		t.Error("the status changed after one failed probe")
	}
	if silent.healthy(silent.members[1]) {
		t.Error("a member with a failed probe counts for the quorum")
	}
	silent.failing[2] = noon.Add(-unreachableAfter)
	if !differs(o.Status, silent.status(o)) {
		t.Error("the status did not change although probes failed for a while")
	}
}

// While a member is busy, the others must be as healthy as they are reported.
func TestConfirmedBy(t *testing.T) {
	a, b, c := voter(1, "a"), voter(2, "b"), voter(3, "c")
	elsewhere := func(m Member) Member { return with(m, func(m *Member) { m.Leader = 2 }) }
	healthy := etcdv1.HealthyCondition + "=True"
	for name, test := range map[string]struct {
		before, later []Member
		busy          Member
		want          string
	}{
		"all answer":                        {[]Member{a, b, c}, []Member{a, b, c}, b, ""},
		"the busy member does not":          {[]Member{a, b, c}, []Member{a, dead(b), c}, b, ""},
		"the busy leader does not":          {[]Member{a, b, c}, []Member{dead(a), b, c}, a, ""},
		"another member died":               {[]Member{a, b, c}, []Member{a, b, dead(c)}, b, "answer of the member c"},
		"its death is not yet reported":     {[]Member{a, b, dead(c)}, []Member{a, b, dead(c)}, b, "answer of the member c"},
		"another member leads":              {[]Member{a, b, c}, []Member{elsewhere(a), b, c}, b, "the member a to follow the leader 1, found the leader 2"},
		"another one than the busy leader":  {[]Member{a, b, c}, []Member{a, elsewhere(b), c}, a, "the member b to follow"},
		"a member that has not started yet": {[]Member{a, b, unstarted(c)}, []Member{a, b, unstarted(c)}, b, ""},
	} {
		v := viewOf(test.before, object(a, "a", false, healthy), object(b, "b", false, healthy), object(c, "c", false, healthy))
		v.failing[c.ID] = noon
		if err := v.confirmedBy(test.later, test.busy); (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
	v := viewOf([]Member{a, b, dead(c)}, object(c, "c", false, healthy))
	v.failing[c.ID] = noon.Add(-unreachableAfter)
	if err := v.confirmedBy([]Member{a, b, dead(c)}, b); err != nil {
		t.Errorf("a member that is reported as unreachable: %v", err)
	}
}

func TestSizesAreRounded(t *testing.T) {
	size := rounded(nil, 5<<20+1)
	if *size != 6<<20 {
		t.Errorf("%d", *size)
	}
	for bytes, want := range map[int64]int64{5<<20 + 1: 6 << 20, 7<<20 - 1: 6 << 20, 7 << 20: 7 << 20, 1: 1 << 20} {
		if got := rounded(size, bytes); *got != want {
			t.Errorf("%d: %d, want %d", bytes, *got, want)
		}
	}
}

func TestNextStep(t *testing.T) {
	a, b := voter(1, "a"), voter(2, "b")
	both, part := data{any: true, whole: true}, data{any: true}
	for _, test := range []struct {
		name    string
		members []Member
		has     data
		want    stepKind
	}{
		{"new member", []Member{a}, data{}, stepAdd},
		{"removed while its machine was down", []Member{a}, both, stepErase},
		{"removed, and a part of its data is left", []Member{a}, part, stepErase},
		{"voter that lost a part of its data", []Member{a, b}, part, stepRemove},
		{"added, killed before etcd started", []Member{a, unstarted(b)}, data{}, stepStart},
		{"added, killed when etcd had just started", []Member{a, unstarted(b)}, both, stepStart},
		{"learner", []Member{a, learner(b)}, both, stepPromote},
		{"voter", []Member{a, b}, both, stepJoined},
		{"voter that lost its disk", []Member{a, b}, data{}, stepRemove},
		{"learner that lost its disk", []Member{a, learner(b)}, data{}, stepRemove},
		{"the member of a machine that had the address before", []Member{a, with(b, func(m *Member) { m.Name = "x" })}, data{}, stepRemove},
		{"the member of a machine that had the address before, with data", []Member{a, with(b, func(m *Member) { m.Name = "x" })}, both, stepRemove},
	} {
		if got := nextStep(test.members, "b", b.PeerURLs[0], test.has); got.kind != test.want {
			t.Errorf("%s: %s, want %s", test.name, got.kind, test.want)
		}
	}
}

// Machines that join at the same time start one after the other.
func TestFirstToStart(t *testing.T) {
	a, b, c := voter(1, "a"), voter(2, "b"), voter(3, "c")
	for _, test := range []struct {
		members []Member
		want    map[string]bool
	}{
		{[]Member{a, unstarted(b), unstarted(c)}, map[string]bool{"b": true, "c": false}},
		{[]Member{a, learner(b), unstarted(c)}, map[string]bool{"c": true}},
		{[]Member{a, unstarted(b)}, map[string]bool{"b": true}},
	} {
		for name, want := range test.want {
			m := map[string]Member{"b": b, "c": c}[name]
			if got := firstToStart(test.members, m.PeerURLs[0]); got != want {
				t.Errorf("%s of %+v: %v", name, test.members, got)
			}
		}
	}
}

func TestInitialCluster(t *testing.T) {
	got := initialCluster([]Member{voter(1, "a"), unstarted(voter(2, "")), unstarted(voter(3, ""))}, "c", "https://10.0.0.3:2380")
	if want := "2=https://10.0.0.2:2380,a=https://10.0.0.1:2380,c=https://10.0.0.3:2380"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestStopsWhatItServes(t *testing.T) {
	b := voter(2, "b")
	left := object(b, "b", true, etcdv1.JoinedCondition+"=False")
	left.Status.Conditions[0].Reason = etcdv1.LeftReason
	for want, o := range map[level]etcdv1.EtcdMember{
		nothing: object(b, "b", true, etcdv1.LeavingCondition+"=False"), serving: object(b, "b", true, mayLeave), everything: left,
	} {
		if got := toStop(o); got != want {
			t.Errorf("%+v: %v, want %v", o, got, want)
		}
	}
}
