package controlplane

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	certexpiry "capstan.dev/capstan/internal/expiry"
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

	etcdMembers = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_members",
		Help: "Members of a cluster's etcd by state: voting, healthy (of the voting), other (learners, not started).",
	}, []string{"namespace", "name", "state"})

	backupTime = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_backup_last_success_timestamp_seconds",
		Help: "When the newest backup of a cluster's etcd was complete, in seconds since 1970.",
	}, ofControlPlane)
)

func init() { ctrlmetrics.Registry.MustRegister(created, deleted, updated, etcdMembers, backupTime) }

// measureBackups sets the gauge of a control plane that has backups.
func measureBackups(cp *controlplanev1.CapstanControlPlane) {
	if at := model.LastBackup(cp); !at.IsZero() {
		backupTime.WithLabelValues(cp.Namespace, cp.Name).Set(float64(at.Unix()))
	}
}

// measure sets the gauges of a control plane.
func measure(s *scope) {
	f := s.Fleet()
	if !f.Stacked || f.Unknown != "" {
		return
	}
	v := f.Votes()
	set := func(state string, n int) {
		etcdMembers.WithLabelValues(s.Object.Namespace, s.Object.Name, state).Set(float64(n))
	}
	set("voting", v.Voting)
	set("healthy", v.Healthy)
	set("other", len(f.Members())-v.Voting)
	measureSizes(s)
}

// forgetMetrics removes the metrics of a deleted control plane.
func forgetMetrics(key client.ObjectKey) {
	labels := prometheus.Labels{"namespace": key.Namespace, "name": key.Name}
	created.DeletePartialMatch(labels)
	deleted.DeletePartialMatch(labels)
	updated.DeletePartialMatch(labels)
	etcdMembers.DeletePartialMatch(labels)
	forgetEtcd(key)
	certexpiry.Forget(controlplanev1.ControlPlaneKind, key.Namespace, key.Name)
	backupTime.DeletePartialMatch(labels)
}
