package model

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// midnight is the start time of the tests of backups.
var midnight = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// india is a time zone whose hours do not begin with those of UTC.
var india = time.FixedZone("India", 5*3600+1800)

// tried parses attempts. A word contains the trigger (s, d or u), the request, the phase (+, - or nothing) and the minutes after
// midnight, separated by colons.
func tried(t *testing.T, text string) []BackupAttempt {
	t.Helper()
	var out []BackupAttempt
	for n, word := range strings.Fields(text) {
		parts := strings.Split(word, ":")
		minutes, err := time.ParseDuration(parts[3] + "m")
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, BackupAttempt{
			name: string(rune('a' + n)), request: strings.ReplaceAll(parts[1], ".", ":"), began: midnight.Add(minutes),
			trigger: map[string]etcdv1.BackupTrigger{"s": etcdv1.BackupScheduled, "d": etcdv1.BackupOnDemand, "u": etcdv1.BackupBeforeUpgrade}[parts[0]],
			phase:   map[string]etcdv1.BackupPhase{"+": etcdv1.BackupSucceeded, "-": etcdv1.BackupFailed, "": ""}[parts[2]],
		})
	}
	return out
}

// TestNextBackup: the backup that is due, and the time of the next check. The time zone of the host does not matter.
func TestNextBackup(t *testing.T) {
	hourly := "0 * * * *"
	for _, c := range []struct {
		what     string
		schedule string
		onDemand string
		upgrade  string
		begun    bool
		tried    string
		at       int // minutes after midnight
		want     string
		again    time.Duration
	}{
		{what: "nothing is asked for", at: 100, want: ""},
		{what: "not due yet", schedule: hourly, at: 59, again: time.Minute},
		{what: "due", schedule: hourly, at: 60, want: "Schedule 2026-03-01T01:00:00Z"},
		{what: "made", schedule: hourly, at: 61, tried: "s:x:+:60", again: 59 * time.Minute},
		{what: "missed ones are made up for once", schedule: hourly, at: 1000, want: "Schedule 2026-03-01T01:00:00Z"},
		{what: "and the next one is at its time", schedule: hourly, at: 1001, tried: "s:x:+:1000", again: 19 * time.Minute},
		{what: "being made", schedule: hourly, at: 61, tried: "s:2026-03-01T01.00.00Z::60", again: 59 * time.Minute},
		{what: "failed a moment ago", schedule: hourly, at: 60, tried: "s:x:-:60", again: 30 * time.Second},
		{what: "failed a minute ago", schedule: hourly, at: 61, tried: "s:x:-:60", want: "Schedule x"},
		{what: "failed an hour ago", schedule: hourly, at: 119, tried: "s:x:-:60", want: "Schedule x"},
		{what: "failed twice", schedule: hourly, at: 62, tried: "s:x:-:60 s:x:-:61.5", again: 30 * time.Second},
		{what: "the next one is due before it worked", schedule: hourly, at: 121, tried: "s:x:-:60 s:x:-:61", want: "Schedule 2026-03-01T02:00:00Z"},
		{what: "others do not count", schedule: hourly, at: 61, tried: "d:x:+:60", want: "Schedule 2026-03-01T01:00:00Z"},
		{what: "on demand", onDemand: "now", want: "OnDemand now"},
		{what: "on demand, made", onDemand: "now", tried: "d:now:+:0"},
		{what: "on demand, another one", onDemand: "again", tried: "d:now:+:0", want: "OnDemand again"},
		{what: "on demand, failed", onDemand: "now", tried: "d:now:-:0", again: 30 * time.Second},
		{what: "one at a time", onDemand: "now", tried: "s:x::0"},
		{what: "before an upgrade", upgrade: "v2", want: "BeforeUpgrade v2"},
		{what: "before an upgrade, made", upgrade: "v2", tried: "u:v2:+:0", at: 30},
		{what: "before an upgrade, made too long ago", upgrade: "v2", tried: "u:v2:+:0", at: 60, want: "BeforeUpgrade v2"},
		{what: "an upgrade under way", upgrade: "v2", begun: true, tried: "u:v2:+:0", at: 600},
		{what: "before an upgrade, for another one", upgrade: "v2", tried: "u:v1:+:0", at: 1, want: "BeforeUpgrade v2"},
		{what: "before an upgrade, failed", upgrade: "v2", tried: "u:v2:-:0", at: 0, again: 30 * time.Second},
		{what: "the longest pause", onDemand: "now", tried: strings.Repeat("d:now:-:0 ", 20), again: 10 * time.Minute},
		{what: "a day that never comes", schedule: "0 0 31 2 *", at: 60},
	} {
		schedule, err := ParseSchedule(c.schedule)
		if err != nil {
			t.Fatal(err)
		}
		for _, zone := range []*time.Location{time.UTC, india} {
			w := BackupTarget{Schedule: schedule, Since: midnight.Add(time.Second).In(zone), OnDemand: c.onDemand, UpgradeTo: c.upgrade, Begun: c.begun}
			attempts := tried(t, c.tried)
			for n := range attempts {
				attempts[n].began = attempts[n].began.In(zone)
			}
			next, again := NextBackup(w, attempts, midnight.Add(time.Duration(c.at)*time.Minute))
			got := ""
			if next != nil {
				got = string(next.Trigger) + " " + next.Request
			}
			if got != c.want || again != c.again {
				t.Errorf("%s, %s: got %q and %s, want %q and %s", c.what, zone, got, again, c.want, c.again)
			}
		}
	}
}

