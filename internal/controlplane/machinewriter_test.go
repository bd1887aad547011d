package controlplane

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestLongConditionMessage: the conditions of a Machine have messages from the workload cluster. The API server accepts them at any length.
func TestLongConditionMessage(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	machine, _ := cluster.Machine("demo", nil, nil)
	w := &machineWriter{clients: &clients{Client: env.Client, LiveClient: env.Client}}
	kind, message := controlplanev1.MachineEtcdMemberHealthyCondition, "The etcd member has no vote: "+strings.Repeat("x", 32768)
	if err := w.setMachineConditions(t.Context(), machine, metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: controlplanev1.NotHealthyReason, Message: message}); err != nil {
		t.Error(err)
	}
	if err := cluster.Get(machine); err != nil || !testcluster.Has(machine, kind, metav1.ConditionFalse, "The etcd member has no vote: x") {
		t.Errorf("the Machine has the conditions %+v; %v", machine.Status.Conditions, err)
	}
}

// TestConditionOfNewGeneration (ALL-09): an unchanged condition is about the present spec, as kubectl wait requires.
func TestConditionOfNewGeneration(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	machine, _ := cluster.Machine("demo", nil, nil)
	w := &machineWriter{clients: &clients{Client: env.Client, LiveClient: env.Client}}
	for seconds := range int32(2) {
		cluster.Change(machine, func() { machine.Spec.MinReadySeconds = ptr.To(seconds + 1) })
		if err := w.setMachineConditions(t.Context(), machine, model.UpToDate(nil)); err != nil {
			t.Fatal(err)
		}
		err, c := cluster.Get(machine), conditions.Get(machine, clusterv1.MachineUpToDateCondition)
		if err != nil || c == nil || c.ObservedGeneration != machine.Generation {
			t.Errorf("generation %d has the condition %+v; %v", machine.Generation, c, err)
		}
	}
}
