package machine

import (
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// What was promised to a machine is free again when its object goes before the host makes the machine, in any way.
func TestPromiseIsTakenBack(t *testing.T) {
	reconcile := func(t *testing.T, r *Reconciler, s *scope) {
		t.Helper()
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.capstan)}); err != nil {
			t.Error(err)
		}
	}
	for name, end := range map[string]func(*testing.T, *Reconciler, *scope){
		"deleted by force": reconcile,
		"abandoned": func(t *testing.T, r *Reconciler, s *scope) {
			s.capstan.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""}
			if err := r.reconcileDelete(t.Context(), s); err != nil {
				t.Error(err)
			}
		},
		"deleted by force and created again": func(t *testing.T, r *Reconciler, s *scope) {
			again := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: s.capstan.Namespace, Name: s.capstan.Name, UID: "again"}}
			if err := r.Client.Create(t.Context(), again); err != nil {
				t.Fatal(err)
			}
			reconcile(t, r, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, cluster, machine := newPlacer(t, 1)
			first, second := machine("first", "40Gi"), machine("second", "40Gi")
			first.capstan.UID = "first"
			if err := r.choose(t.Context(), first, cluster, nil); err != nil {
				t.Fatal(err)
			}
			if err := r.choose(t.Context(), second, cluster, nil); err == nil {
				t.Fatal("the memory of the host was promised twice")
			}
			end(t, r, first)
			if err := r.choose(t.Context(), second, cluster, nil); err != nil {
				t.Error(err)
			}
			if _, kept := r.promises.get(client.ObjectKeyFromObject(first.capstan)); kept {
				t.Error("the promise is kept")
			}
		})
	}
}

// What was promised to a machine is free again if the decision cannot be written.
func TestPromiseOfUnrecordedMachine(t *testing.T) {
	r, cluster, machine := newPlacer(t, 1)
	if err := r.Client.Create(t.Context(), cluster.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	first, second := machine("first", "40Gi"), machine("second", "40Gi")
	first.cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanCluster", Name: cluster.Name}
	if err := r.decide(t.Context(), first, nil); !apierrors.IsNotFound(err) {
		t.Errorf("the machine is not stored, and the decision was recorded: %v", err)
	}
	if err := r.choose(t.Context(), second, cluster, nil); err != nil {
		t.Error(err)
	}
}

// The promise to a machine outlives the reconciles of its own object.
func TestPromiseIsKept(t *testing.T) {
	r, cluster, machine := newPlacer(t, 1)
	s := machine("m", "40Gi")
	if err := r.Client.Create(t.Context(), s.capstan); err != nil {
		t.Fatal(err)
	}
	if err := r.choose(t.Context(), s, cluster, nil); err != nil {
		t.Fatal(err)
	}
	r.dropPredecessor(s.capstan)
	if !r.called(s.capstan) || r.Pool.Get("host-000").FreeMemory() != 24<<30 {
		t.Error("the promise was taken back")
	}
}
