package machinepool

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// MP-01: the fields of an instance. It is ready while its Node has been ready for minReadySeconds. Its version is that of the Node, and
// before there is a Node that of the pool.
func TestDescribeInstance_MP01(t *testing.T) {
	const minReady = time.Hour
	since := func(d time.Duration, status metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{{Type: clusterv1.ReadyCondition, Status: status, LastTransitionTime: metav1.NewTime(time.Now().Add(-d))}}
	}
	for name, tc := range map[string]struct {
		node       string
		conditions []metav1.Condition
		version    string
		ready      bool
	}{
		"no Node":                {version: "v1.36.4"},
		"a Node that is not yet": {"v1.36.3", since(2*minReady, metav1.ConditionFalse), "v1.36.3", false},
		"ready for too short":    {"v1.36.3", since(time.Minute, metav1.ConditionTrue), "v1.36.3", false},
		"ready":                  {"v1.36.3", since(2*minReady, metav1.ConditionTrue), "v1.36.3", true},
	} {
		m := member{capstan: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{
			Name: "m", Annotations: map[string]string{infrav1.MachineVersionAnnotation: "v1.36.4"},
		}}}
		m.capstan.Spec.ProviderID = "capstan://1"
		m.capstan.Status.Addresses = []clusterv1.MachineAddress{{Type: clusterv1.MachineInternalIP, Address: "10.1.0.2"}}
		if tc.node != "" {
			m.machine = &clusterv1.Machine{}
			m.machine.Status.NodeRef.Name, m.machine.Status.NodeInfo = "m", &corev1.NodeSystemInfo{KubeletVersion: tc.node}
			m.machine.Status.Conditions = tc.conditions
		}
		got := describeInstance(m, minReady, time.Now())
		if got.InstanceName != "m" || got.ProviderID != "capstan://1" || len(got.Addresses) != 1 || got.Addresses[0].Address != "10.1.0.2" {
			t.Errorf("%s: %+v", name, got)
		}
		if got.Version != tc.version || ptr.Deref(got.Ready, !tc.ready) != tc.ready {
			t.Errorf("%s: version %s, ready %v, want %s, %v", name, got.Version, got.Ready, tc.version, tc.ready)
		}
	}
}

// A machine is ready while its Machine is, and available after minReadySeconds. A machine that is being deleted is neither.
func TestReadyAndAvailable(t *testing.T) {
	now := time.Now()
	of := func(name string, status metav1.ConditionStatus, since time.Duration) member {
		m := member{capstan: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Name: name}}, machine: &clusterv1.Machine{}}
		m.machine.Status.NodeRef.Name = name
		m.machine.Status.Conditions = []metav1.Condition{{Type: clusterv1.ReadyCondition, Status: status, LastTransitionTime: metav1.NewTime(now.Add(-since))}}
		return m
	}
	leaving := of("leaving", metav1.ConditionTrue, time.Hour)
	leaving.capstan.DeletionTimestamp = ptr.To(metav1.NewTime(now))
	pool := &infrav1.CapstanMachinePool{}
	setStatus(&scope{pool: pool, machinePool: &clusterv1.MachinePool{}, observed: observed{
		members: []member{of("new", metav1.ConditionTrue, time.Second), of("available", metav1.ConditionTrue, time.Hour), of("broken", metav1.ConditionFalse, time.Hour), leaving},
		want:    desired{replicas: 3, minReady: time.Minute},
	}}, now)
	if ready, available := ptr.Deref(pool.Status.ReadyReplicas, -1), ptr.Deref(pool.Status.AvailableReplicas, -1); ready != 2 || available != 1 {
		t.Errorf("%d ready and %d available machines, want 2 and 1", ready, available)
	}
}

// TestMissingDomains: the condition names the failure domains that the cluster lacks, although the pool goes on in the others.
func TestMissingDomains(t *testing.T) {
	for replicas, status := range []metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse} {
		pool := &infrav1.CapstanMachinePool{}
		setConditions(&scope{pool: pool, observed: observed{want: desired{replicas: replicas, missing: []string{"mars"}}}}, numbers{})
		ready := conditions.Get(pool, clusterv1.ReadyCondition)
		if ready == nil || ready.Status != status || !strings.Contains(ready.Message, "names mars, which the cluster does not have") {
			t.Errorf("%d replicas: %+v", replicas, ready)
		}
	}
}

