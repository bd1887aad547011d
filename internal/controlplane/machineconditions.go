package controlplane

import (
	"context"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// reconcileMachineConditions says on each Machine whether it is up to date (CP-18), and how its API server
// and its member of etcd are (CP-10): these are its readiness gates.
func (r *Reconciler) reconcileMachineConditions(ctx context.Context, s *scope) error {
	f := s.everybody()
	for n := range f.instances {
		i := &f.instances[n]
		wanted := []metav1.Condition{upToDate(i.outdated)}
		// What was known a moment ago stands.
		if !s.blink {
			wanted = append(wanted, machineHealth(i, f)...)
		}
		if err := r.setMachineConditions(ctx, i.machine, wanted...); err != nil {
			return err
		}
	}
	return nil
}

// machineHealth is how it is what runs on a Machine. Until an API server's Lease that is new to us is renewed nothing is said of it.
func machineHealth(i *instance, f fleet) []metav1.Condition {
	var out []metav1.Condition
	if i.apiServer != metav1.ConditionUnknown || f.unknown != "" {
		out = append(out, apiServerHealthy(i, f))
	}
	if f.stacked {
		out = append(out, memberCondition(i, f))
	}
	return out
}

func upToDate(reasons []string) metav1.Condition {
	if len(reasons) == 0 {
		return metav1.Condition{Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineUpToDateReason}
	}
	return metav1.Condition{
		Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
		Message: "* " + strings.Join(reasons, "\n* "),
	}
}

func healthCondition(kind string, status metav1.ConditionStatus, message string) metav1.Condition {
	switch status {
	case metav1.ConditionTrue:
		return metav1.Condition{Type: kind, Status: status, Reason: controlplanev1.HealthyReason}
	case metav1.ConditionFalse:
		return metav1.Condition{Type: kind, Status: status, Reason: controlplanev1.NotHealthyReason, Message: message}
	}
	return metav1.Condition{Type: kind, Status: metav1.ConditionUnknown, Reason: controlplanev1.HealthUnknownReason, Message: message}
}

func apiServerHealthy(i *instance, f fleet) metav1.Condition {
	message := "The API server has not renewed its Lease"
	if i.apiServer == metav1.ConditionUnknown {
		message = f.unknown
	}
	return healthCondition(controlplanev1.MachineAPIServerHealthyCondition, i.apiServer, message)
}

func memberCondition(i *instance, f fleet) metav1.Condition {
	kind := controlplanev1.MachineEtcdMemberHealthyCondition
	switch {
	case f.unknown != "":
		return healthCondition(kind, metav1.ConditionUnknown, f.unknown)
	case i.member == nil:
		return healthCondition(kind, metav1.ConditionFalse, "The Machine has no etcd member yet")
	case !i.member.voting:
		return healthCondition(kind, metav1.ConditionFalse, "The etcd member has no vote: "+i.member.what)
	}
	return healthCondition(kind, i.member.health, i.member.what)
}

// setMachineConditions writes those conditions of a Machine that have changed.
func (r *Reconciler) setMachineConditions(ctx context.Context, machine *clusterv1.Machine, wanted ...metav1.Condition) error {
	changed := false
	for _, c := range wanted {
		has := conditions.Get(machine, c.Type)
		changed = changed || has == nil || has.Status != c.Status || has.Reason != c.Reason || has.Message != c.Message
	}
	if !changed {
		return nil
	}
	return r.patchMachineStatus(ctx, machine, func(m *clusterv1.Machine) {
		for _, c := range wanted {
			conditions.Set(m, c)
		}
	})
}

func (r *Reconciler) removeMachineCondition(ctx context.Context, machine *clusterv1.Machine, kind string) error {
	return r.patchMachineStatus(ctx, machine, func(m *clusterv1.Machine) { conditions.Delete(m, kind) })
}

// patchMachineStatus changes the status of a Machine. It has other writers, so that the patch is tied to what
// was read; and it is read live, because against a cache that lags the patch conflicts.
func (r *Reconciler) patchMachineStatus(ctx context.Context, machine *clusterv1.Machine, change func(*clusterv1.Machine)) error {
	live := &clusterv1.Machine{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(machine), live); err != nil {
		return client.IgnoreNotFound(err)
	}
	if live.UID != machine.UID {
		return nil
	}
	before := live.DeepCopy()
	change(live)
	change(machine)
	err := r.Client.Status().Patch(ctx, live, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // Somebody else wrote at the same time; that is an event, and we come again.
	}
	return client.IgnoreNotFound(err)
}
