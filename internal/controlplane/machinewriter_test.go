package controlplane

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
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
