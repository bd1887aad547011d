package model

import (
	"fmt"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// Target is the demand of the spec for the number of Machines.
type Target struct {
	Replicas, maxSurge int
	// inherits: an outdated Machine has volumes that its successor gets after its deletion.
	inherits bool
	// initialized: the API server has answered once. From then on the cluster has data.
	initialized bool
	// version is the wanted version, and held the reason why it cannot be rolled out; "" when it can.
	version, held string
	// domains are the failure domains for control planes.
	domains []clusterv1.FailureDomain
	// inPlace is the policy for updates in place.
	inPlace controlplanev1.InPlacePolicy
}

// Plan is the next action about the Machines: create, remove, update in place, or nothing. Why is the reason to do nothing; "" when
// no action is needed.
type Plan struct {
	// Create is the number of Machines to create. First: the Machine starts the cluster.
	Create int
	First  bool
	Remove *clusterv1.Machine
	// Update has an update in place whose next step is due.
	Update *Instance
	Why    string
}

// Acts reports whether the plan creates, removes or updates a Machine.
func (p Plan) Acts() bool { return p.Create > 0 || p.Remove != nil || p.Update != nil }

func waitFor(why string) Plan { return Plan{Why: why} }

// PlanMachines decides about the number of Machines (CP-03, CP-04, CP-07, CP-16, CP-20). Machines are removed one at a time,
// and only when everything else works. Several may be created at once: a joining Machine is a learner until it has the data,
// and etcd accepts one learner after the other.
func PlanMachines(f Fleet, w Target) Plan {
	if i := f.Updated(); i != nil {
		// Its end changes no member. A deletion can depend on it: pods that have to move may need its Node, which is still cordoned.
		return Plan{Update: i}
	}
	active := f.active()
	switch {
	case len(f.Instances) == 0 && w.initialized:
		return waitFor("all control plane machines and the cluster's data are lost: set spec.restore to a backup, or delete the cluster")
	case len(f.Instances) == 0:
		return Plan{Create: 1, First: true}
	case !w.initialized:
		return planFirst(f, active)
	case len(active) == 0:
		// The last one is being deleted. Its replacement joins before it leaves.
		return f.add(1)
	case len(active) < len(f.Instances):
		return f.duringDeletion(active)
	}
	if i := f.removable(active); i != nil {
		return Plan{Remove: i.Machine}
	}
	if p, decided := f.updateInPlace(active, w); decided {
		return p
	}
	outdated := f.Filter(func(i *Instance) bool { return len(i.Outdated) > 0 })
	if len(outdated) > 0 {
		return f.rollOut(active, outdated, w)
	}
	if len(active) != w.Replicas {
		return f.resize(active, w)
	}
	return Plan{}
}

// planFirst decides before the API server has answered: there is one Machine and no data to keep. After a change of the spec it is
// created again, because it may never work.
func planFirst(f Fleet, active []*Instance) Plan {
	switch {
	case len(active) == 0:
		return waitFor(fmt.Sprintf("Machine %s is being deleted", f.Instances[0].Name()))
	case len(active) == 1 && len(active[0].Outdated) > 0:
		return Plan{Remove: active[0].Machine}
	}
	return waitFor("the first machine is not ready yet")
}

// duringDeletion decides while a Machine is being deleted. The last member of etcd leaves only after another Machine has joined, so a
// Machine that will never join is removed before.
func (f Fleet) duringDeletion(active []*Instance) Plan {
	if i := f.neverVotes(active); i != nil && f.deletedOneServes() {
		return Plan{Remove: i.Machine}
	}
	return waitFor(fmt.Sprintf("Machine %s is being deleted", f.Filter((*Instance).Deleting)[0].Name()))
}

// rollOut replaces outdated Machines. With maxSurge 1 the new one is created first, unless it needs the volumes of an old one. A
// member that has been unhealthy for long is removed before that, as the documentation of etcd recommends.
func (f Fleet) rollOut(active, outdated []*Instance, w Target) Plan {
	for _, i := range outdated {
		if i.dead() && len(active) > 1 {
			return f.drop(i)
		}
	}
	if w.inherits {
		w.maxSurge = 0
	}
	surplus := 0 // The number of Machines that a surge may have created before the hold.
	if w.held != "" {
		if len(outdated) < len(active) && w.Replicas > 1 { // An etcd of two members is lost with either of them.
			surplus = w.maxSurge
		}
		w.maxSurge = 0 // Missing Machines are created, because a majority is more important than a backup.
	}
	if why := f.unreadable(); why != "" && len(active) <= w.Replicas {
		return waitFor(why)
	}
	if missing := w.Replicas + w.maxSurge - len(active); missing > 0 {
		return f.add(missing)
	}
	if w.held != "" && len(active) > w.Replicas+surplus {
		return f.resize(active, w) // A hold delays no change of spec.replicas.
	}
	if w.held != "" {
		return waitFor(w.held)
	}
	if w.inherits && len(active) == 1 {
		return waitFor(fmt.Sprintf("Machine %s is the only machine, and its successor needs its volumes. A replacement would delete the last machine first. Set spec.replicas to 3, and to 1 again after the rollout",
			active[0].Name()))
	}
	if len(active) > w.Replicas+w.maxSurge {
		outdated = active // One that finds no place would hold up the rollout, although it is not needed any more.
	}
	return f.drop(f.victim(outdated, w.domains))
}

// removable returns a Machine that will never have a vote if another one remains.
func (f Fleet) removable(active []*Instance) *Instance {
	if len(active) < 2 {
		return nil
	}
	return f.neverVotes(active)
}

// neverVotes returns a Machine that will never have a vote: an outdated one that has never joined, or one whose member has
// left. It returns nil while the state of etcd is not known.
func (f Fleet) neverVotes(active []*Instance) *Instance {
	if f.Unknown != "" {
		return nil
	}
	for _, i := range active {
		if i.Update != nil {
			continue // Its member may be down for a moment.
		}
		if len(i.Outdated) > 0 && f.hasNoVote(i) || i.Member != nil && i.Member.Left {
			return i
		}
	}
	return nil
}

// add creates Machines if etcd can accept members.
func (f Fleet) add(n int) Plan {
	if !f.Stacked {
		return Plan{Create: n}
	}
	if f.Unknown != "" {
		return waitFor(f.Unknown)
	}
	for _, m := range f.Unassigned {
		if !m.Left {
			return waitFor(fmt.Sprintf("the etcd member %s belongs to no Machine and has to leave first", m.Name))
		}
	}
	if problems := f.unhealthyMembers(); len(problems) > 0 {
		return waitFor(JoinReasons(problems))
	}
	if f.Votes().Voting == 0 {
		return waitFor("etcd has no voting member yet")
	}
	return Plan{Create: n}
}

// drop deletes a Machine if everything else works.
func (f Fleet) drop(victim *Instance) Plan {
	if why := f.cannotSpare(victim); why != "" {
		return waitFor(why)
	}
	return Plan{Remove: victim.Machine}
}

// cannotSpare returns the reason why a Machine cannot be removed by a scale-down or rollout; "" when it can.
func (f Fleet) cannotSpare(victim *Instance) string {
	var problems []string
	healthy := 0
	for _, i := range f.active() {
		switch {
		case i == victim:
		case f.waitsFor(victim, i) && victim.Member.unhealthyForLong:
			// It joins after the removal. CannotRemove protects the majority.
		case !f.healthy(i):
			problems = append(problems, f.problem(i))
		case i.settling():
			problems = append(problems, fmt.Sprintf("Machine %s has to be Ready for %d seconds first", i.Name(), *i.Machine.Spec.MinReadySeconds))
		default:
			healthy++
		}
	}
	switch {
	case f.Unknown != "":
		return f.Unknown
	case healthy == 0:
		return JoinReasons(append([]string{fmt.Sprintf("Machine %s cannot go, because no other one is healthy", victim.Name())}, problems...))
	case !f.joined(victim):
		return "" // Without a vote, the others do not depend on it.
	case len(problems) > 0:
		return JoinReasons(problems)
	case !f.Stacked:
		return ""
	}
	if others := f.unhealthyMembers(victim.Member.Name); len(others) > 0 {
		return JoinReasons(others)
	}
	return f.CannotRemove(victim.Member.Name)
}
