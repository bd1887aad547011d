package machine

import (
	"strings"
	"testing"

	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// ALL-18: the condition of a refused update does not name the owner of an id, which can be in another namespace.
func TestRefusedUpdateNamesNoOwner_ALL18(t *testing.T) {
	for _, reason := range []hostpb.Refusal_Reason{hostpb.Refusal_ID_IN_USE, hostpb.Refusal_NOT_OWNER} {
		m, r := &infrav1.CapstanMachine{}, &Reconciler{recorder: events.NewFakeRecorder(10)}
		err := r.updateRefused(m, &connections.Host{}, refusal.Errorf(reason, "volume v belongs to team-a/payments"), false)
		if message := conditions.GetMessage(m, infrav1.UpdatingCondition); err == nil || !strings.Contains(message, "is a copy") || strings.Contains(message, "payments") {
			t.Errorf("%s: error %v, condition %q", reason, err, message)
		}
	}
}

// TestMirrorUpdate: a report of another update than the recorded one does not get the version and the generation of that one.
func TestMirrorUpdate(t *testing.T) {
	recorded := infrav1.MachineUpdateStatus{ID: "b", Phase: infrav1.UpdateRunning, KubernetesVersion: "v1.36.3", ConfigUpdateID: "u", ObservedGeneration: 4}
	ended := recorded
	ended.Phase = infrav1.UpdateSucceeded
	for name, test := range map[string]struct {
		report *hostpb.UpdateStatus
		want   infrav1.MachineUpdateStatus
	}{
		"no report":      {nil, recorded},
		"of this update": {&hostpb.UpdateStatus{Id: "b", Phase: hostpb.UpdateStatus_SUCCEEDED}, ended},
		"of another one": {&hostpb.UpdateStatus{Id: "a", Phase: hostpb.UpdateStatus_SUCCEEDED}, infrav1.MachineUpdateStatus{ID: "a", Phase: infrav1.UpdateSucceeded}},
	} {
		got := recorded
		if mirrorUpdate(&got, test.report); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
