package controlplane

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// untouched is a client that fails the test when anything is read or written.
type untouched struct{ client.Client }

// CP-02, ALL-15: with --strict-contract the endpoint is the Cluster's and no other, and core's turns are left to core.
// Without it the endpoint of the infrastructure's object is used too, which TestPreparesBeforeProvisioned proves.
func TestStrictContract_CP02_ALL15(t *testing.T) {
	r := newReconciler(untouched{}, nil, reconciling.Options{LiveClient: untouched{}, StrictContract: true})
	s := &scope{ControlPlane: &model.ControlPlane{Cluster: &clusterv1.Cluster{}, Object: &controlplanev1.CapstanControlPlane{}, Workload: model.NotAsked(), Now: time.Now()}}
	s.Cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanCluster", Name: "demo"}
	if done, err := r.infrastructure.findEndpoint(context.Background(), s); done || err != nil {
		t.Errorf("without an endpoint on the Cluster: %v, %v", done, err)
	}
	s.Cluster.Spec.ControlPlaneEndpoint = somewhere
	if done, err := r.infrastructure.findEndpoint(context.Background(), s); !done || err != nil || s.endpoint != somewhere {
		t.Errorf("with one: %v, %v, %v", done, err, s.endpoint)
	}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: "m", UID: types.UID("u")}}
	s.Machines = collections.FromMachines(machine)
	if _, err := r.bootstrapData.reconcile(context.Background(), s); err != nil {
		t.Error(err)
	}
	if err := r.machines.handOver(context.Background(), machine, &unstructured.Unstructured{}); err != nil {
		t.Error(err)
	}
	if m := r.machines.freshMachine(s, &unstructured.Unstructured{}); len(m.Finalizers) != 0 {
		t.Errorf("the Machine has core's finalizers %v", m.Finalizers)
	}
	r.machines.strictContract = false
	if m := r.machines.freshMachine(s, &unstructured.Unstructured{}); len(m.Finalizers) != 1 {
		t.Errorf("without the flag the Machine has the finalizers %v", m.Finalizers)
	}
}
