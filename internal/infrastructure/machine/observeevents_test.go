package machine

import (
	"testing"

	"k8s.io/client-go/tools/events"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// TestUnhealthyMachineEvents: a running machine that fails has one event.
func TestUnhealthyMachineEvents(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	r, s := &Reconciler{recorder: recorder}, &scope{capstan: &infrav1.CapstanMachine{}}
	for _, test := range []struct {
		phase hostpb.MachineStatus_Phase
		want  string
	}{
		{hostpb.MachineStatus_RUNNING, ""},
		{hostpb.MachineStatus_RESTARTING, "Warning MachineRestarting PID 1 ended"},
		{hostpb.MachineStatus_RESTARTING, ""},
		{hostpb.MachineStatus_RUNNING, ""},
		{hostpb.MachineStatus_RESTARTING, "Warning MachineRestarting PID 1 ended"},
	} {
		r.observe(s, &hostpb.MachineStatus{Phase: test.phase, Message: "PID 1 ended"})
		got := ""
		select {
		case got = <-recorder.Events:
		default:
		}
		if got != test.want {
			t.Errorf("%s: event %q, want %q", test.phase, got, test.want)
		}
	}
}
