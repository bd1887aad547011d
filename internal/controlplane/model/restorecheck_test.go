package model

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// TestChooseCheck: while the cluster serves, or can serve soon, a machine examines the backup before any machine is removed.
func TestChooseCheck(t *testing.T) {
	serves, silent := &Readiness{Ready: true}, &Readiness{Err: errors.New("nobody is there")}
	refused := &Readiness{Err: ErrRefused}
	ailing, lost := &Readiness{Failed: []string{"poststarthook/x"}}, &Readiness{Failed: []string{"poststarthook/x", "etcd-readiness"}}
	for _, c := range []struct {
		what     string
		machines string // up or down
		answer   *Readiness
		anew     bool
		silent   time.Duration
		want     CheckWay
		why      string
	}{
		{"it serves", "up up up", serves, false, 0, checkByMachine, ""},
		{"it serves, after long silence", "up up up", serves, false, time.Hour, checkByMachine, ""},
		{"it serves, whatever its infrastructure says", "down down down", serves, false, 0, checkByMachine, ""},
		{"something else ails", "up up up", ailing, false, 0, checkByMachine, ""},
		{"a new cluster", "", nil, true, 0, CheckByNobody, ""},
		{"a new cluster whose machine is there", "up", nil, true, 0, CheckByNobody, ""},
		{"all machines are gone", "", silent, false, 0, CheckByNobody, ""},
		{"a connection that blinks", "up up up", silent, false, time.Second, CheckLater, "does not answer"},
		{"a long silence", "up up up", silent, false, Grace, CheckByNobody, "does not answer"},
		{"a majority that blinks", "up up up", lost, false, time.Second, CheckLater, "etcd-readiness"},
		{"a majority that is lost", "up up up", lost, false, Grace, CheckByNobody, "etcd-readiness"},
		{"one machine of three", "up up down", silent, false, time.Second, CheckLater, "does not answer"},
		{"machines that do not run, and one that does", "up down down", lost, false, 0, CheckByNobody, "2 of 3 machines do not run"},
		{"a refused kubeconfig, for long", "up up up", refused, false, Grace, CheckImpossible, "the kubeconfig is refused"},
		{"a refused kubeconfig, and machines that do not run", "down down up", refused, false, Grace, CheckImpossible, "the kubeconfig is refused"},
		{"the only machine", "down", silent, false, 0, CheckByNobody, "1 of 1 machines do not run"},
	} {
		f := Fleet{Stacked: true}
		for _, word := range strings.Fields(c.machines) {
			m := &clusterv1.Machine{}
			m.Status.NodeRef.Name = "node"
			m.Status.Conditions = []metav1.Condition{{Type: clusterv1.InfrastructureReadyCondition, Status: map[bool]metav1.ConditionStatus{true: "True", false: "False"}[word == "up"]}}
			f.Instances = append(f.Instances, Instance{Machine: m})
		}
		if way, why := ChooseCheck(f, c.answer, !c.anew, c.silent); way != c.want || (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("%s: got %s, %q", c.what, way, why)
		}
	}
}

// TestNextCheck: one machine examines the backup. If it does not, another one does. A result is final.
func TestNextCheck(t *testing.T) {
	at := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	all := []string{"a", "b", "c"}
	for _, c := range []struct {
		what    string
		member  string // of the check that is there
		phase   etcdv1.CheckPhase
		age     time.Duration
		members []string
		want    string
	}{
		{"the first", "", "", 0, all, "a"},
		{"nobody can", "", "", 0, nil, ""},
		{"asked", "a", "", time.Second, all, ""},
		{"asked for long", "a", "", checkPatience, all, "b"},
		{"asked for long, the last", "c", "", checkPatience, all, "a"},
		{"asked for long, the only one", "a", "", checkPatience, []string{"a"}, "a"},
		{"asked for long, and gone", "x", "", checkPatience, all, "a"},
		{"nobody can any more", "a", "", time.Hour, nil, ""},
		{"begun", "a", etcdv1.CheckBegun, time.Hour, all, ""},
		{"begun, and ill for a moment", "x", etcdv1.CheckBegun, time.Second, all, ""},
		{"begun, and gone", "x", etcdv1.CheckBegun, checkPatience, all, "a"},
		{"begun, and never done", "b", etcdv1.CheckBegun, checkLimit, all, "c"},
		{"succeeded", "x", etcdv1.CheckSucceeded, 24 * time.Hour, all, ""},
		{"failed", "x", etcdv1.CheckFailed, 24 * time.Hour, all, ""},
	} {
		var found *etcdv1.EtcdBackupCheck
		if c.member != "" {
			found = &etcdv1.EtcdBackupCheck{Spec: etcdv1.EtcdBackupCheckSpec{Member: c.member}, Status: etcdv1.EtcdBackupCheckStatus{Phase: c.phase}}
			found.CreationTimestamp = metav1.NewTime(at)
		}
		if got := NextCheck(found, c.members, at.Add(c.age)); got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
}

// TestChecking: the condition during a check, and its remedy if no machine can examine the backup.
func TestChecking(t *testing.T) {
	begun := &etcdv1.EtcdBackupCheck{Spec: etcdv1.EtcdBackupCheckSpec{Member: "m"}, Status: etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckBegun}}
	asked := &etcdv1.EtcdBackupCheck{Spec: begun.Spec}
	for _, c := range []struct {
		found           *etcdv1.EtcdBackupCheck
		member, problem string
		want            string
		hint            bool
	}{
		{nil, "m", "", "the machine of the etcd member m checks the backup b", false},
		{asked, "n", "", "the machine of the etcd member n checks the backup b", false},
		{asked, "", "", "the machine of the etcd member m has to check the backup b, and has not begun yet", true},
		{begun, "", "", "the machine of the etcd member m checks the backup b", false},
		{nil, "", "nobody reports", "none can: nobody reports", true},
	} {
		got := CheckMessage("b", c.found, c.member, c.problem, "the-annotation", "the-id")
		if !strings.Contains(got, c.want) || strings.Contains(got, `the-annotation to "the-id"`) != c.hint {
			t.Errorf("%q", got)
		}
	}
}

