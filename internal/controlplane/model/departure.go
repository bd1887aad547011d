package model

import (
	"fmt"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// DepartureStep is the next step for a Machine that is being deleted.
type DepartureStep string

// Steps for a Machine that is being deleted. Its pre-terminate hook keeps it until ReleaseMachine.
const (
	// KeepMachine: something else has to happen first.
	KeepMachine DepartureStep = "KeepMachine"
	// RemoveMember: an etcd member has to leave.
	RemoveMember DepartureStep = "RemoveMember"
	// ReleaseMachine: nothing keeps the Machine any more.
	ReleaseMachine DepartureStep = "ReleaseMachine"
)

// Departure is the decision about a Machine that is being deleted.
type Departure struct {
	Step DepartureStep
	// Member is the name of the etcd member that has to leave; "" unless Step is RemoveMember.
	Member string
	// Why is the reason to keep the Machine; "" when Cluster API has to act first.
	Why string
}

// PlanDeparture decides about a Machine that is being deleted. Its drain is complete when Cluster API waits for our hook.
// Our hook is the last one, because the others may need the cluster.
func PlanDeparture(f Fleet, i *Instance, initialized bool) Departure {
	if !i.waitsForOurHook() {
		return Departure{Step: KeepMachine}
	}
	for name := range i.Machine.Annotations {
		if strings.HasPrefix(name, clusterv1.PreTerminateDeleteHookAnnotationPrefix) && name != controlplanev1.PreTerminateHookAnnotation {
			return keep("another pre-terminate hook comes first: " + name)
		}
	}
	switch {
	case initialized && !f.Stacked && len(f.active()) == 0:
		// Its replacement is not created before the certificates and the spec are valid, and without a Machine none is created any more.
		return keep("it is the last control plane machine, and its replacement has to be created first")
	case !initialized || !f.Stacked:
		return Departure{Step: ReleaseMachine}
	case f.Unknown != "":
		return keep(f.Unknown)
	case i.Member == nil && i.unidentified():
		return f.departUnidentified()
	case i.Member == nil || i.Member.Left:
		return Departure{Step: ReleaseMachine}
	}
	return f.removeMember(*i.Member)
}

// departUnidentified decides about a Machine whose name in the cluster is unknown. Each member without a Machine can be its member,
// and a member must leave before its Machine is removed. So all of them leave first, unless one can belong to a Machine that stays.
func (f Fleet) departUnidentified() Departure {
	for _, m := range f.Unassigned {
		if m.Left {
			continue
		}
		for n := range f.Instances {
			if other := &f.Instances[n]; other.unidentified() && !other.waitsForOurHook() {
				return keep(fmt.Sprintf("the etcd member %s may run on this Machine or on Machine %s: neither has reported the name of its Node or host", m.Name, other.Name()))
			}
		}
		return f.removeMember(m)
	}
	return Departure{Step: ReleaseMachine}
}

func (f Fleet) removeMember(m Member) Departure {
	if m.Leave {
		return keep(fmt.Sprintf("the etcd member %s is leaving", m.Name))
	}
	if why := f.CannotRemove(m.Name); why != "" {
		return keep(why)
	}
	return Departure{Step: RemoveMember, Member: m.Name}
}

func keep(why string) Departure { return Departure{Step: KeepMachine, Why: why} }

// waitsForOurHook: only our hook keeps the Machine, apart from the hooks of others.
func (i *Instance) waitsForOurHook() bool {
	_, ours := i.Machine.Annotations[controlplanev1.PreTerminateHookAnnotation]
	return ours && WaitsForHook(i.Machine)
}

// WaitsForHook reports whether Cluster API has drained a Machine and waits for its pre-terminate hooks.
func WaitsForHook(m *clusterv1.Machine) bool {
	return conditions.GetReason(m, clusterv1.MachineDeletingCondition) == clusterv1.MachineDeletingWaitingForPreTerminateHookReason
}

// IsUnidentified reports whether the fleet has a Machine of this name whose name in the workload cluster is not known.
func (f Fleet) IsUnidentified(machine string) bool {
	i := f.Find(machine)
	return i != nil && i.unidentified()
}