// TestDueAfter: the metric and the next scheduled backup have the same time, in UTC.
func TestDueAfter(t *testing.T) {
	schedule, err := ParseSchedule("0 3 * * *")
	if err != nil {
		t.Fatal(err)
	}
	for _, zone := range []*time.Location{time.UTC, india} {
		w := BackupTarget{Schedule: schedule, Since: midnight.In(zone)}
		_, again := NextBackup(w, nil, midnight)
		if due := w.DueAfter(time.Time{}); again != 3*time.Hour || !due.Equal(midnight.Add(again)) {
			t.Errorf("%s: the next backup is made after %s, and is due at %s", zone, again, due)
		}
	}
}

// TestOnDemandRequest: a value that is too long for an EtcdBackup requests no backup, so that it does not precede the others for ever.
func TestOnDemandRequest(t *testing.T) {
	for name, c := range map[string]struct{ value, want, problem string }{
		"none":     {},
		"a time":   {value: "1767225600", want: "1767225600"},
		"longest":  {value: strings.Repeat("ä", 256), want: strings.Repeat("ä", 256)},
		"too long": {value: strings.Repeat("x", 257), problem: "expected at most 256 characters in the annotation controlplane.capstan.dev/backup, found 257"},
	} {
		controlPlane := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{controlplanev1.BackupAnnotation: c.value}}}
		request, problem := OnDemandRequest(controlPlane)
		if request != c.want || (problem == "") != (c.problem == "") || !strings.HasPrefix(problem, c.problem) {
			t.Errorf("%s: %q, %q", name, request, problem)
		}
	}
}

