package controlplane

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// TestUnknown: what is old, or cannot be asked, says nothing.
func TestUnknown(t *testing.T) {
	now := time.Unix(1000, 0)
	some := map[string]etcdv1.EtcdMember{"a": {}}
	care := func(ago time.Duration) renewal { return renewal{at: now.Add(-ago), seen: true} }
	for _, c := range []struct {
		what    string
		w       workload
		outside bool
		want    string
	}{
		{"fresh", workload{members: some, care: care(40 * time.Second)}, false, ""},
		{"old", workload{members: some, care: care(41 * time.Second)}, false, "nobody has looked after etcd since"},
		{"not seen yet", workload{members: some, care: renewal{at: now.Add(-40 * time.Second)}}, false, "it is not known yet"},
		{"never seen", workload{members: some, care: renewal{at: now.Add(-41 * time.Second)}}, false, "nobody has looked after etcd since"},
		{"nobody yet", workload{members: some}, false, "nobody looks after etcd yet"},
		{"no kind", workload{missing: true}, false, "do not report"},
		{"no members", workload{care: care(0)}, false, "do not report"},
		{"no connection", workload{err: errors.New("there is none")}, false, "cannot be asked"},
		{"external etcd", workload{}, true, ""},
		{"external etcd, no connection", workload{err: errors.New("there is none")}, true, "cannot be asked"},
	} {
		if got := c.w.unknown(!c.outside, now); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
}

// TestStale: silence is looked for when the oldest sign of life has grown old, and not before.
func TestStale(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		care time.Duration
		apis []time.Duration
		want time.Duration
	}{
		{0, nil, 41 * time.Second}, {10 * time.Second, nil, 31 * time.Second}, {0, []time.Duration{0, 25 * time.Second}, 16 * time.Second},
		{0, []time.Duration{time.Hour}, 41 * time.Second}, {50 * time.Second, nil, 0},
	} {
		w := workload{care: renewal{now.Add(-c.care), true}, apiServers: map[string]renewal{"new to us": {at: now.Add(-30 * time.Second)}}}
		for n, age := range c.apis {
			w.apiServers[string(rune('a'+n))] = renewal{now.Add(-age), true}
		}
		if got := w.stale(now); got != c.want {
			t.Errorf("%v: got %s", c, got)
		}
	}
}

// TestLookAgain: a Machine that joins is looked at often, as long as it is new.
func TestLookAgain(t *testing.T) {
	for _, c := range []struct {
		machines string
		at       time.Duration
		stale    time.Duration
		want     time.Duration
	}{
		{"a:v b:v", time.Second, 30 * time.Second, 30 * time.Second},
		{"a:v b:va", time.Second, 30 * time.Second, joiningRetry},
		{"a:v b:va", time.Hour, 30 * time.Second, 30 * time.Second},
		{"a:v b:vad", time.Second, 30 * time.Second, 30 * time.Second},
		{"a:v", time.Hour, 0, unhealthyRetry},
		{"a:v b:vA", time.Hour, 30 * time.Second, firstRetry},
		{"a:v b:vAd", time.Hour, 30 * time.Second, 30 * time.Second},
	} {
		if got := build(c.machines).lookAgain(c.stale, time.Unix(1, 0).Add(c.at)); got != c.want {
			t.Errorf("%s after %s: %s", c.machines, c.at, got)
		}
	}
}

