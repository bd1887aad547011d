package controlplane

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
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

	etcdMembers = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_members",
		Help: "Members of a cluster's etcd by state: voting, healthy (of the voting), other (learners, not started).",
	}, []string{"namespace", "name", "state"})
)

func init() { ctrlmetrics.Registry.MustRegister(created, deleted, etcdMembers) }

// measure sets the gauges of a control plane.
func measure(s *scope) {
	f := s.fleet()
	if !f.stacked || f.unknown != "" {
		return
	}
	v := f.votes()
	set := func(state string, n int) {
		etcdMembers.WithLabelValues(s.controlPlane.Namespace, s.controlPlane.Name, state).Set(float64(n))
	}
	set("voting", v.voting)
	set("healthy", v.healthy)
	set("other", len(f.members())-v.voting)
	measureSizes(s)
}

// forgetMetrics removes the metrics of a control plane that has gone.
func forgetMetrics(key client.ObjectKey) {
	labels := prometheus.Labels{"namespace": key.Namespace, "name": key.Name}
	created.DeletePartialMatch(labels)
	deleted.DeletePartialMatch(labels)
	etcdMembers.DeletePartialMatch(labels)
	forgetEtcd(key)
}
