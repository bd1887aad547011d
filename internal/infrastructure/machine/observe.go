package machine

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// observe writes the host's report of the machine to status, and emits an event when the machine became unhealthy.
func (r *Reconciler) observe(s *scope, status *hostpb.MachineStatus) {
	s.capstan.Status.Restarts = ptr.To(status.GetRestarts())
	for _, c := range []metav1.Condition{running(status), bootstrap(status), services(status)} {
		before := conditions.GetReason(s.capstan, c.Type)
		conditions.Set(s.capstan, c)
		if isBad(c.Reason) && before != c.Reason {
			r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, c.Reason, "Observe", "%s", cmp.Or(c.Message, c.Reason))
		}
	}
}

func isBad(reason string) bool {
	switch reason {
	case infrav1.MachineFailedReason, infrav1.MachineLostReason, infrav1.MachineRestartingReason, infrav1.BootstrapFailedReason, infrav1.BootstrapStalledReason, infrav1.ServicesUnhealthyReason,
		infrav1.MachineFencedReason:
		return true
	}
	return false
}

func running(s *hostpb.MachineStatus) metav1.Condition {
	c := metav1.Condition{Type: infrav1.MachineRunningCondition, Status: metav1.ConditionFalse, Message: s.GetMessage()}
	switch s.GetPhase() {
	case hostpb.MachineStatus_RUNNING:
		c.Status, c.Reason = metav1.ConditionTrue, infrav1.MachineRunningReason
	case hostpb.MachineStatus_RESTARTING:
		c.Reason = infrav1.MachineRestartingReason
	case hostpb.MachineStatus_FAILED:
		if s.GetDiskLost() {
			c.Reason = infrav1.MachineLostReason
			c.Message = cmp.Or(s.GetMessage(), "The disk of the machine is lost") + ". Delete the Machine to replace it"
			break
		}
		c.Reason = infrav1.MachineFailedReason
		c.Message = cmp.Or(s.GetMessage(), "The machine failed") + ". To start it now, annotate the CapstanMachine with " + infrav1.MachineStartAnnotation + "; to replace it, delete the Machine"
	case hostpb.MachineStatus_DELETING:
		c.Reason = clusterv1.DeletingReason
	default:
		c.Reason = infrav1.MachineStartingReason
		if s.GetFenced() {
			c.Reason = infrav1.MachineFencedReason
		}
	}
	return c
}

// bootstrap shows whether the bootstrap data was applied (IM-08).
func bootstrap(s *hostpb.MachineStatus) metav1.Condition {
	c := metav1.Condition{Type: infrav1.BootstrapSucceededCondition, Status: metav1.ConditionFalse, Message: s.GetBootstrapMessage()}
	switch s.GetBootstrap() {
	case hostpb.MachineStatus_SUCCEEDED:
		c.Status, c.Reason = metav1.ConditionTrue, infrav1.BootstrapSucceededReason
	case hostpb.MachineStatus_BOOTSTRAP_FAILED:
		c.Reason = infrav1.BootstrapFailedReason
		c.Message = cmp.Or(c.Message, "The bootstrap failed") + ". See `capstan logs`; delete the Machine to replace it"
	default:
		c.Reason = infrav1.BootstrapRunningReason
		if c.Message != "" {
			c.Reason = infrav1.BootstrapStalledReason
			c.Message += ". The machine continues to try. See `capstan logs`; delete the Machine to replace it"
		}
	}
	return c
}

// services sums up the machine's services. While they start the message stays the same, so that
// a machine that boots is not written with every step. The bootstrap starts more services: until its end, the services
// count as starting.
func services(s *hostpb.MachineStatus) metav1.Condition {
	c := metav1.Condition{Type: infrav1.ServicesHealthyCondition, Status: metav1.ConditionTrue, Reason: infrav1.ServicesHealthyReason}
	var bad []string
	ended := s.GetBootstrap() == hostpb.MachineStatus_SUCCEEDED || s.GetBootstrap() == hostpb.MachineStatus_BOOTSTRAP_FAILED
	starting := !ended || len(s.GetServices()) == 0
	for _, svc := range s.GetServices() {
		switch svc.GetState() {
		case "running", "ready":
		case "waiting", "starting":
			starting = true
		default:
			bad = append(bad, strings.TrimSpace(fmt.Sprintf("%s: %s %s", svc.GetName(), svc.GetState(), svc.GetMessage())))
		}
	}
	switch {
	case s.GetPhase() != hostpb.MachineStatus_RUNNING:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, infrav1.ServicesStartingReason, "The machine does not run"
	case len(bad) > 0:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, infrav1.ServicesUnhealthyReason, strings.Join(bad, "; ")
	case starting:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, infrav1.ServicesStartingReason, "Services are starting"
	}
	return c
}
