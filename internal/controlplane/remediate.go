package controlplane

import (
	"cmp"
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	v1beta1conditions "sigs.k8s.io/cluster-api/util/conditions/deprecated/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// remediations is the step that replaces unhealthy Machines.
type remediations struct {
	*clients
	*machineReader
	*machineWriter
	*annotator
	*recorder
}

// reconcile deletes the unhealthy Machine whose replacement helps most. The replacement is created like any missing Machine.
func (r *remediations) reconcile(ctx context.Context, s *scope) (out result, err error) {
	if err := r.forgetHealed(ctx, s); err != nil {
		return out, err
	}
	if err := r.forgetReplaced(ctx, s); err != nil {
		return out, err
	}
	p := s.PlanRemediation()
	if p.Machine == nil {
		return out, nil
	}
	out.remediating = append(out.remediating, fmt.Sprintf("Machine %s: %s", p.Machine.Name(), cmp.Or(p.Message, "it is being replaced")))
	if !p.Act {
		out.requeueAfter = p.Again
		return out, r.setMachineConditions(ctx, p.Machine.Machine, ownerRemediated(p.Reason, p.Message))
	}
	out.stop = true
	if current, err := r.readLive(ctx, s); err != nil || !current {
		return out, err
	}
	if p = s.PlanRemediation(); !p.Act {
		out.requeueAfter = p.Again
		return out, nil
	}
	if err := r.remediate(ctx, s, p); err != nil {
		out.remediating = append(out.remediating, advise(err))
		err = out.afterRefusal(ctx, err)
		return out, err
	}
	return out, nil
}

// remediate records the remediation before it deletes the Machine, because the replacement needs the record.
func (r *remediations) remediate(ctx context.Context, s *scope, p model.Repair) error {
	if err := r.annotate(ctx, s, controlplanev1.RemediationInProgressAnnotation, p.Record.String()); err != nil {
		return err
	}
	machine := p.Machine.Machine
	why := cmp.Or(conditions.GetMessage(machine, clusterv1.MachineHealthCheckSucceededCondition), conditions.GetReason(machine, clusterv1.MachineHealthCheckSucceededCondition))
	ctrl.LoggerFrom(ctx).Info("Remediating Machine", "Machine", klog.KObj(machine), "retries", p.Record.Retries, "why", why)
	if err := r.setMachineConditions(ctx, machine, ownerRemediated(controlplanev1.RemediationMachineDeletingReason, "Machine is deleting")); err != nil {
		return err
	}
	live := &clusterv1.Machine{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(machine), live); err != nil {
		return client.IgnoreNotFound(err)
	}
	machine.ResourceVersion = live.ResourceVersion
	if err := r.deleteMachine(ctx, s, machine, "Remediate"); err != nil {
		return err
	}
	if !machine.DeletionTimestamp.IsZero() { // Another writer may have been faster: then the next reconcile deletes it.
		r.event(s, corev1.EventTypeWarning, "Remediated", "Remediate", "Replacing the unhealthy Machine %s: %s", machine.Name, why)
	}
	return nil
}

func ownerRemediated(reason, message string) metav1.Condition {
	return metav1.Condition{Type: clusterv1.MachineOwnerRemediatedCondition, Status: metav1.ConditionFalse, Reason: reason, Message: message}
}

// forgetHealed removes the request for a remediation from Machines that have become healthy. Core writes it in the conditions of both
// contracts, and each of them makes a Machine not ready.
func (r *remediations) forgetHealed(ctx context.Context, s *scope) error {
	for _, m := range s.Machines {
		requested := conditions.IsFalse(m, clusterv1.MachineOwnerRemediatedCondition) || v1beta1conditions.IsFalse(m, clusterv1.MachineOwnerRemediatedV1Beta1Condition)
		if !m.DeletionTimestamp.IsZero() || !conditions.IsTrue(m, clusterv1.MachineHealthCheckSucceededCondition) || !requested {
			continue
		}
		if err := r.patchMachineStatus(ctx, m, func(m *clusterv1.Machine) {
			conditions.Delete(m, clusterv1.MachineOwnerRemediatedCondition)
			v1beta1conditions.Delete(m, clusterv1.MachineOwnerRemediatedV1Beta1Condition)
		}); err != nil {
			return err
		}
	}
	return nil
}

// forgetReplaced ends remediations that need no replacement any more.
func (r *remediations) forgetReplaced(ctx context.Context, s *scope) error {
	same := func() bool {
		return s.OpenRemediation().String() == model.ReadRemediationRecord(s.Object, controlplanev1.RemediationInProgressAnnotation).String()
	}
	if same() {
		return nil
	}
	if current, err := r.readLive(ctx, s); err != nil || !current || same() {
		return err
	}
	return r.finishRemediation(ctx, s)
}
