package machinepool

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// TestDrainMembers: an update waits until the pods of its Node have left. The CapstanMachine records it before the Node is
// cordoned, and the record disappears after the Node was uncordoned. Without drainBeforeUpdate nothing is drained.
func TestDrainMembers(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	m := member{
		capstan: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "m"}},
		machine: &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "m"}},
	}
	m.machine.Status.NodeRef.Name = "m"
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: corev1.PodSpec{NodeName: "m"}}
	workload := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "m"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}).
		WithIndex(&corev1.Pod{}, "spec.nodeName", func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).Build()
	management := fake.NewClientBuilder().WithScheme(scheme).WithObjects(m.capstan).Build()
	connected := true
	r := &Reconciler{Options: reconciling.Options{LiveClient: management}, Client: management, Workload: func(context.Context, *clusterv1.Cluster) (client.Client, error) {
		if !connected {
			return nil, errors.New("refused")
		}
		return workload, nil
	}}
	s := &scope{pool: &infrav1.CapstanMachinePool{}, cluster: &clusterv1.Cluster{}, machinePool: &clusterv1.MachinePool{}}
	byName := map[string]member{"m": m}
	state := func() (recorded, cordoned bool) {
		capstan, node := &infrav1.CapstanMachine{}, &corev1.Node{}
		if err := errors.Join(management.Get(t.Context(), client.ObjectKeyFromObject(m.capstan), capstan), workload.Get(t.Context(), client.ObjectKey{Name: "m"}, node)); err != nil {
			t.Fatal(err)
		}
		return member{capstan: capstan}.isDrained(), node.Spec.Unschedulable
	}
	drain := func(what string, ready int, waits string) {
		t.Helper()
		s.draining = ""
		got, err := r.drained(t.Context(), s, []string{"m"}, byName)
		if err != nil || len(got) != ready || !strings.Contains(s.draining, waits) || (s.draining == "") != (waits == "") {
			t.Errorf("%s: ready %v, waits %q, %v", what, got, s.draining, err)
		}
	}

	drain("without drainBeforeUpdate", 1, "")
	if recorded, cordoned := state(); recorded || cordoned {
		t.Errorf("recorded %v, cordoned %v without drainBeforeUpdate", recorded, cordoned)
	}
	s.pool.Spec.RollingUpdate.DrainBeforeUpdate = ptr.To(true)
	connected = false
	if got, err := r.drained(t.Context(), s, []string{"m"}, byName); err == nil || len(got) > 0 {
		t.Errorf("without a connection: %v, %v", got, err)
	}
	connected = true
	drain("a pod", 0, "1 pods have to leave the Node m")
	drain("no pod", 1, "")
	if recorded, cordoned := state(); !recorded || !cordoned {
		t.Errorf("recorded %v, cordoned %v", recorded, cordoned)
	}
	if err := r.uncordon(t.Context(), s, []string{"m"}, byName); err != nil {
		t.Fatal(err)
	}
	if recorded, cordoned := state(); recorded || cordoned {
		t.Errorf("recorded %v, cordoned %v after the update", recorded, cordoned)
	}
}

// TestUncordonAfterRefusal: the Node is uncordoned when its host has refused the update. An update that waits for capacity, or for its data,
// begins later by itself, so its Node stays drained.
func TestUncordonAfterRefusal(t *testing.T) {
	for name, test := range map[string]struct {
		reason     string
		id         string
		uncordoned bool
	}{
		"refused":                       {infrav1.UpdateRefusedReason, "u", true},
		"a former spec was refused":     {infrav1.UpdateRefusedReason, "", false},
		"no capacity":                   {infrav1.NoCapacityReason, "u", false},
		"no data":                       {infrav1.WaitingForUpdateReason, "", false},
		"the host carries out the next": {infrav1.UpdateRunningReason, "u", false},
	} {
		m := aMember(func(m *infrav1.CapstanMachine) {
			m.Annotations[clusterv1.UpdateInProgressAnnotation], m.Annotations[infrav1.MachineDrainAnnotation] = "", ""
			reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, test.reason, "no")
		})
		all, _ := instances([]member{m}, desired{hash: "old", updating: updateInput{policy: infrav1.InPlaceOnly, id: test.id}}, epoch)
		if uncordoned := len(toUncordon(all, nil)) > 0; uncordoned != test.uncordoned {
			t.Errorf("%s: uncordoned %v, expected %v", name, uncordoned, test.uncordoned)
		}
	}
}
