// Package inventory contains the Prometheus metrics of hosts, machines and pools. They are computed from the objects in the cache at
// each scrape, so they never differ from the objects, and deleted objects need no clean-up.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package inventory

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// scrapeLimit is the time limit for reading the cache, which has all objects soon after the start.
const scrapeLimit = 5 * time.Second

// Values of the label state of host resources.
const (
	capacity    = "capacity"
	allocatable = "allocatable"
)

var (
	hostConnected = prometheus.NewDesc("capstan_host_connected", "1 if the manager is connected to capstand of the host, else 0.", []string{"host", "failure_domain"}, nil)
	hostMachines  = prometheus.NewDesc("capstan_host_machines", "Machines on the host, those of other management clusters included.", []string{"host"}, nil)
	hostUnknown   = prometheus.NewDesc("capstan_host_unknown_machines", "Machines on the host that belong to this management cluster and have no CapstanMachine.", []string{"host"}, nil)
	hostCPUs      = prometheus.NewDesc("capstan_host_cpu_cores", "CPUs of the host by state: capacity, allocatable.", []string{"host", "state"}, nil)
	hostMemory    = prometheus.NewDesc("capstan_host_memory_bytes", "Memory of the host by state: capacity, allocatable.", []string{"host", "state"}, nil)
	hostDisk      = prometheus.NewDesc("capstan_host_disk_bytes", "Disk space of the host by state: capacity, allocatable.", []string{"host", "state"}, nil)
	machines      = prometheus.NewDesc("capstan_machines", "CapstanMachines of a cluster by state: the reason of the first condition that is not True, or Running.", []string{"namespace", "cluster", "state"}, nil)
	pools         = prometheus.NewDesc("capstan_machine_pool_machines", "Machines of a CapstanMachinePool by state: existing, ready, available, up_to_date.", []string{"namespace", "name", "state"}, nil)
	restarts      = prometheus.NewDesc("capstan_machine_restarts", "Restarts of PID 1 of the existing machines of a cluster.", []string{"namespace", "cluster"}, nil)
)

// collector computes the metrics. Before Serve it has none.
type collector struct{ reader atomic.Pointer[client.Reader] }

var collected = &collector{}

func init() { ctrlmetrics.Registry.MustRegister(collected) }

// Serve computes the metrics from the objects of the reader, which must be a cache, from now on.
func Serve(reader client.Reader) { collected.reader.Store(&reader) }

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{hostConnected, hostMachines, hostUnknown, hostCPUs, hostMemory, hostDisk, machines, pools, restarts} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	reader := c.reader.Load()
	if reader == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeLimit)
	defer cancel()
	hosts, existing, ofPools := &infrav1.CapstanHostList{}, &infrav1.CapstanMachineList{}, &infrav1.CapstanMachinePoolList{}
	for _, list := range []client.ObjectList{hosts, existing, ofPools} {
		if err := (*reader).List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			ctrllog.Log.WithName("inventory").V(1).Info("No metrics of hosts, machines and pools yet", "cause", err.Error())
			return
		}
	}
	for i := range hosts.Items {
		collectHost(&hosts.Items[i], out)
	}
	collectMachines(existing.Items, out)
	for i := range ofPools.Items {
		collectPool(&ofPools.Items[i], out)
	}
}

func collectHost(h *infrav1.CapstanHost, out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, append([]string{h.Name}, labels...)...)
	}
	connected := 0.0
	if apimeta.IsStatusConditionTrue(h.Status.Conditions, infrav1.HostConnectedCondition) {
		connected = 1
	}
	gauge(hostConnected, connected, h.Spec.FailureDomain)
	gauge(hostMachines, float64(ptr.Deref(h.Status.Machines, 0)))
	gauge(hostUnknown, float64(len(h.Status.UnknownMachines)))
	for state, resources := range map[string]corev1.ResourceList{capacity: h.Status.Capacity, allocatable: h.Status.Allocatable} {
		for name, d := range map[corev1.ResourceName]*prometheus.Desc{corev1.ResourceCPU: hostCPUs, corev1.ResourceMemory: hostMemory, corev1.ResourceEphemeralStorage: hostDisk} {
			if quantity, found := resources[name]; found {
				gauge(d, quantity.AsApproximateFloat64(), state)
			}
		}
	}
}

func collectPool(p *infrav1.CapstanMachinePool, out chan<- prometheus.Metric) {
	st := &p.Status
	for state, n := range map[string]*int32{"existing": st.Replicas, "ready": st.ReadyReplicas, "available": st.AvailableReplicas, "up_to_date": st.UpToDateReplicas} {
		out <- prometheus.MustNewConstMetric(pools, prometheus.GaugeValue, float64(ptr.Deref(n, 0)), p.Namespace, p.Name, state)
	}
}

// of is a cluster, and the state of some of its machines.
type of struct{ namespace, cluster, state string }

func collectMachines(existing []infrav1.CapstanMachine, out chan<- prometheus.Metric) {
	states, restarted := map[of]int{}, map[of]int32{}
	for i := range existing {
		m := &existing[i]
		cluster := of{namespace: m.Namespace, cluster: m.Labels[clusterv1.ClusterNameLabel]}
		restarted[cluster] += ptr.Deref(m.Status.Restarts, 0)
		cluster.state = stateOf(m)
		states[cluster]++
	}
	for c, n := range states {
		out <- prometheus.MustNewConstMetric(machines, prometheus.GaugeValue, float64(n), c.namespace, c.cluster, c.state)
	}
	for c, n := range restarted {
		out <- prometheus.MustNewConstMetric(restarts, prometheus.GaugeValue, float64(n), c.namespace, c.cluster)
	}
}

// progress lists the conditions of a machine in the order in which they become True.
var progress = []string{
	infrav1.HostAssignedCondition, infrav1.AddressesAssignedCondition, infrav1.MachineRunningCondition, infrav1.BootstrapSucceededCondition, infrav1.ServicesHealthyCondition,
}

// stateOf returns Running, Deleting, Pending, or the reason of the first condition that is not True.
func stateOf(m *infrav1.CapstanMachine) string {
	if !m.DeletionTimestamp.IsZero() {
		return "Deleting"
	}
	for _, kind := range progress {
		c := apimeta.FindStatusCondition(m.Status.Conditions, kind)
		switch {
		case c == nil:
			return "Pending"
		case c.Status != metav1.ConditionTrue:
			return c.Reason
		}
	}
	return "Running"
}
