package controlplane

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/robfig/cron/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// TestSizesInMetrics: the metric contains the size of each member. It is removed with the member and with the control plane.
func TestSizesInMetrics(t *testing.T) {
	member := func(size, inUse int64) etcdv1.EtcdMember {
		return etcdv1.EtcdMember{Status: etcdv1.EtcdMemberStatus{DBSizeBytes: ptr.To(size), DBInUseBytes: ptr.To(inUse)}}
	}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "sizes", Name: "demo"}}
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Workload: &model.Workload{Members: map[string]etcdv1.EtcdMember{"a": member(8<<20, 3<<20), "b": member(9<<20, 3<<20), "new": {}}}}}
	measureSizes(s)
	if got := testutil.ToFloat64(etcdSize.WithLabelValues("sizes", "demo", "b")); got != 9<<20 {
		t.Errorf("the size of b is %v", got)
	}
	if got := testutil.ToFloat64(etcdInUse.WithLabelValues("sizes", "demo", "a")); got != 3<<20 {
		t.Errorf("a uses %v", got)
	}
	if n := testutil.CollectAndCount(etcdSize); n != 2 {
		t.Errorf("%d sizes", n)
	}
	stays := etcdSize.WithLabelValues("sizes", "demo", "a")
	delete(s.Workload.Members, "b")
	measureSizes(s)
	if etcdSize.WithLabelValues("sizes", "demo", "a") != stays {
		t.Error("the series of a was removed and made again")
	}
	if n := testutil.CollectAndCount(etcdSize); n != 1 {
		t.Errorf("%d sizes after a member has left", n)
	}
	forgetMetrics(client.ObjectKeyFromObject(cp))
	if n := testutil.CollectAndCount(etcdSize) + testutil.CollectAndCount(etcdInUse); n != 0 {
		t.Errorf("%d sizes of a deleted control plane remain", n)
	}
}

// TestQuorumInMetrics: the metric of the majority follows the condition, also when the members cannot be read. Their numbers of the past
// are removed then.
func TestQuorumInMetrics(t *testing.T) {
	series := func(metric string) int { // The manager of the package measures the control planes of other tests.
		return len(testmetrics.Gather(t, metric, map[string]string{"namespace": "quorum"}))
	}
	silent := &model.Readiness{Err: errors.New("no answer")}
	management := interceptor.NewClient(nil, interceptor.Funcs{Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
		return errors.New("no answer")
	}})
	unreadable := &observation{machineReader: &machineReader{clients: &clients{Client: management}}, reached: &sightings{}}
	for name, tc := range map[string]struct {
		answer                *model.Readiness
		external, interrupted bool
		unread                bool // The Machines cannot be read.
		quorum                []float64
		members               int
	}{
		"the API server works":     {answer: &model.Readiness{Ready: true}},
		"etcd fails":               {answer: &model.Readiness{Failed: []string{"etcd"}}, quorum: []float64{0}},
		"an external etcd fails":   {answer: &model.Readiness{Failed: []string{"etcd"}}, external: true},
		"no answer":                {answer: silent},
		"no answer for a moment":   {answer: silent, interrupted: true, quorum: []float64{1}, members: 2},
		"no request of this round": {quorum: []float64{1}, members: 2},
		"Machines are not read":    {answer: &model.Readiness{Ready: true}, unread: true, quorum: []float64{1}, members: 2},
	} {
		s := running()
		s.Object.Namespace, s.Object.Name = "quorum", name
		conditions.Set(s.Object, metav1.Condition{Type: controlplanev1.EtcdClusterHealthyCondition, Status: metav1.ConditionTrue, Reason: controlplanev1.HealthyReason})
		measureQuorum(&scope{ControlPlane: &model.ControlPlane{Object: s.Object, Workload: &model.Workload{}, Interrupted: true}})
		etcdMembers.Show(map[string]float64{"voting": 3, "healthy": 3}, "quorum", name)
		if tc.external {
			s.Object.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"https://198.18.0.9:2379"}
		}
		s.Readiness, s.Interrupted, s.Workload = tc.answer, tc.interrupted, &model.Workload{Err: errors.New("no answer")}
		if tc.unread {
			if _, err := unreadable.reconcile(t.Context(), s); err == nil {
				t.Error("the Machines were read")
			}
		}
		setHealth(s)
		var quorum []float64
		if series("capstan_control_plane_etcd_quorum") > 0 {
			quorum = []float64{testutil.ToFloat64(etcdQuorum.WithLabelValues("quorum", name))}
		}
		if members := series("capstan_control_plane_etcd_members"); !slices.Equal(quorum, tc.quorum) || members != tc.members {
			t.Errorf("%s: quorum %v and %d numbers of members, want %v and %d", name, quorum, members, tc.quorum, tc.members)
		}
		forgetMetrics(client.ObjectKeyFromObject(s.Object))
		if n := series("capstan_control_plane_etcd_quorum") + series("capstan_control_plane_etcd_members"); n != 0 {
			t.Errorf("%s: %d series of a deleted control plane remain", name, n)
		}
	}
}

// TestBackupsInMetrics: a backup is due after the newest one, or after the control plane was made, and only with a schedule.
func TestBackupsInMetrics(t *testing.T) {
	made := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	later := made.Add(36 * time.Hour)
	for name, test := range map[string]struct {
		schedule string
		backups  []controlplanev1.BackupStatus
		due      []float64
	}{
		"no schedule":                     {},
		"no schedule, and backups":        {backups: []controlplanev1.BackupStatus{{Time: metav1.NewTime(later)}}},
		"no backup":                       {schedule: "@daily", due: []float64{float64(made.Add(12 * time.Hour).Unix())}},
		"a backup":                        {schedule: "@daily", backups: []controlplanev1.BackupStatus{{Time: metav1.NewTime(later)}}, due: []float64{float64(later.Add(24 * time.Hour).Unix())}},
		"a backup of an earlier object":   {schedule: "@daily", backups: []controlplanev1.BackupStatus{{Time: metav1.NewTime(made.Add(-time.Hour))}}, due: []float64{float64(made.Add(12 * time.Hour).Unix())}},
		"a schedule that is never served": {schedule: "0 0 30 2 *"},
	} {
		cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "backups", Name: name}}
		measureBackups(cp, model.BackupTarget{Since: made, Schedule: schedule(t, "@hourly")}) // the former schedule
		cp.Status.Backups = test.backups
		measureBackups(cp, model.BackupTarget{Since: made, Schedule: schedule(t, test.schedule)})
		labels := map[string]string{"namespace": "backups", "name": name}
		var due []float64
		for _, series := range testmetrics.Gather(t, "capstan_control_plane_backup_due_timestamp_seconds", labels) {
			due = append(due, series.Value)
		}
		if !slices.Equal(due, test.due) {
			t.Errorf("%s: due at %v, want %v", name, due, test.due)
		}
		forgetMetrics(client.ObjectKeyFromObject(cp))
		if left := testmetrics.Gather(t, "capstan_control_plane_backup_due_timestamp_seconds", labels); len(left) > 0 {
			t.Errorf("%s: metrics of a deleted control plane: %v", name, left)
		}
	}
}

func schedule(t *testing.T, text string) cron.Schedule {
	t.Helper()
	s, err := model.ParseSchedule(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