// TestUnfit: a complete backup can still be unsuitable for this cluster.
func TestUnfit(t *testing.T) {
	key := func(name, sum string) etcdv1.BackupKey { return etcdv1.BackupKey{Name: name, SHA256: sum} }
	has := []etcdv1.BackupKey{key("ca", "1"), key("encryption", "2")}
	for _, c := range []struct {
		needs   []etcdv1.BackupKey
		version string
		other   bool
		want    string
	}{
		{has, "v1.36.3", false, ""},
		{nil, "", false, ""},
		{[]etcdv1.BackupKey{key("ca", "x")}, "v1.36.3", false, "it needs the key ca"},
		{[]etcdv1.BackupKey{key("ca", "x")}, "v1.36.3", true, ""},
		{[]etcdv1.BackupKey{key("encryption", "x")}, "v1.36.3", true, "it needs the key encryption"},
		{has, "v1.34.0", false, "it was made with Kubernetes v1.34.0"},
	} {
		cp := &controlplanev1.CapstanControlPlane{}
		cp.Spec.Version, cp.Spec.Restore.OtherAuthorities = "v1.36.3", ptr.To(c.other)
		if got := JoinReasons(UnfitBackup(etcdv1.EtcdBackupCheckStatus{Keys: c.needs, KubernetesVersion: c.version}, has, cp)); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%v %s: %q", c.needs, c.version, got)
		}
	}
}

// TestCheckName: the result of another restore or another cluster does not count. Other changes cause no further check.
func TestCheckName(t *testing.T) {
	name := func(change func(*controlplanev1.CapstanControlPlane)) string {
		cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{UID: "x"}}
		cp.Spec.Restore.Name, cp.Spec.Backup.Store = "a", directoryStore()
		change(cp)
		return CheckName(cp)
	}
	was := name(func(*controlplanev1.CapstanControlPlane) {})
	for what, c := range map[string]struct {
		change func(*controlplanev1.CapstanControlPlane)
		same   bool
	}{
		"replicas":        {func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Replicas, cp.Generation = ptr.To[int32](5), 7 }, true},
		"another backup":  {func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name = "b" }, false},
		"another attempt": {func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Attempt = "2" }, false},
		"another store":   {func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Backup.Store = s3Store() }, false},
		"another cluster": {func(cp *controlplanev1.CapstanControlPlane) { cp.UID = "y" }, false},
	} {
		if now := name(c.change); (now == was) != c.same || !strings.HasPrefix(now, "restore-") {
			t.Errorf("%s: %s became %s", what, was, now)
		}
	}
}

// TestOutOfDate: an old result does not count, because the backup can have been removed since then.
func TestOutOfDate(t *testing.T) {
	c := &etcdv1.EtcdBackupCheck{Status: etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckSucceeded}}
	c.CreationTimestamp = metav1.NewTime(time.Now())
	if CheckIsOutdated(c, time.Now()) || !CheckIsOutdated(c, time.Now().Add(checkLimit)) {
		t.Error("of a backup that was found good")
	}
	c.Status.Phase = etcdv1.CheckFailed
	if CheckIsOutdated(c, time.Now().Add(24*time.Hour)) {
		t.Error("a refusal stands")
	}
}

// TestRestoringCondition: the condition of an unchecked restore states this until the restore ends.
func TestRestoringCondition(t *testing.T) {
	for _, c := range []struct {
		unchecked bool
		why       string
		reason    string
		want      string
	}{
		{false, "", controlplanev1.RestoringReason, "It begins"},
		{false, "nobody answers", controlplanev1.RestoringUncheckedReason, "It begins. No machine could check the backup before, because nobody answers"},
		{true, "", controlplanev1.RestoringUncheckedReason, "It begins. No machine could check the backup before the restore began"},
	} {
		if reason, text := RestoringCondition("It begins", c.unchecked, c.why); reason != c.reason || text != c.want {
			t.Errorf("%s %s", reason, text)
		}
	}
}