// TestUpgradeHeld: an upgrade waits only for its own backup.
func TestUpgradeHeld(t *testing.T) {
	for _, c := range []struct {
		to    string
		begun bool
		tried string
		at    int
		want  bool
	}{
		{to: "", want: false},
		{to: "v2", want: true},
		{to: "v2", tried: "u:v2::0", want: true},
		{to: "v2", tried: "u:v2:-:0", want: true},
		{to: "v2", tried: "d:v2:+:0", want: true},
		{to: "v2", tried: "u:v1:+:0", want: true},
		{to: "v2", tried: "u:v2:+:0", at: 59, want: false},
		{to: "v2", tried: "u:v2:+:0", at: 61, want: true},
		{to: "v2", tried: "u:v2:+:0", at: 61, begun: true, want: false},
		{to: "v2", begun: true, want: true},
	} {
		w := BackupTarget{UpgradeTo: c.to, Begun: c.begun}
		if got := UpgradeHold(w, tried(t, c.tried), midnight.Add(time.Duration(c.at)*time.Minute)); (got != "") != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// TestVersionSpread: a Machine that is being updated in place runs its former version, and its update to the wanted version has begun.
func TestVersionSpread(t *testing.T) {
	for name, c := range map[string]struct {
		version, from   string
		outdated, begun bool
	}{
		"another version":                            {version: "v1", outdated: true},
		"this version":                               {version: "v2", begun: true},
		"it is being updated to this version":        {version: "v2", from: "v1", outdated: true, begun: true},
		"an update with its version":                 {version: "v1", from: "v1", outdated: true},
		"an update to another version from this one": {version: "v3", from: "v2"},
	} {
		m := &clusterv1.Machine{Spec: clusterv1.MachineSpec{Version: c.version}}
		if c.from != "" {
			m.Annotations = map[string]string{controlplanev1.UpdateFromAnnotation: c.from}
		}
		if outdated, begun := VersionSpread([]*clusterv1.Machine{m}, "v2"); outdated != c.outdated || begun != c.begun {
			t.Errorf("%s: outdated %v, begun %v", name, outdated, begun)
		}
	}
}

// TestSchedule: the message about an invalid schedule contains a valid example.
func TestSchedule(t *testing.T) {
	for _, good := range []string{"", "0 3 * * *", "@daily", "@every 6h", "*/15 1-5 * * MON"} {
		if _, err := ParseSchedule(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"daily", "0 3 * *", "61 * * * *", "0 0 3 * * *", "@sometimes", "TZ=UTC 0 3 * * *", "TZ=", "CRON_TZ=../../etc/passwd 0 3 * * *", "@every 1ns", "@every 59s"} {
		if _, err := ParseSchedule(bad); err == nil || !strings.Contains(err.Error(), "0 3 * * *") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func kept(minutes ...int) []controlplanev1.BackupStatus {
	var out []controlplanev1.BackupStatus
	for _, m := range minutes {
		out = append(out, controlplanev1.BackupStatus{Name: string(rune('a' + m)), Time: metav1.NewTime(midnight.Add(time.Duration(m) * time.Minute))})
	}
	return out
}

// TestExpired: surplus backups are removed in the order of their age. One more is removed if another backup is under way.
func TestExpired(t *testing.T) {
	for _, c := range []struct {
		backups []int
		keep    int
		want    string
	}{
		{nil, 3, ""}, {[]int{0, 1}, 3, ""}, {[]int{0, 1, 2}, 3, "a"}, {[]int{2, 0, 4, 1, 3}, 3, "abc"}, {[]int{0}, 1, "a"},
	} {
		if got := strings.Join(ExpiredBackups(kept(c.backups...), c.keep, "", ""), ""); got != c.want {
			t.Errorf("%v keep %d: got %q, want %q", c.backups, c.keep, got, c.want)
		}
	}
}

// With a small retention, a schedule and an old demand would otherwise replace each other's backups for ever.
func TestExpiredKeepsTheLastOfEachTrigger(t *testing.T) {
	backups := kept(0, 1, 2)
	backups[0].Trigger, backups[1].Trigger, backups[2].Trigger = etcdv1.BackupOnDemand, etcdv1.BackupScheduled, etcdv1.BackupScheduled
	for next, want := range map[etcdv1.BackupTrigger]string{etcdv1.BackupScheduled: "bc", etcdv1.BackupOnDemand: "ab", etcdv1.BackupBeforeUpgrade: "b"} {
		if got := strings.Join(ExpiredBackups(backups, 1, next, ""), ""); got != want {
			t.Errorf("before one that is %s: got %q, want %q", next, got, want)
		}
	}
	if got := strings.Join(ExpiredBackups(backups, 1, etcdv1.BackupScheduled, "b"), ""); got != "c" {
		t.Errorf("while b is to be restored: %q go", got)
	}
}

func etcdBackup(name string, minutes int, phase etcdv1.BackupPhase, removed ...string) etcdv1.EtcdBackup {
	at := metav1.NewTime(midnight.Add(time.Duration(minutes) * time.Minute))
	b := etcdv1.EtcdBackup{}
	b.Name, b.CreationTimestamp = name, at
	b.Spec.Member = "m"
	b.Status = etcdv1.EtcdBackupStatus{Phase: phase, Time: &at, Removed: removed}
	return b
}

// TestMergeBackups: the status keeps the backups in the store, also after the cluster was restored to an earlier time.
func TestMergeBackups(t *testing.T) {
	names := func(list []controlplanev1.BackupStatus) (out []string) {
		for _, b := range list {
			out = append(out, b.Name)
		}
		return out
	}
	found := []etcdv1.EtcdBackup{
		etcdBackup("d", 3, etcdv1.BackupSucceeded, "a"), etcdBackup("e", 4, etcdv1.BackupFailed), etcdBackup("f", 5, ""), etcdBackup("b", 1, etcdv1.BackupSucceeded),
	}
	merged := MergeBackups(kept(0, 1, 2), found)
	if diff := cmp.Diff([]string{"d", "c", "b"}, names(merged)); diff != "" {
		t.Error(diff)
	}
	if again := MergeBackups(merged, found); !cmp.Equal(names(again), names(merged)) {
		t.Errorf("not the same again: %v", names(again))
	}
	if got := SupersededBackups(merged, append(found, etcdBackup("a", 0, etcdv1.BackupSucceeded), etcdBackup("x", 1, etcdv1.BackupFailed))); !slices.Equal(got, []string{"a", "x"}) {
		t.Errorf("superseded: %v", got)
	}
}

// TestFailureOfTheSameSecond: the API server counts in seconds, so names order a failure and the success after it.
func TestFailureOfTheSameSecond(t *testing.T) {
	found := []etcdv1.EtcdBackup{etcdBackup("b", 0, etcdv1.BackupSucceeded), etcdBackup("a", 0, etcdv1.BackupFailed), etcdBackup("c", 0, etcdv1.BackupFailed)}
	if got := SupersededBackups(MergeBackups(nil, found), found); !slices.Equal(got, []string{"a"}) {
		t.Errorf("superseded: %v, want only the failure before the success", got)
	}
}

// TestLostBackup: a requested backup that no machine makes does not block others.
func TestLostBackup(t *testing.T) {
	f := Fleet{Instances: []Instance{{names: []string{"m"}}}}
	for _, c := range []struct {
		what  string
		b     etcdv1.EtcdBackup
		known []controlplanev1.BackupStatus
		f     Fleet
		at    time.Duration
		want  bool
	}{
		{"being made", etcdBackup("a", 0, ""), nil, f, time.Minute, false},
		{"for too long", etcdBackup("a", 0, ""), nil, f, 3 * time.Hour, true},
		{"its machine is gone", etcdBackup("a", 0, ""), nil, Fleet{}, time.Minute, true},
		{"done, before the cluster was taken back", etcdBackup("a", 0, ""), kept(0), f, time.Minute, true},
		{"done", etcdBackup("a", 0, etcdv1.BackupFailed), nil, Fleet{}, 3 * time.Hour, false},
	} {
		if got := IsLostBackup(&c.b, c.known, c.f, midnight.Add(c.at)); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// TestBackupMembers: the order of members is healthy followers first, then the leader.
func TestBackupMembers(t *testing.T) {
	members := map[string]etcdv1.EtcdMember{}
	add := func(f *Fleet, name string, health metav1.ConditionStatus, leads bool) {
		f.Instances = append(f.Instances, Instance{Machine: &clusterv1.Machine{}, Member: &Member{Name: name, voting: true, health: health}})
		m := etcdv1.EtcdMember{}
		m.Status.Leader = ptr.To(leads)
		members[name] = m
	}
	var f Fleet
	if got := BackupMembers(f, members); len(got) != 0 {
		t.Errorf("got %q of nobody", got)
	}
	add(&f, "a", metav1.ConditionTrue, true)
	if got := BackupMembers(f, members); !slices.Equal(got, []string{"a"}) {
		t.Errorf("got %q, want the leader", got)
	}
	add(&f, "b", metav1.ConditionFalse, false)
	add(&f, "d", metav1.ConditionTrue, false)
	add(&f, "c", metav1.ConditionTrue, false)
	if got := BackupMembers(f, members); !slices.Equal(got, []string{"c", "d", "a"}) {
		t.Errorf("got %q", got)
	}
}

// TestHeldRollout: a rollout that waits replaces no Machine, and the number of Machines still follows the spec.
func TestHeldRollout(t *testing.T) {
	for _, c := range []struct {
		what, held, machines string
		replicas             int
		want, why            string
	}{
		{"it waits", "no backup", "a:vo b:vo c:vo", 3, "wait", "no backup"},
		{"it goes on", "", "a:vo b:vo c:vo", 3, "create 1", ""},
		{"missing ones are created", "no backup", "a:vo b:vo", 3, "create 1", ""},
		{"too many go", "no backup", "a:vo b:vo c:vo", 1, "remove a", ""},
		{"too many wait for healthy ones", "no backup", "a:vo b:uo c:vo d:uo e:vo", 3, "wait", "is not healthy"},
		{"a surge that began before waits", "no backup", "a:vo b:vo c:vo d:v", 3, "wait", "no backup"},
		{"no two members remain", "no backup", "a:vo b:v", 1, "remove a", ""},
		{"too many with a surge that began before", "no backup", "a:vo b:vo c:vo d:vo e:vo f:v", 3, "remove a", ""},
	} {
		got := PlanMachines(build(c.machines), Target{Replicas: c.replicas, maxSurge: 1, initialized: true, held: c.held})
		if got.String() != c.want || !strings.Contains(got.Why, c.why) {
			t.Errorf("%s: got %s (%s), want %s (%s)", c.what, got, got.Why, c.want, c.why)
		}
	}
}

// TestTopologyHold: a rollout waits for the version of the topology, but not during an upgrade by steps.
func TestTopologyHold(t *testing.T) {
	for name, c := range map[string]struct {
		topology, step string
		held           bool
	}{
		"no topology":      {},
		"the same version": {topology: "v1.36.3"},
		"a later version":  {topology: "v1.37.2", held: true},
		"this step":        {topology: "v1.38.0", step: "v1.36.3"},
		"another step":     {topology: "v1.38.0", step: "v1.37.2", held: true},
	} {
		t.Run(name, func(t *testing.T) {
			cp := &ControlPlane{Cluster: &clusterv1.Cluster{}, Object: &controlplanev1.CapstanControlPlane{}}
			cp.Cluster.Spec.Topology.Version, cp.Object.Spec.Version = c.topology, "v1.36.3"
			if c.step != "" {
				cp.Cluster.Annotations = map[string]string{clusterv1.ClusterTopologyUpgradeStepAnnotation: c.step}
			}
			if held := cp.Target().held; (held != "") != c.held {
				t.Errorf("held with %q, want %v", held, c.held)
			}
		})
	}
}

// Backups of two clusters have different names, so that neither cluster overwrites or removes backups of the other. Two managers
// choose the same name for the same backup.
func TestBackupName(t *testing.T) {
	at := time.Date(2026, 3, 1, 3, 0, 0, 0, time.UTC)
	here, there := &clusterv1.Cluster{}, &clusterv1.Cluster{}
	here.UID, there.UID = "6f0b5a52-1111-4c3e-9d0e-000000000001", "6f0b5a52-1111-4c3e-9d0e-000000000002"
	a, b := BackupName(here, at), BackupName(there, at)
	if a == b || a != BackupName(here, at.In(time.FixedZone("x", 3600))) || !strings.HasPrefix(a, "etcd-20260301-030000-") {
		t.Errorf("names %q and %q", a, b)
	}
	if later := BackupName(here, at.Add(time.Second)); later <= a {
		t.Errorf("%q sorts before %q", later, a)
	}
}

// TestBackupConditionOfOneSecond: if two attempts have the same second, the one with the later name determines the condition.
func TestBackupConditionOfOneSecond(t *testing.T) {
	second := time.Unix(1000, 0)
	attempts := []BackupAttempt{
		{name: "etcd-20260101-000001-abc", phase: etcdv1.BackupSucceeded, began: second},
		{name: "etcd-20260101-000002-abc", phase: etcdv1.BackupFailed, began: second, message: "no space"},
	}
	for range 2 {
		if got := BackupCondition(attempts, ""); got.Reason != controlplanev1.BackupFailedReason || !strings.Contains(got.Message, "no space") {
			t.Errorf("got %+v", got)
		}
		slices.Reverse(attempts)
	}
}
