package controlplane

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/controlplane/model"
)

// machineStatus is the step that writes the conditions of Machines.
type machineStatus struct{ *objects }

// reconcile writes on each Machine whether it is up to date (CP-18), and the health of its API server and etcd member, which
// are its readiness gates (CP-10).
func (r *machineStatus) reconcile(ctx context.Context, s *scope) (result, error) {
	f := s.CompleteFleet()
	for n := range f.Instances {
		i := &f.Instances[n]
		wanted := []metav1.Condition{model.UpToDate(i.Outdated)}
		// The last known state remains.
		if !s.Interrupted {
			wanted = append(wanted, model.MachineHealth(i, f)...)
		}
		if err := r.setMachineConditions(ctx, i.Machine, wanted...); err != nil {
			return result{}, err
		}
	}
	return result{}, nil
}

// setMachineConditions writes the changed conditions of a Machine.
func (r *objects) setMachineConditions(ctx context.Context, machine *clusterv1.Machine, wanted ...metav1.Condition) error {
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

func (r *objects) removeMachineCondition(ctx context.Context, machine *clusterv1.Machine, kind string) error {
	return r.patchMachineStatus(ctx, machine, func(m *clusterv1.Machine) { conditions.Delete(m, kind) })
}

// patchMachineStatus changes the status of a Machine. The patch requires the resource version that was read, because the
// status has other writers. The Machine is read live, because an outdated cache would cause conflicts.
func (r *objects) patchMachineStatus(ctx context.Context, machine *clusterv1.Machine, change func(*clusterv1.Machine)) error {
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
