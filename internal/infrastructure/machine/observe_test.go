package machine

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/host/hostpb"
)

// ALL-09, ALL-16, IM-08: the conditions for each report of a host.
func TestConditionsOfAMachine(t *testing.T) {
	svc := func(states ...string) (out []*hostpb.ServiceStatus) {
		for i, s := range states {
			out = append(out, &hostpb.ServiceStatus{Name: string(rune('a' + i)), State: s, Message: "why"})
		}
		return out
	}
	const runs, succeeded = hostpb.MachineStatus_RUNNING, hostpb.MachineStatus_SUCCEEDED
	for name, tc := range map[string]struct {
		got                     metav1.Condition
		status, reason, message string
	}{
		"pending":    {running(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_PENDING}), "False", "MachineStarting", ""},
		"runs":       {running(&hostpb.MachineStatus{Phase: runs}), "True", "MachineRunning", ""},
		"restarting": {running(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_RESTARTING, Message: "exit 1"}), "False", "MachineRestarting", "exit 1"},
		"failed": {
			running(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_FAILED, Message: "no memory"}), "False", "MachineFailed",
			"no memory. To start it now, annotate the CapstanMachine with infrastructure.capstan.dev/start; to replace it, delete the Machine",
		},
		"disk lost": {
			running(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_FAILED, Message: "the disk is lost", DiskLost: true}), "False", "MachineLost",
			"the disk is lost. Delete the Machine to replace it",
		},
		"deleting":          {running(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_DELETING}), "False", "Deleting", ""},
		"bootstrap waits":   {bootstrap(&hostpb.MachineStatus{Bootstrap: hostpb.MachineStatus_WAITING}), "False", "BootstrapRunning", ""},
		"bootstrap started": {bootstrap(&hostpb.MachineStatus{Bootstrap: hostpb.MachineStatus_STARTED}), "False", "BootstrapRunning", ""},
		"bootstrap stalled": {
			bootstrap(&hostpb.MachineStatus{Bootstrap: hostpb.MachineStatus_STARTED, BootstrapMessage: "etcd: starting"}), "False", "BootstrapStalled",
			"etcd: starting. The machine continues to try. See `capstan logs`; delete the Machine to replace it",
		},
		"bootstrap done": {bootstrap(&hostpb.MachineStatus{Bootstrap: hostpb.MachineStatus_SUCCEEDED}), "True", "BootstrapSucceeded", ""},
		"bootstrap failed": {
			bootstrap(&hostpb.MachineStatus{Bootstrap: hostpb.MachineStatus_BOOTSTRAP_FAILED, BootstrapMessage: "runcmd 2"}), "False", "BootstrapFailed",
			"runcmd 2. See `capstan logs`; delete the Machine to replace it",
		},
		"no services yet":            {services(&hostpb.MachineStatus{Phase: runs, Bootstrap: succeeded}), "False", "ServicesStarting", "Services are starting"},
		"services start":             {services(&hostpb.MachineStatus{Phase: runs, Bootstrap: succeeded, Services: svc("ready", "starting")}), "False", "ServicesStarting", "Services are starting"},
		"more services will start":   {services(&hostpb.MachineStatus{Phase: runs, Bootstrap: hostpb.MachineStatus_STARTED, Services: svc("running")}), "False", "ServicesStarting", "Services are starting"},
		"services run":               {services(&hostpb.MachineStatus{Phase: runs, Bootstrap: succeeded, Services: svc("ready", "running")}), "True", "ServicesHealthy", ""},
		"only some services ran":     {services(&hostpb.MachineStatus{Phase: runs, Bootstrap: hostpb.MachineStatus_BOOTSTRAP_FAILED, Services: svc("running")}), "True", "ServicesHealthy", ""},
		"a service backs off":        {services(&hostpb.MachineStatus{Phase: runs, Services: svc("ready", "backoff", "stopped")}), "False", "ServicesUnhealthy", "b: backoff why; c: stopped why"},
		"services of a dead machine": {services(&hostpb.MachineStatus{Phase: hostpb.MachineStatus_FAILED, Services: svc("ready")}), "False", "ServicesStarting", "The machine does not run"},
	} {
		t.Run(name, func(t *testing.T) {
			if string(tc.got.Status) != tc.status || tc.got.Reason != tc.reason || tc.got.Message != tc.message {
				t.Errorf("got %+v", tc.got)
			}
		})
	}
}
