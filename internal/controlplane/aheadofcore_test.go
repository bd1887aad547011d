package controlplane

import (
	"context"
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// untouched is a client that fails the test at any read or write.
type untouched struct{ client.Client }

// Rows CP-02 and ALL-15: with --strict-contract, only the endpoint of the Cluster is used, and core does its own steps.
// TestPreparesBeforeProvisioned proves that the endpoint of the infrastructure object is used without the flag.
func TestStrictContract_CP02_ALL15(t *testing.T) {
	r := newReconciler(untouched{}, nil, reconciling.Options{LiveClient: untouched{}, StrictContract: true})
	s := &scope{ControlPlane: &model.ControlPlane{Cluster: &clusterv1.Cluster{}, Object: &controlplanev1.CapstanControlPlane{}, Workload: model.NotAsked(), Now: time.Now()}}
	s.Cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanCluster", Name: "demo"}
	if done, err := r.infrastructure.findEndpoint(context.Background(), s); done || err != nil {
		t.Errorf("without an endpoint on the Cluster: %v, %v", done, err)
	}
	s.Cluster.Spec.ControlPlaneEndpoint = somewhere
	if done, err := r.infrastructure.findEndpoint(context.Background(), s); !done || err != nil || s.endpoint != somewhere {
		t.Errorf("with an endpoint on the Cluster: %v, %v, %v", done, err, s.endpoint)
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

// TestHandOverAfterConflict: the Machine replaces the control plane as an owner, and an owner that another client has added
// since the object was created remains.
func TestHandOverAfterConflict(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	object := &corev1.ConfigMap{ObjectMeta: cluster.Meta("handed-over")}
	object.OwnerReferences = []metav1.OwnerReference{{APIVersion: controlplanev1.GroupVersion.String(), Kind: controlplanev1.ControlPlaneKind, Name: "demo", UID: "cp"}}
	cluster.Create(object)
	added := object.DeepCopy()
	added.OwnerReferences = append(added.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Secret", Name: "other", UID: "other"})
	if err := env.Client.Update(context.Background(), added); err != nil {
		t.Fatal(err)
	}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: "m", UID: "m"}}
	r := &machines{clients: &clients{Client: env.Client, LiveClient: env.Client}}
	if err := r.handOver(context.Background(), machine, object); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Get(object); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"Secret/other": false, "Machine/m": true}
	got := map[string]bool{}
	for _, ref := range object.OwnerReferences {
		got[ref.Kind+"/"+ref.Name] = ptr.Deref(ref.Controller, false)
	}
	if !maps.Equal(got, want) {
		t.Errorf("owners and whether they control: got %v, want %v", got, want)
	}
}
