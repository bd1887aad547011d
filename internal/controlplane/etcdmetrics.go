package controlplane

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/reconciling"
)

var (
	ofMember = []string{"namespace", "name", "member"}

	etcdSize = reconciling.NewObjectGauge(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_db_size_bytes",
		Help: "Size of the database file of a member of etcd, rounded up to a mebibyte.",
	}, ofMember)

	etcdInUse = reconciling.NewObjectGauge(prometheus.GaugeOpts{
		Name: "capstan_control_plane_etcd_db_in_use_bytes",
		Help: "How much of a member's database file is used, rounded up to a mebibyte. The rest comes back by defragmentation.",
	}, ofMember)

	etcdRead = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "capstan_control_plane_etcd_read_seconds",
		Help:    "How long a small read takes, through the API server, that etcd's majority has to confirm.",
		Buckets: []float64{.002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
	}, ofControlPlane)
)

func init() { ctrlmetrics.Registry.MustRegister(etcdSize, etcdInUse, etcdRead) }

// measureSizes sets the gauges of the members that there are; those of others go.
func measureSizes(s *scope) {
	sizes, inUse := map[string]float64{}, map[string]float64{}
	for name, m := range s.Workload.Members {
		if bytes := m.Status.DBSizeBytes; bytes != nil {
			sizes[name] = float64(*bytes)
		}
		if bytes := m.Status.DBInUseBytes; bytes != nil {
			inUse[name] = float64(*bytes)
		}
	}
	etcdSize.Show(sizes, s.Object.Namespace, s.Object.Name)
	etcdInUse.Show(inUse, s.Object.Namespace, s.Object.Name)
}

// forgetEtcd removes the gauges of a control plane's etcd, which nobody sets during its deletion. No backup is due then.
func forgetEtcd(key client.ObjectKey) {
	etcdMembers.Forget(key.Namespace, key.Name)
	etcdQuorum.DeleteLabelValues(key.Namespace, key.Name)
	etcdSize.Forget(key.Namespace, key.Name)
	etcdInUse.Forget(key.Namespace, key.Name)
	backupDue.DeleteLabelValues(key.Namespace, key.Name)
}
