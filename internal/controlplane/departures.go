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
	f := s.Fleet()
	leaving := f.Filter((*model.Instance).Deleting)
	slices.SortStableFunc(leaving, func(a, b *model.Instance) int {
		return cmp.Or(a.Machine.DeletionTimestamp.Compare(b.Machine.DeletionTimestamp.Time), cmp.Compare(a.Name(), b.Name()))
	})
	for _, i := range leaving {
		switch plan := model.PlanDeparture(f, i, s.Initialized()); plan.Step {
		case model.ReleaseMachine:
			if err := r.dropHook(ctx, i.Machine); err != nil {
				return out, err
			}
		case model.RemoveMember:
			if i.Member == nil {
				obstacle, err := r.foreignOwner(ctx, s, plan.Member, f.IsUnidentified)
				if err != nil {
					return out, err
				}
				if obstacle != "" {
					out.departing = append(out.departing, obstacle)
					continue
				}
			}
			if err := r.askToLeave(ctx, s, plan.Member); err != nil {
				return out, err
			}
			f = s.Fleet() // The next one waits for it.
		case model.KeepMachine:
			if plan.Why != "" {
				out.departing = append(out.departing, fmt.Sprintf("Machine %s cannot go yet: %s", i.Name(), plan.Why))
			}
		}
	}
	return out, nil
}

// clearOrphans makes members without a Machine leave, and deletes the EtcdMembers of members that have left.
func (r *departures) clearOrphans(ctx context.Context, s *scope) (out result, err error) {
	f := s.Fleet()
	if f.Unknown != "" {
		return out, nil
	}
	for _, m := range f.Unassigned {
		if !m.Left {
			continue
		}
		gone := s.Workload.Members[m.Name]
		if err := client.IgnoreNotFound(s.client.Delete(ctx, &gone, client.Preconditions{UID: &gone.UID})); err != nil {
			return out, fmt.Errorf("cannot delete the EtcdMember %s: %w", m.Name, err)
		}
		delete(s.Workload.Members, m.Name)
	}
	for _, m := range f.Orphans() {
		if m.Left || m.Leave {
			continue
		}
		if why := f.CannotRemove(m.Name); why != "" {
			out.departing = append(out.departing, fmt.Sprintf("the etcd member %s belongs to no Machine and cannot leave yet: %s", m.Name, why))
			continue
		}
		obstacle, err := r.foreignOwner(ctx, s, m.Name, func(string) bool { return false })
		if err != nil {
			return out, err
		}
		if obstacle != "" {
			out.departing = append(out.departing, obstacle)
			continue
		}
		return out, r.askToLeave(ctx, s, m.Name)
	}
	return out, nil
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