// TestNewFleet: members find their Machines by the Node's name or the machine's; those that do not are strays, and
// orphans only when every Machine is known.
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
	w := &workload{care: renewal{now, true}, apiServers: map[string]renewal{"node-a": {now, true}, "host-b": {now.Add(-time.Hour), true}}, members: map[string]etcdv1.EtcdMember{
		"node-a": member("node-a", time.Hour, metav1.ConditionTrue), "host-b": member("host-b", 2*time.Minute, metav1.ConditionFalse), "x": member("x", time.Second, metav1.ConditionFalse),
	}}
	f := newFleet(machines, map[string][]string{"b": {"old"}}, true, w, now)
	a, b, c := f.find("a"), f.find("b"), f.find("c")
	if !f.healthy(a) || f.healthy(b) || f.healthy(c) || !f.joined(b) || f.joined(c) || !b.member.sick || a.member.sick || len(b.outdated) != 1 {
		t.Errorf("%+v", f)
	}
	if v := f.votes(); v.voting != 3 || v.healthy != 1 || v.quorum() {
		t.Errorf("%+v", v)
	}
	if len(f.strays) != 1 || f.strays[0].name != "x" || f.strays[0].sick || len(f.orphans()) != 1 {
		t.Errorf("strays %+v", f.strays)
	}
	data := "c"
	c.machine.Spec.Bootstrap.DataSecretName = &data
	if len(f.orphans()) != 0 {
		t.Error("x may be c's member")
	}
	w.care.at = now.Add(-time.Hour)
	if f = newFleet(machines, nil, true, w, now); f.healthy(f.find("a")) || f.votes().healthy != 0 {
		t.Error("healthy long ago is not healthy")
	}
	if f = newFleet(machines, nil, false, w, now); len(f.members()) != 0 || !f.healthy(f.find("a")) {
		t.Error("an external etcd has members on Machines")
	}
	if f.healthy(f.find("b")) || !f.joined(f.find("b")) || f.joined(f.find("c")) {
		t.Error("an API server that has served is not one that never came")
	}
	w.apiServers["node-a"] = renewal{at: now}
	if f = newFleet(machines, nil, false, w, now); f.healthy(f.find("a")) || !f.joined(f.find("a")) || len(machineHealth(f.find("a"), f)) != 0 {
		t.Error("something is known of an API server whose Lease was never seen renewed")
	}
}

// TestEtcdHealth (CP-10): what is said of etcd as a whole.
func TestEtcdHealth(t *testing.T) {
	good, etcd, other, silent := &reply{ready: true}, &reply{failed: []string{"etcd"}}, &reply{failed: []string{"poststarthook/x"}}, &reply{err: errors.New("no")}
	for _, c := range []struct {
		machines, unknown string
		external          bool
		answer            *reply
		status            metav1.ConditionStatus
		reason            string
	}{
		{"a:v b:v c:v", "", false, good, "True", controlplanev1.HealthyReason},
		{"a:v b:v c:l", "", false, good, "True", controlplanev1.HealthyReason},
		{"a:v b:v c:u", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:v c:?", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:v stray-x:v", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:u c:u", "", false, good, "False", controlplanev1.QuorumLostReason},
		{"a:v", "nobody knows", false, good, "Unknown", controlplanev1.HealthUnknownReason},
		{"a:v", "nobody knows", false, etcd, "False", controlplanev1.QuorumLostReason},
		{"a:v", "nobody knows", false, silent, "Unknown", controlplanev1.WaitingForConnectionReason},
		{"a:", "", true, good, "True", controlplanev1.HealthyReason},
		{"a:", "", true, other, "True", controlplanev1.HealthyReason},
		{"a:", "", true, etcd, "False", controlplanev1.NotHealthyReason},
		{"a:", "", true, silent, "Unknown", controlplanev1.WaitingForConnectionReason},
	} {
		f := build(c.machines)
		f.unknown, f.stacked = c.unknown, !c.external
		if got := etcdHealth(f, c.answer); got.Status != c.status || got.Reason != c.reason {
			t.Errorf("%+v: got %+v", c, got)
		}
	}
	if got := componentsHealth(build("a:v b:va"), good); got.Status != metav1.ConditionFalse || !strings.Contains(got.Message, "Machine b") {
		t.Errorf("%+v", got)
	}
	if got := componentsHealth(build("a:v b:v"), other); got.Status != metav1.ConditionFalse {
		t.Errorf("%+v", got)
	}
	if got := componentsHealth(build("a:v b:v"), etcd); got.Status != metav1.ConditionTrue {
		t.Errorf("%+v", got)
	}
}

// TestOutdatedByTheClock (CP-20): rollout.after and certificates that expire.
func TestOutdatedByTheClock(t *testing.T) {
	now := time.Unix(1000000, 0)
	born := func(age time.Duration, expires time.Duration) *clusterv1.Machine {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-age))}}
		if expires != 0 {
			m.Annotations = map[string]string{clusterv1.MachineCertificatesExpiryDateAnnotation: now.Add(expires).UTC().Format(time.RFC3339)}
		}
		return m
	}
	for _, c := range []struct {
		what    string
		after   time.Duration // since when, before now
		days    int32
		machine *clusterv1.Machine
		want    bool
		next    time.Duration
	}{
		{"older", time.Hour, 0, born(2*time.Hour, 0), true, 0},
		{"younger", time.Hour, 0, born(time.Minute, 0), false, 0},
		{"not yet", -time.Hour, 0, born(time.Minute, 0), false, time.Hour},
		{"soon", 0, 30, born(2*day, 29*day), true, 0},
		{"soon, and it was made since: another one's would end with the same authority", 0, 30, born(time.Minute, 29*day), false, 0},
		{"not so soon", 0, 30, born(time.Minute, 31*day), false, day},
		{"nobody knows", 0, 30, born(time.Minute, 0), false, 0},
		{"nobody cares", 0, 0, born(time.Minute, day), false, 0},
	} {
		cp := &controlplanev1.CapstanControlPlane{}
		if c.after != 0 {
			cp.Spec.Rollout.After = metav1.NewTime(now.Add(-c.after))
		}
		cp.Spec.Rollout.Before.CertificatesExpiryDays = c.days
		if got := outdated(cp, c.machine, nil, nil, now); (len(got) > 0) != c.want {
			t.Errorf("%s: got %v", c.what, got)
		}
		if got := nextOutdated(cp, []*clusterv1.Machine{c.machine}, now); got != c.next {
			t.Errorf("%s: next after %s", c.what, got)
		}
	}
}

