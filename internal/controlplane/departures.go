package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/controlplane/model"
)

// departures is the step that lets Machines and etcd members go.
type departures struct {
	*machineReader
	*machineWriter
	*abandonment
	*recorder
}

// reconcile makes the etcd members of deleted Machines leave, one after the other, and then releases the Machines.
// Members without a Machine leave as well.
func (r *departures) reconcile(ctx context.Context, s *scope) (out result, err error) {
	if out, err = r.clearOrphans(ctx, s); err != nil {
		return out, err
	}
	abandoned, err := r.releaseAbandoned(ctx, s)
	out.merge(requeueAfter(abandoned))
	if err != nil {
		return out, err
	}
	leaving := s.Fleet().Filter((*model.Instance).Deleting)
	slices.SortStableFunc(leaving, func(a, b *model.Instance) int {
		return cmp.Or(a.Machine.DeletionTimestamp.Compare(b.Machine.DeletionTimestamp.Time), cmp.Compare(a.Name(), b.Name()))
	})
	for _, i := range leaving {
		// The plan sees the member that the Machine before has asked to leave, so that only one leaves at a time.
		obstacle, err := r.depart(ctx, s, i)
		if err != nil {
			return out, err
		}
		if obstacle != "" {
			out.departing = append(out.departing, obstacle)
		}
	}
	return out, nil
}

// depart takes the next step of a deleted Machine: its member leaves, or the Machine is released. It returns the reason why
// neither is possible yet; "" for a Machine that only waits for its member.
func (r *departures) depart(ctx context.Context, s *scope, i *model.Instance) (obstacle string, err error) {
	f := s.Fleet()
	switch plan := model.PlanDeparture(f, i, s.Initialized()); plan.Step {
	case model.ReleaseMachine:
		return "", r.dropHook(ctx, i.Machine)
	case model.RemoveMember:
		if i.Member == nil {
			if obstacle, err := r.foreignOwner(ctx, s, plan.Member, f.IsUnidentified); err != nil || obstacle != "" {
				return obstacle, err
			}
		}
		return "", r.askToLeave(ctx, s, plan.Member)
	case model.KeepMachine:
		if plan.Why != "" {
			return fmt.Sprintf("Machine %s cannot go yet: %s", i.Name(), plan.Why), nil
		}
	}
	return "", nil
}

// clearOrphans makes members without a Machine leave, and deletes the EtcdMembers of members that have left.
func (r *departures) clearOrphans(ctx context.Context, s *scope) (out result, err error) {
	f := s.Fleet()
	if f.Unknown != "" {
		return out, nil
	}
	if err := r.deleteLeft(ctx, s, f.Unassigned); err != nil {
		return out, err
	}
	for _, m := range f.Orphans() {
		if m.Left || m.Leave {
			continue
		}
		obstacle, err := r.keepsOrphan(ctx, s, f, m.Name)
		if err != nil {
			return out, err
		}
		if obstacle == "" {
			return out, r.askToLeave(ctx, s, m.Name) // One leaves at a time.
		}
		out.departing = append(out.departing, obstacle)
	}
	return out, nil
}

// deleteLeft deletes the EtcdMembers of members that have left.
func (r *departures) deleteLeft(ctx context.Context, s *scope, members []model.Member) error {
	for _, m := range members {
		if !m.Left {
			continue
		}
		gone := s.Workload.Members[m.Name]
		if err := client.IgnoreNotFound(s.client.Delete(ctx, &gone, client.Preconditions{UID: &gone.UID})); err != nil {
			return fmt.Errorf("cannot delete the EtcdMember %s: %w", m.Name, err)
		}
		delete(s.Workload.Members, m.Name)
	}
	return nil
}

// keepsOrphan returns the reason why a member without a Machine stays; "" when it can leave.
func (r *departures) keepsOrphan(ctx context.Context, s *scope, f model.Fleet, member string) (string, error) {
	if why := f.CannotRemove(member); why != "" {
		return fmt.Sprintf("the etcd member %s belongs to no Machine and cannot leave yet: %s", member, why), nil
	}
	return r.foreignOwner(ctx, s, member, func(string) bool { return false })
}

// foreignOwner returns the reason why an etcd member may belong to a Machine outside the control plane; "" when it cannot.
// The Machines for which ignore is true are not considered.
func (r *departures) foreignOwner(ctx context.Context, s *scope, member string, ignore func(machine string) bool) (string, error) {
	machines, err := r.everyMachine(ctx, s)
	if err != nil {
		return "", err
	}
	machines = slices.DeleteFunc(machines, func(m clusterv1.Machine) bool { return ignore(m.Name) })
	name := model.MachineOfMember(machines, member)
	if name == "" {
		return "", nil
	}
	return fmt.Sprintf("the etcd member %s may run on Machine %s, which does not belong to this control plane: it stays as long as the Machine exists", member, name), nil
}

// askToLeave sets spec.leave of the member. It fails when the member has changed since it was read.
func (r *departures) askToLeave(ctx context.Context, s *scope, name string) error {
	before := s.Workload.Members[name]
	after := before.DeepCopy()
	after.Spec.Leave = true
	if err := s.client.Patch(ctx, after, client.MergeFromWithOptions(&before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("cannot ask the etcd member %s to leave: %w", name, err)
	}
	s.Workload.Members[name] = *after
	ctrl.LoggerFrom(ctx).Info("Removing etcd member", "EtcdMember", name)
	r.event(s, corev1.EventTypeNormal, "EtcdMemberLeaves", "Leave", "The etcd member %s leaves", name)
	return nil
}
