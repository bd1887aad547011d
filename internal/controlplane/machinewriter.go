package controlplane

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/shorten"
)

// machineWriter deletes Machines, and writes their hooks and conditions.
type machineWriter struct {
	*clients
	*recorder
}

// deleteMachine deletes a Machine if it has not changed since it was read. Its pre-terminate hook keeps it until its member
// has left etcd.
func (r *machineWriter) deleteMachine(ctx context.Context, s *scope, machine *clusterv1.Machine, why string) error {
	err := r.Client.Delete(ctx, machine, client.Preconditions{UID: &machine.UID, ResourceVersion: &machine.ResourceVersion})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // It has changed, which is an event.
	}
	if err != nil {
		return fmt.Errorf("cannot delete the Machine %s: %w", machine.Name, err)
	}
	machine.DeletionTimestamp = &metav1.Time{Time: s.Now}
	deleted.WithLabelValues(s.Object.Namespace, s.Object.Name, why).Inc()
	r.event(s, corev1.EventTypeNormal, why, "Delete", "Deleting Machine %s", machine.Name)
	ctrl.LoggerFrom(ctx).Info("Deleting Machine", "Machine", klog.KObj(machine), "reason", why)
	return nil
}

// dropHook removes our hook, so that Cluster API continues the deletion of a Machine.
func (r *machineWriter) dropHook(ctx context.Context, machine *clusterv1.Machine) error {
	if _, ok := machine.Annotations[controlplanev1.PreTerminateHookAnnotation]; !ok {
		return nil
	}
	before := machine.DeepCopy()
	after := machine.DeepCopy()
	delete(after.Annotations, controlplanev1.PreTerminateHookAnnotation)
	if err := client.IgnoreNotFound(r.Client.Patch(ctx, after, client.MergeFrom(before))); err != nil {
		return fmt.Errorf("cannot remove the hook of the Machine %s: %w", machine.Name, err)
	}
	machine.Annotations = after.Annotations
	ctrl.LoggerFrom(ctx).Info("Released Machine", "Machine", klog.KObj(machine))
	return nil
}

// setMachineConditions writes the changed conditions of a Machine, and those about a former generation: `kubectl wait` does not accept these.
// Messages from the workload cluster can be too long for the API server.
func (r *machineWriter) setMachineConditions(ctx context.Context, machine *clusterv1.Machine, wanted ...metav1.Condition) error {
	changed := false
	for n := range wanted {
		c := &wanted[n]
		c.Message = shorten.ConditionMessage(c.Message)
		has := conditions.Get(machine, c.Type)
		changed = changed || has == nil || has.Status != c.Status || has.Reason != c.Reason || has.Message != c.Message ||
			has.ObservedGeneration != machine.Generation
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

// patchMachineStatus changes the status of a Machine. The patch requires the resource version that was read, because the
// status has other writers. The Machine is read live, because an outdated cache would cause conflicts.
func (r *machineWriter) patchMachineStatus(ctx context.Context, machine *clusterv1.Machine, change func(*clusterv1.Machine)) error {
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
		return nil // Another writer was faster, which is an event.
	}
	return client.IgnoreNotFound(err)
}
