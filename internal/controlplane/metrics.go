package controlplane

import (
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	certexpiry "capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/reconciling"
)

var (
	ofControlPlane = []string{"namespace", "name"}

	created = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_control_plane_machines_created_total",
		Help: "Machines made for a control plane.",
	}, ofControlPlane)

	deleted = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_control_plane_machines_deleted_total",
		Help: "Machines of a control plane that its controller deleted, by why: ScaleDown, RollOut, Remediate.",
	}, []string{"namespace", "name", "why"})

	updated = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_control_plane_machines_updated_total",
		Help: "Machines of a control plane that were updated in place.",
	}, ofControlPlane)

	etcdMembers = reconciling.NewObjectGauge(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_members",
		Help: "Members of a cluster's etcd by state: voting, healthy (of the voting), other (learners, not started).",
	}, []string{"namespace", "name", "state"})

	etcdQuorum = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_quorum",
		Help: "1 if a majority of etcd's voting members works, 0 if not. There is no series while this is not known, and for an external etcd.",
	}, ofControlPlane)

	backupTime = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_backup_last_success_timestamp_seconds",
		Help: "When the newest backup of a cluster's etcd was complete, in seconds since 1970.",
	}, ofControlPlane)

	backupDue = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_backup_due_timestamp_seconds",
		Help: "When the schedule demands the first backup after the newest complete one, in seconds since 1970. There is no series without a schedule.",
	}, ofControlPlane)
)

func init() {
	ctrlmetrics.Registry.MustRegister(created, deleted, updated, etcdMembers, etcdQuorum, backupTime, backupDue)
}

// measureBackups sets the gauges of the backups of a control plane.
func measureBackups(cp *controlplanev1.CapstanControlPlane, w model.BackupTarget) {
	last := model.LastBackup(cp)
	if !last.IsZero() {
		backupTime.WithLabelValues(cp.Namespace, cp.Name).Set(float64(last.Unix()))
	}
	if due := w.DueAfter(last); due.IsZero() {
		backupDue.DeleteLabelValues(cp.Namespace, cp.Name)
	} else {
		backupDue.WithLabelValues(cp.Namespace, cp.Name).Set(float64(due.Unix()))
	}
}

// measure sets the gauges of a control plane.
func measure(s *scope) {
	f := s.Fleet()
	if !f.Stacked || f.Unknown != "" {
		return
	}
	v := f.Votes()
	etcdMembers.Show(map[string]float64{
		"voting": float64(v.Voting), "healthy": float64(v.Healthy), "other": float64(len(f.Members()) - v.Voting),
	}, s.Object.Namespace, s.Object.Name)
	measureSizes(s)
}

// measureQuorum sets the gauge of etcd's majority from the condition EtcdClusterHealthy. The reports of the members are in etcd. Without
// a majority they cannot be read, so their numbers would be those before the loss.
func measureQuorum(s *scope) {
	cp := s.Object
	c := conditions.Get(cp, controlplanev1.EtcdClusterHealthyCondition)
	if s.Fleet().Unknown != "" && !s.Interrupted {
		etcdMembers.Forget(cp.Namespace, cp.Name)
	}
	switch {
	case !s.Stacked() || c == nil || c.Status == metav1.ConditionUnknown:
		etcdQuorum.DeleteLabelValues(cp.Namespace, cp.Name)
	case c.Reason == controlplanev1.QuorumLostReason:
		etcdQuorum.WithLabelValues(cp.Namespace, cp.Name).Set(0)
	default:
		etcdQuorum.WithLabelValues(cp.Namespace, cp.Name).Set(1)
	}
}

// forgetMetrics removes the metrics of a deleted control plane.
func forgetMetrics(key client.ObjectKey) {
	labels := prometheus.Labels{"namespace": key.Namespace, "name": key.Name}
	created.DeletePartialMatch(labels)
	deleted.DeletePartialMatch(labels)
	updated.DeletePartialMatch(labels)
	etcdRead.DeletePartialMatch(labels)
	forgetEtcd(key)
	certexpiry.Forget(controlplanev1.ControlPlaneKind, key.Namespace, key.Name)
	backupTime.DeletePartialMatch(labels)
}
