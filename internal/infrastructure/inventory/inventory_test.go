package inventory

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func machine(name string, restarts int32, conditions ...metav1.Condition) *infrav1.CapstanMachine {
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "a"}}}
	m.Status.Restarts, m.Status.Conditions = ptr.To(restarts), conditions
	return m
}

// is returns the conditions of a machine up to the first one that is not True.
func is(reached int, reason string) (out []metav1.Condition) {
	for i, kind := range progress {
		switch {
		case i < reached:
			out = append(out, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: "Done"})
		case i == reached:
			out = append(out, metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason})
		}
	}
	return out
}

func TestCollect(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	up, down := &infrav1.CapstanHost{}, &infrav1.CapstanHost{}
	up.Name, up.Spec.FailureDomain, down.Name = "one", "row-1", "two"
	up.Status.Conditions = []metav1.Condition{{Type: infrav1.HostConnectedCondition, Status: metav1.ConditionTrue}}
	down.Status.Conditions = []metav1.Condition{{Type: infrav1.HostConnectedCondition, Status: metav1.ConditionFalse}}
	up.Status.Machines, up.Status.UnknownMachines = ptr.To[int32](4), []infrav1.UnknownMachine{{ID: "x"}}
	up.Status.Capacity = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("16Gi"), corev1.ResourceEphemeralStorage: resource.MustParse("1k")}
	up.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m")}
	objects := []client.Object{
		up, down, machine("running", 2, is(len(progress), "")...), machine("running-too", 1, is(len(progress), "")...),
		machine("waits", 0, is(0, infrav1.NoHostReason)...), machine("new", 0), machine("fails", 0, is(3, infrav1.BootstrapFailedReason)...),
	}
	pool, empty := &infrav1.CapstanMachinePool{}, &infrav1.CapstanMachinePool{}
	pool.Namespace, pool.Name, empty.Namespace, empty.Name = "team", "workers", "team", "empty"
	pool.Status.Replicas, pool.Status.ReadyReplicas, pool.Status.UpToDateReplicas = ptr.To[int32](5), ptr.To[int32](4), ptr.To[int32](3)
	pool.Status.AvailableReplicas = ptr.To[int32](2)
	objects = append(objects, pool, empty)
	var reader client.Reader = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()
	c := &collector{}
	if n := testutil.CollectAndCount(c); n != 0 {
		t.Errorf("%d metrics without a reader", n)
	}
	c.reader.Store(&reader)
	want := `# HELP capstan_host_connected 1 if the manager is connected to capstand of the host, else 0.
# TYPE capstan_host_connected gauge
capstan_host_connected{failure_domain="",host="two"} 0
capstan_host_connected{failure_domain="row-1",host="one"} 1
# HELP capstan_host_cpu_cores CPUs of the host by state: capacity, allocatable.
# TYPE capstan_host_cpu_cores gauge
capstan_host_cpu_cores{host="one",state="allocatable"} 1.5
capstan_host_cpu_cores{host="one",state="capacity"} 8
# HELP capstan_host_disk_bytes Disk space of the host by state: capacity, allocatable.
# TYPE capstan_host_disk_bytes gauge
capstan_host_disk_bytes{host="one",state="capacity"} 1000
# HELP capstan_host_machines Machines on the host, those of other management clusters included.
# TYPE capstan_host_machines gauge
capstan_host_machines{host="one"} 4
capstan_host_machines{host="two"} 0
# HELP capstan_host_memory_bytes Memory of the host by state: capacity, allocatable.
# TYPE capstan_host_memory_bytes gauge
capstan_host_memory_bytes{host="one",state="capacity"} 1.7179869184e+10
# HELP capstan_host_unknown_machines Machines on the host that belong to this management cluster and have no CapstanMachine.
# TYPE capstan_host_unknown_machines gauge
capstan_host_unknown_machines{host="one"} 1
capstan_host_unknown_machines{host="two"} 0
# HELP capstan_machine_pool_machines Machines of a CapstanMachinePool by state: existing, ready, available, up_to_date.
# TYPE capstan_machine_pool_machines gauge
capstan_machine_pool_machines{name="empty",namespace="team",state="available"} 0
capstan_machine_pool_machines{name="empty",namespace="team",state="existing"} 0
capstan_machine_pool_machines{name="empty",namespace="team",state="ready"} 0
capstan_machine_pool_machines{name="empty",namespace="team",state="up_to_date"} 0
capstan_machine_pool_machines{name="workers",namespace="team",state="available"} 2
capstan_machine_pool_machines{name="workers",namespace="team",state="existing"} 5
capstan_machine_pool_machines{name="workers",namespace="team",state="ready"} 4
capstan_machine_pool_machines{name="workers",namespace="team",state="up_to_date"} 3
# HELP capstan_machine_restarts Restarts of PID 1 of the existing machines of a cluster.
# TYPE capstan_machine_restarts gauge
capstan_machine_restarts{cluster="a",namespace="team"} 3
# HELP capstan_machines CapstanMachines of a cluster by state: the reason of the first condition that is not True, or Running.
# TYPE capstan_machines gauge
capstan_machines{cluster="a",namespace="team",state="BootstrapFailed"} 1
capstan_machines{cluster="a",namespace="team",state="NoHost"} 1
capstan_machines{cluster="a",namespace="team",state="Pending"} 1
capstan_machines{cluster="a",namespace="team",state="Running"} 2
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.CollectAndLint(c); err != nil || len(problems) > 0 {
		t.Errorf("names of metrics: %v, %v", problems, err)
	}
}
