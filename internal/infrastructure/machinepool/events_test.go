package machinepool

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/testevents"
)

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
