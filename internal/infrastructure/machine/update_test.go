package machine

import (
	"testing"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

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
