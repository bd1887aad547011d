package machinepool

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/testevents"
)

// TestControlPlaneMachine: the Machines of a control plane wake the pools of its cluster, which may wait for its version.
func TestControlPlaneMachine(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	pool := func(namespace, name, cluster string) *infrav1.CapstanMachinePool {
		return &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: cluster},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "MachinePool", Name: name}},
		}}
	}
	r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(pool("a", "own", "c"), pool("a", "other", "d"), pool("b", "elsewhere", "c")).Build()}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Labels: map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachineControlPlaneLabel: ""}}}
	if got := r.ofMachine(t.Context(), machine); len(got) != 1 || got[0].Name != "own" {
		t.Errorf("%v", got)
	}
}

// TestFailedReads_ALL13: an event whose read fails is lost, so the log shows it.
func TestFailedReads_ALL13(t *testing.T) {
	ofObject := func(mapper func(*Reconciler, context.Context, client.Object) []reconcile.Request, o client.Object) testevents.Mapper {
		return func(ctx context.Context, c client.Client) []reconcile.Request {
			return mapper(&Reconciler{Client: c}, ctx, o)
		}
	}
	pool := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	machine := &clusterv1.Machine{}
	machine.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pool, clusterv1.GroupVersion.WithKind("MachinePool"))}
	testevents.LogFailedReads(t, map[string]testevents.Mapper{
		"a Machine":   ofObject((*Reconciler).ofMachine, machine),
		"a Cluster":   ofObject((*Reconciler).ofCluster, &clusterv1.Cluster{}),
		"a host":      ofObject((*Reconciler).all, &infrav1.CapstanHost{}),
		"a Namespace": ofObject((*Reconciler).ofNamespace, &corev1.Namespace{}),
	})
}