// TestInVain (CP-20): Machines whose certificates no rollout would make better are named, with what to do.
func TestInVain(t *testing.T) {
	now := time.Unix(1000000, 0)
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Spec.Rollout.Before.CertificatesExpiryDays = 30
	machine := func(name string, age, expires time.Duration) *clusterv1.Machine {
		return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
			Name: name, CreationTimestamp: metav1.NewTime(now.Add(-age)),
			Annotations: map[string]string{clusterv1.MachineCertificatesExpiryDateAnnotation: now.Add(expires).UTC().Format(time.RFC3339)},
		}}
	}
	machines := []*clusterv1.Machine{machine("good", day, 300*day), machine("old", 100*day, 20*day), machine("young", day, 20*day)}
	if got := inVain(cp, machines[:2], now); got != "" {
		t.Error(got)
	}
	if got := inVain(cp, machines, now); !strings.HasPrefix(got, "Machines young have") || !strings.Contains(got, "spec.certificates.rotateCAAfter") {
		t.Error(got)
	}
}

// TestNewVersionOfCapstan: what this version adds to objects that a former one has stored is no reason to
// replace a Machine: both are compared as they are stored, and what cannot be read is no difference.
func TestNewVersionOfCapstan(t *testing.T) {
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Spec.Version = "v1.36.3"
	machine := &clusterv1.Machine{}
	machine.Spec.Version = "v1.36.3"
	config := &bootstrapv1.CapstanConfig{}
	config.Spec.Role = bootstrapv1.RoleControlPlane
	config.Spec.PreCommands = []string{} // Empty and missing are the same.
	infra := &unstructured.Unstructured{Object: map[string]any{"kind": "CapstanMachine"}}
	if got := outdated(cp, machine, config, infra, time.Now()); got != nil {
		t.Errorf("got %v", got)
	}
	if got := outdated(cp, machine, nil, nil, time.Now()); got != nil {
		t.Errorf("got %v", got)
	}
}
