package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// departure is what to do for a Machine that is being deleted.
type departure string

const (
	// stay: something else has to happen first.
	stay departure = "Stay"
	// askToLeave: its member of etcd has to leave.
	askToLeave departure = "AskToLeave"
	// letGo: nothing keeps the Machine any more.
	letGo departure = "LetGo"
)

// depart decides about a Machine that is being deleted. Its drain is over when Cluster API waits for our
// hook; ours is the last one, because others may need the cluster.
func depart(f fleet, i *instance, initialized bool) (departure, string) {
	if _, ok := i.machine.Annotations[controlplanev1.PreTerminateHookAnnotation]; !ok || !waitsForHook(i.machine) {
		return stay, ""
	}
	for name := range i.machine.Annotations {
		if strings.HasPrefix(name, clusterv1.PreTerminateDeleteHookAnnotationPrefix) && name != controlplanev1.PreTerminateHookAnnotation {
			return stay, "another pre-terminate hook comes first: " + name
		}
	}
	switch {
	case !initialized || !f.stacked:
		return letGo, ""
	case f.unknown != "":
		return stay, f.unknown
	case i.member == nil && i.unidentified():
		// One of the strays may be its member: it goes only if all of them can be spared.
		if names := namesOfMembers(f.strays); len(names) > 0 && f.unsafe(names...) != "" {
			return stay, f.unsafe(names...)
		}
		return letGo, ""
	case i.member == nil || i.member.left:
		return letGo, ""
	case i.member.leave:
		return stay, fmt.Sprintf("the etcd member %s is leaving", i.member.name)
	}
	if why := f.unsafe(i.member.name); why != "" {
		return stay, why
	}
	return askToLeave, ""
}

func waitsForHook(m *clusterv1.Machine) bool {
	return conditions.GetReason(m, clusterv1.MachineDeletingCondition) == clusterv1.MachineDeletingWaitingForPreTerminateHookReason
}

func namesOfMembers(members []member) []string {
	var out []string
	for _, m := range members {
		if !m.left {
			out = append(out, m.name)
		}
	}
	return out
}

// reconcileDepartures lets the etcd members of Machines that go leave, one after the other, and then the
// Machines go. Members that belong to no Machine leave, too.
func (r *Reconciler) reconcileDepartures(ctx context.Context, s *scope) error {
	if err := r.clearOrphans(ctx, s); err != nil {
		return err
	}
	abandoned, err := r.releaseAbandoned(ctx, s)
	if err != nil {
		return err
	}
	s.again = earlier(s.again, abandoned)
	f := s.fleet()
	leaving := f.filter((*instance).deleting)
	slices.SortStableFunc(leaving, func(a, b *instance) int {
		return cmp.Or(a.machine.DeletionTimestamp.Compare(b.machine.DeletionTimestamp.Time), cmp.Compare(a.name(), b.name()))
	})
	for _, i := range leaving {
		switch what, why := depart(f, i, s.initialized()); what {
		case letGo:
			if err := r.dropHook(ctx, i.machine); err != nil {
				return err
			}
		case askToLeave:
			if err := r.askToLeave(ctx, s, i.member.name); err != nil {
				return err
			}
			f = s.fleet() // The next one waits for it.
		case stay:
			if why != "" {
				s.departing = append(s.departing, fmt.Sprintf("Machine %s cannot go yet: %s", i.name(), why))
			}
		}
	}
	return nil
}

// clearOrphans lets members leave that no Machine can have, and removes what is left of those that have.
func (r *Reconciler) clearOrphans(ctx context.Context, s *scope) error {
	f := s.fleet()
	if f.unknown != "" {
		return nil
	}
	for _, m := range f.strays {
		if !m.left {
			continue
		}
		gone := s.workload.members[m.name]
		if err := client.IgnoreNotFound(s.workload.client.Delete(ctx, &gone, client.Preconditions{UID: &gone.UID})); err != nil {
			return fmt.Errorf("cannot delete the EtcdMember %s: %w", m.name, err)
		}
		delete(s.workload.members, m.name)
	}
	for _, m := range f.orphans() {
		if m.left || m.leave {
			continue
		}
		if why := f.unsafe(m.name); why != "" {
			s.departing = append(s.departing, fmt.Sprintf("the etcd member %s belongs to no Machine and cannot leave yet: %s", m.name, why))
			continue
		}
		machines, err := r.everyMachine(ctx, s)
		if err != nil {
			return err
		}
		if name := machineOf(machines, m.name); name != "" {
			s.departing = append(s.departing, fmt.Sprintf("the etcd member %s may run on Machine %s, which does not belong to this control plane: it stays as long as the Machine exists", m.name, name))
			continue
		}
		return r.askToLeave(ctx, s, m.name)
	}
	return nil
}

// askToLeave sets spec.leave of the member as we have read it: if anything about it has changed since, we
// come again.
func (r *Reconciler) askToLeave(ctx context.Context, s *scope, name string) error {
	before := s.workload.members[name]
	after := before.DeepCopy()
	after.Spec.Leave = true
	if err := s.workload.client.Patch(ctx, after, client.MergeFromWithOptions(&before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("cannot ask the etcd member %s to leave: %w", name, err)
	}
	s.workload.members[name] = *after
	r.event(s, corev1.EventTypeNormal, "EtcdMemberLeaves", "Leave", "The etcd member %s leaves", name)
	return nil
}

// dropHook lets Cluster API go on with the deletion of a Machine.
func (r *Reconciler) dropHook(ctx context.Context, machine *clusterv1.Machine) error {
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
	ctrl.LoggerFrom(ctx).Info("Machine may go", "machine", machine.Name)
	return nil
}