// MP-02: the name of a machine becomes its host name, also in a pool with a long name.
func TestNamesOfMachines_MP02(t *testing.T) {
	for _, length := range []int{1, 57, 58, 63, 253} {
		s := &scope{pool: &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("p", length)}}, machinePool: &clusterv1.MachinePool{}}
		name := newMachine(s, "").Name
		if problems := validation.IsDNS1123Label(name); len(problems) > 0 || !strings.HasPrefix(name, s.pool.Name[:min(length, 57)]+"-") {
			t.Errorf("a pool with a name of %d letters: the machine %q: %v", length, name, problems)
		}
	}
}

// MP-02: a pool whose name is cut after a dot or a dash gets machines.
func TestNamesOfMachinesAfterADot_MP02(t *testing.T) {
	for _, name := range []string{strings.Repeat("p", 56) + ".x", strings.Repeat("p", 56) + "-x", strings.Repeat("p", 55) + "--x"} {
		if problems := validation.IsDNS1123Subdomain(namePrefix(name) + "abcde"); len(problems) > 0 {
			t.Errorf("a pool %s: machines %sabcde: %v", name, namePrefix(name), problems)
		}
	}
}

// MP-05, ALL-12: ready and provisioned are set when the pool is complete, and stay. A move loses the status, and the pool that arrives may
// lack machines, or be invalid.
func TestProvisionedSurvivesAMove_MP05(t *testing.T) {
	members := func(n, failed int) (out []member) {
		for range n {
			m := member{capstan: &infrav1.CapstanMachine{}}
			m.capstan.Spec.ProviderID = "capstan://1"
			out = append(out, m)
		}
		for range failed {
			m := member{capstan: &infrav1.CapstanMachine{}}
			conditions.Set(m.capstan, metav1.Condition{Type: infrav1.MachineRunningCondition, Status: metav1.ConditionFalse, Reason: infrav1.MachineFailedReason, Message: "no start"})
			out = append(out, m)
		}
		return out
	}
	complete := map[string]string{infrav1.PoolProvisionedAnnotation: ""}
	refused := &invalid{infrav1.PoolInvalidVersionReason, "invalid"}
	for name, tc := range map[string]struct {
		annotations          map[string]string
		status               bool
		machines, failed     int
		replicas             int
		invalid              *invalid
		provisioned, records bool
	}{
		"a new pool, not complete":              {replicas: 3, machines: 2},
		"a new pool that is invalid":            {replicas: 3, machines: 3, invalid: refused},
		"complete":                              {replicas: 3, machines: 3, provisioned: true, records: true},
		"complete, and others failed":           {replicas: 3, machines: 1, failed: 2, provisioned: true, records: true},
		"all failed":                            {replicas: 3, failed: 3},
		"no machines are wanted":                {provisioned: true, records: true},
		"after a move, not complete":            {replicas: 3, annotations: complete, machines: 2, provisioned: true, records: true},
		"after a move, without machines":        {replicas: 3, annotations: complete, provisioned: true, records: true},
		"after a move, invalid":                 {replicas: 3, annotations: complete, machines: 3, invalid: refused, provisioned: true, records: true},
		"from a manager without the annotation": {replicas: 3, status: true, machines: 2, provisioned: true, records: true},
	} {
		t.Run(name, func(t *testing.T) {
			pool := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: tc.annotations}}
			if tc.status {
				pool.Status.Initialization.Provisioned = ptr.To(true)
			}
			setStatus(&scope{pool: pool, machinePool: &clusterv1.MachinePool{}, observed: observed{members: members(tc.machines, tc.failed), want: desired{replicas: tc.replicas}, invalid: tc.invalid}}, time.Now())
			ready, provisioned := ptr.Deref(pool.Status.Ready, !tc.provisioned), ptr.Deref(pool.Status.Initialization.Provisioned, false)
			if ready != tc.provisioned || provisioned != tc.provisioned {
				t.Errorf("ready %v, provisioned %v, want %v", ready, provisioned, tc.provisioned)
			}
			if _, records := pool.Annotations[infrav1.PoolProvisionedAnnotation]; records != tc.records {
				t.Errorf("annotations %v", pool.Annotations)
			}
		})
	}
}
