package model

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// build returns a fleet from one word per Machine, the oldest first. A word is the name and these letters:
//
//	v voting and healthy    u voting, unhealthy   s voting, unhealthy for long   ? voting, health unknown
//	l learner               n member not started  - no member                    x its member has left
//	a its API server no longer answers          A the state of its API server is unknown
//	o outdated   d being deleted   h waits for the hook   m marked for deletion   b leaving etcd
//	f found unhealthy by a MachineHealthCheck   i known by no name yet
//	r must be Ready for some time   R has been Ready for this time
//	W outdated, the change can be made in place   N outdated, the change needs another machine
//	M an update is recorded and not written   P written, not accepted   C no capacity for it   U running   F failed   B rolled back   D done
//	L the host of the update, whose letter comes before, is lost
func build(words string) Fleet {
	f := Fleet{Stacked: true}
	for n, word := range strings.Fields(words) {
		name, letters, _ := strings.Cut(word, ":")
		if stray, ok := strings.CutPrefix(name, "stray-"); ok {
			f.Unassigned = append(f.Unassigned, *memberOf("stray-"+stray, letters))
			continue
		}
		f.Instances = append(f.Instances, anInstance(name, letters, n))
	}
	return f
}

func anInstance(name, letters string, n int) Instance {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(n), 0)), Annotations: map[string]string{
		controlplanev1.PreTerminateHookAnnotation: "",
	}}}
	m.Spec.Bootstrap.DataSecretName = ptr.To(name)
	i := Instance{Machine: m, names: []string{name}, apiServer: metav1.ConditionTrue, Member: memberOf(name, letters), hasServed: !strings.ContainsAny(letters, "ln-i")}
	for _, letter := range letters {
		update(&i, letter)
		switch letter {
		case 'a', 'l', 'n', '-', 'i':
			i.apiServer = metav1.ConditionFalse
		case 'A':
			i.apiServer = metav1.ConditionUnknown
		case 'o':
			i.Outdated = []string{"it is old"}
		case 'd', 'h':
			m.DeletionTimestamp = &metav1.Time{Time: time.Unix(1000, 0)}
		case 'E':
			i.otherEncryption = true
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

func update(i *Instance, letter rune) {
	phases := map[rune]infrav1.UpdatePhase{'M': "", 'P': "", 'C': "", 'U': infrav1.UpdateRunning, 'F': infrav1.UpdateFailed, 'B': infrav1.UpdateRolledBack, 'D': infrav1.UpdateSucceeded}
	phase, updates := phases[letter]
	switch {
	case letter == 'W':
		i.Changes = append(i.Changes, inplace.Change{Path: "spec.version", Verdict: inplace.Restart})
	case letter == 'L':
		i.Update.unattended = true
	case letter == 'N':
		i.Changes = append(i.Changes, inplace.Change{Path: "spec.config.preCommands", Verdict: inplace.Replace, Why: "it is so"})
	case !updates:
		return
	default:
		i.Update = &Update{Written: letter != 'M', begun: letter != 'M', Phase: phase, step: "kubelet", message: "busy"}
		if letter == 'C' {
			i.Update.refused = "the host has no memory"
		}
	}
	i.Outdated = []string{"it is old"}
}

func memberOf(name, letters string) *Member {
	if strings.ContainsAny(letters, "-i") {
		return nil
	}
	m := &Member{Name: name, voting: true, started: true, health: metav1.ConditionTrue}
	for _, letter := range letters {
		switch letter {
		case 'u':
			m.health = metav1.ConditionFalse
		case 's':
			m.health, m.unhealthyForLong = metav1.ConditionFalse, true
		case '?':
			m.health = metav1.ConditionUnknown
		case 'l', 'n':
			m.voting, m.started, m.health = false, letter == 'l', metav1.ConditionUnknown
		case 'x':
			m.voting, m.Left, m.Leave = false, true, true
		case 'b':
			m.Leave = true
		}
	}
	return m
}

// TestNewMember: a member has started when it receives the data.
func TestNewMember(t *testing.T) {
	for reason, want := range map[string]Member{
		"":                      {},
		etcdv1.NotStartedReason: {},
		etcdv1.LearnerReason:    {started: true},
		etcdv1.VotingReason:     {started: true, voting: true},
		etcdv1.LeftReason:       {Left: true},
	} {
		m := &etcdv1.EtcdMember{}
		if reason != "" {
			status := metav1.ConditionFalse
			if reason == etcdv1.VotingReason {
				status = metav1.ConditionTrue
			}
			m.Status.Conditions = []metav1.Condition{{Type: etcdv1.JoinedCondition, Status: status, Reason: reason}}
		}
		if got := newMember(m, true, time.Unix(0, 0)); got.started != want.started || got.voting != want.voting || got.Left != want.Left {
			t.Errorf("%q: %+v", reason, got)
		}
	}
}

// TestExpiryOfMember: a time that core cannot read in the annotation of a Machine counts as unknown.
func TestExpiryOfMember(t *testing.T) {
	last := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	for _, c := range []struct {
		at    time.Time
		known bool
	}{
		{last, true},
		{last.Add(time.Second).In(time.FixedZone("", -3600)), false},
		{time.Date(0, 12, 31, 23, 59, 59, 0, time.UTC), false},
	} {
		m := &etcdv1.EtcdMember{}
		m.Status.CertificatesExpire = &metav1.Time{Time: c.at}
		if got := newMember(m, true, time.Unix(0, 0)).CertificatesExpire; got.IsZero() == c.known {
			t.Errorf("%s: %s", c.at, got)
		}
	}
}

// TestNewFleet: members are assigned to Machines by the name of the Node or of the Machine. Other members are strays. They are
// orphans only if the names of all Machines are known.
func TestNewFleet(t *testing.T) {
	now := time.Unix(100000, 0)
	machine := func(name string, change func(*clusterv1.Machine)) *clusterv1.Machine {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name}}
		change(m)
		return m
	}
	machines := collections.FromMachines(
		machine("a", func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "node-a" }),
		machine("b", func(m *clusterv1.Machine) {
			m.Status.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineInternalIP, Address: "10.0.0.1"}, {Type: clusterv1.MachineHostName, Address: "host-b"}}
		}),
		machine("c", func(*clusterv1.Machine) {}),
	)
	member := func(name string, healthySince time.Duration, healthy metav1.ConditionStatus) etcdv1.EtcdMember {
		m := etcdv1.EtcdMember{ObjectMeta: metav1.ObjectMeta{Name: name}}
		m.Status.Conditions = []metav1.Condition{
			{Type: etcdv1.JoinedCondition, Status: metav1.ConditionTrue, Reason: etcdv1.VotingReason},
			{Type: etcdv1.HealthyCondition, Status: healthy, Reason: "Because", LastTransitionTime: metav1.NewTime(now.Add(-healthySince))},
		}
		return m
	}
	w := &Workload{Care: Renewal{now, true}, APIServers: map[string]Renewal{"node-a": {now, true}, "host-b": {now.Add(-time.Hour), true}}, Members: map[string]etcdv1.EtcdMember{
		"node-a": member("node-a", time.Hour, metav1.ConditionTrue), "host-b": member("host-b", 2*time.Minute, metav1.ConditionFalse), "x": member("x", time.Second, metav1.ConditionFalse),
	}}
	f := newFleet(machines, map[string][]string{"b": {"old"}}, true, w, now)
	a, b, c := f.Find("a"), f.Find("b"), f.Find("c")
	if !f.healthy(a) || f.healthy(b) || f.healthy(c) || !f.joined(b) || f.joined(c) || !b.Member.unhealthyForLong || a.Member.unhealthyForLong || len(b.Outdated) != 1 {
		t.Errorf("%+v", f)
	}
	if v := f.Votes(); v.Voting != 3 || v.Healthy != 1 || v.quorum() {
		t.Errorf("%+v", v)
	}
	if len(f.Unassigned) != 1 || f.Unassigned[0].Name != "x" || f.Unassigned[0].unhealthyForLong || len(f.Orphans()) != 1 {
		t.Errorf("strays %+v", f.Unassigned)
	}
	data := "c"
	c.Machine.Spec.Bootstrap.DataSecretName = &data
	if len(f.Orphans()) != 0 {
		t.Error("x may be c's member")
	}
	w.Care.At = now.Add(-time.Hour)
	if f = newFleet(machines, nil, true, w, now); f.healthy(f.Find("a")) || f.Votes().Healthy != 0 {
		t.Error("healthy long ago is not healthy")
	}
	if f = newFleet(machines, nil, false, w, now); len(f.Members()) != 0 || !f.healthy(f.Find("a")) {
		t.Error("an external etcd has members on Machines")
	}
	if f.healthy(f.Find("b")) || !f.joined(f.Find("b")) || f.joined(f.Find("c")) {
		t.Error("an API server that has served is not one that never came")
	}
	w.APIServers["node-a"] = Renewal{At: now}
	if f = newFleet(machines, nil, false, w, now); f.healthy(f.Find("a")) || !f.joined(f.Find("a")) || len(MachineHealth(f.Find("a"), f)) != 0 {
		t.Error("something is known of an API server whose Lease was never seen renewed")
	}
}
