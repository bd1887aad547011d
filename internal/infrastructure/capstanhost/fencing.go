package capstanhost

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// fencingStep is the next step towards the fencing of spec.
type fencingStep int

const (
	fencingDone fencingStep = iota
	// fencingForget clears status.fencing. It comes before fencingSend, so that status never contains a value that is not in
	// effect: the answer to a request can be lost.
	fencingForget
	// fencingSend sends the value of spec, and fencingRecord writes it to status.
	fencingSend
	fencingRecord
)

// nextFencing decides the next step. A value of 0 means none. inEffect is the value that a connected host reports.
func nextFencing(wanted, recorded, inEffect int32) fencingStep {
	switch {
	case recorded != 0 && (recorded != wanted || inEffect != wanted):
		return fencingForget
	case inEffect != wanted:
		return fencingSend
	case recorded != wanted:
		return fencingRecord
	}
	return fencingDone
}

// reconcileFencing makes the host stop its machines as spec.fencing says, and shows whether it has acknowledged that.
func (r *Reconciler) reconcileFencing(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) error {
	wanted := ptr.Deref(host.Spec.Fencing.StopAfterSeconds, 0)
	recorded := ptr.Deref(host.Status.Fencing.StopAfterSeconds, 0)
	if conn.ConnectionError() != nil {
		if recorded != wanted {
			host.Status.Fencing = infrav1.HostFencing{}
			showFencing(host, metav1.ConditionUnknown, infrav1.HostFencingPendingReason, "The host is not connected")
		}
		return nil
	}
	id, err := connections.ManagementCluster(ctx, r.Client)
	if err != nil {
		return err
	}
	inEffect := fencingOf(conn.Info(), id)
	if inEffect != wanted {
		if first := r.Pool.WithID(conn.ID()); len(first) > 1 && first[0] != host.Name {
			host.Status.Fencing = infrav1.HostFencing{}
			showFencing(host, metav1.ConditionFalse, infrav1.HostFencingConflictReason,
				fmt.Sprintf("CapstanHost %s is the same host, and its spec.fencing is in effect: set both to the same value, or delete one", first[0]))
			return nil
		}
	}
	switch nextFencing(wanted, recorded, inEffect) {
	case fencingForget:
		host.Status.Fencing = infrav1.HostFencing{}
		showFencing(host, metav1.ConditionUnknown, infrav1.HostFencingPendingReason, "The setting changes")
		return nil // The change of the status is the event.
	case fencingSend:
		_, err := conn.SetFencing(ctx, &hostpb.SetFencingRequest{ManagementCluster: id, StopAfterSeconds: wanted})
		if connections.Code(err) == codes.Unimplemented {
			showFencing(host, metav1.ConditionFalse, infrav1.HostFencingUnsupportedReason,
				fmt.Sprintf("capstand %s never stops machines: upgrade it", conn.Info().GetCapstandVersion()))
			return nil
		}
		if err != nil {
			return fmt.Errorf("set the fencing of the host: %s", connections.Message(err))
		}
		showFencing(host, metav1.ConditionUnknown, infrav1.HostFencingPendingReason, "The host has received the setting and not reported it yet")
		return nil // The report is the event.
	}
	if wanted != 0 {
		host.Status.Fencing.StopAfterSeconds = ptr.To(wanted)
	}
	showFencing(host, metav1.ConditionTrue, infrav1.HostFencingSetReason, "")
	return nil
}

// showFencing sets the condition, or removes it if spec asks for nothing.
func showFencing(host *infrav1.CapstanHost, status metav1.ConditionStatus, reason, message string) {
	if host.Spec.Fencing.StopAfterSeconds == nil {
		conditions.Delete(host, infrav1.HostFencingCondition)
		return
	}
	reconciling.SetCondition(host, infrav1.HostFencingCondition, status, reason, "%s", message)
}

// fencingOf returns the seconds that are in effect on a host for a management cluster.
func fencingOf(info *hostpb.HostInfo, managementCluster string) int32 {
	for _, f := range info.GetFencing() {
		if f.GetManagementCluster() == managementCluster {
			return f.GetStopAfterSeconds()
		}
	}
	return 0
}
