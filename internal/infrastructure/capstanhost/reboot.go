package capstanhost

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// A reboot is requested by a time in spec. Before the request reaches the host, status records the boot that shall end. capstand
// reboots in this boot only. So a request that is sent again, or late, or by the next manager never reboots a host twice.

// rebootStep is the next step of a reboot.
type rebootStep int

const (
	// rebootNone: no reboot is requested, or it is complete.
	rebootNone rebootStep = iota
	// rebootWait for the connection to the host.
	rebootWait
	// rebootUnsupported: the host reports no boot.
	rebootUnsupported
	// rebootPrepare drains the host, and then records the boot that shall end.
	rebootPrepare
	// rebootSend asks the host. It also follows on a request whose answer was lost.
	rebootSend
	// rebootComplete: the host has another boot than the recorded one. Without a record, it has booted since the request: a record
	// does not move to another management cluster.
	rebootComplete
)

// boot of a connected host. since is a time of the manager's clock, unless capstand is too old to report its uptime.
type boot struct {
	id    string
	since time.Time
}

// nextReboot decides the next step. now is nil while the host is not connected.
func nextReboot(host *infrav1.CapstanHost, now *boot) rebootStep {
	switch {
	case !host.RebootPending():
		return rebootNone
	case now == nil:
		return rebootWait
	case now.id == "":
		return rebootUnsupported
	case host.RebootBegun() && now.id == host.Status.Reboot.BootID:
		return rebootSend
	case host.RebootBegun() || !now.since.Before(host.Spec.RebootRequestedAt.Time):
		return rebootComplete
	}
	return rebootPrepare
}

// bootOf returns the boot of a host, or nil while it is not connected.
func bootOf(conn *connections.Host) *boot {
	if conn == nil || conn.ConnectionError() != nil {
		return nil
	}
	return &boot{bootID(conn), conn.Info().GetBootedAt().AsTime()}
}

// bootID returns the boot that a host reports, or "" if it is too long for the status.
func bootID(conn *connections.Host) string {
	if id := conn.Info().GetBootId(); len(id) <= maxWord {
		return id
	}
	return ""
}

// reconcileReboot takes a step and shows it. draining is true while machines are left. It returns whether to look again soon.
func (r *Reconciler) reconcileReboot(ctx context.Context, host *infrav1.CapstanHost, step rebootStep, draining bool) (again bool, err error) {
	if host.Spec.RebootRequestedAt.IsZero() {
		host.Status.Reboot = infrav1.HostReboot{}
		conditions.Delete(host, infrav1.HostRebootedCondition)
		return false, nil
	}
	conn := r.Pool.Get(host.Name)
	switch step {
	case rebootNone:
		reconciling.KeepCondition(host, infrav1.HostRebootedCondition)
		return false, nil
	case rebootWait:
		if host.RebootBegun() {
			showReboot(host, infrav1.HostRebootingReason, "The host was asked to reboot, and is not connected yet")
		} else {
			showReboot(host, infrav1.HostRebootWaitingReason, "The host is not connected")
		}
		return false, nil // The connection is the event.
	case rebootUnsupported:
		showReboot(host, infrav1.HostRebootUnsupportedReason, fmt.Sprintf(
			"capstand %s cannot reboot the host: upgrade it, and run it as a service of systemd, or reboot the host by hand", conn.Info().GetCapstandVersion()))
		return false, nil
	case rebootPrepare:
		return true, r.prepareReboot(ctx, host, conn, draining)
	case rebootSend:
		return true, sendReboot(ctx, host, conn)
	case rebootComplete:
		host.Status.Reboot = infrav1.HostReboot{
			RequestedAt: host.Spec.RebootRequestedAt, CompletedAt: metav1.Now(), BootID: cmp.Or(host.Status.Reboot.BootID, bootID(conn)),
		}
		reconciling.SetCondition(host, infrav1.HostRebootedCondition, metav1.ConditionTrue, infrav1.HostRebootedReason, "")
		r.recorder.Eventf(host, nil, corev1.EventTypeNormal, infrav1.HostRebootedReason, "Reboot", "The host has rebooted and accepts machines")
	}
	return false, nil
}

func showReboot(host *infrav1.CapstanHost, reason, message string) {
	reconciling.SetCondition(host, infrav1.HostRebootedCondition, metav1.ConditionFalse, reason, "%s", message)
}

// prepareReboot records the boot that shall end, when no machine is left on the box.
func (r *Reconciler) prepareReboot(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host, draining bool) error {
	if draining {
		showReboot(host, infrav1.HostRebootDrainingReason, "The host is rebooted when it has no machines: see the condition Drained")
		return nil
	}
	if n := conn.Info().GetMachines(); n > 0 {
		showReboot(host, infrav1.HostRebootWaitingReason, fmt.Sprintf(
			"The host has %d machines without a CapstanMachine here: see status.unknownMachines, or drain the host in the other management clusters that use it", n))
		return nil
	}
	hosts := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	if i := slices.IndexFunc(hosts.Items, func(other infrav1.CapstanHost) bool { return sharesBox(host, &other) }); i >= 0 {
		showReboot(host, infrav1.HostRebootWaitingReason, fmt.Sprintf(
			"CapstanHost %s is on the same box and has machines: set its spec.drain until the reboot is complete", hosts.Items[i].Name))
		return nil
	}
	host.Status.Reboot = infrav1.HostReboot{RequestedAt: host.Spec.RebootRequestedAt, BootID: bootID(conn)}
	showReboot(host, infrav1.HostRebootingReason, "The host is asked to reboot")
	r.recorder.Eventf(host, nil, corev1.EventTypeNormal, infrav1.HostRebootingReason, "Reboot", "The host has no machines and is rebooted")
	return nil // The change of the status is the event.
}

// sharesBox returns whether the other host would end with the box of this one, and has machines.
func sharesBox(host, other *infrav1.CapstanHost) bool {
	return other.Name != host.Name && host.Status.BoxID != "" && other.Status.BoxID == host.Status.BoxID && ptr.Deref(other.Status.Machines, 0) > 0
}

func sendReboot(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) error {
	if _, err := conn.Reboot(ctx, &hostpb.RebootRequest{BootId: host.Status.Reboot.BootID}); err != nil {
		showReboot(host, infrav1.HostRebootWaitingReason, connections.Message(err))
		return fmt.Errorf("reboot the host: %s", connections.Message(err))
	}
	showReboot(host, infrav1.HostRebootingReason, "The host was asked to reboot, and has not gone down yet")
	return nil
}
