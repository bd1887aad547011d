package controlplane

import (
	"fmt"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// wish is what the spec says about the number of Machines.
type wish struct {
	replicas, maxSurge int
	// initialized says that the API server has answered once: from then on there is data to lose.
	initialized bool
	// held is why no other version can be rolled out now; "" when it can.
	held string
	// domains are the failure domains for control planes.
	domains []clusterv1.FailureDomain
}

// plan is what to do about the number of Machines: one of create, remove, or nothing. why says in the last
// case what has to happen first; "" when everything is as it should be.
type plan struct {
	// create is how many Machines to make; first says that it is the one that begins the cluster.
	create int
	first  bool
	remove *clusterv1.Machine
	why    string
}

func (p plan) acts() bool { return p.create > 0 || p.remove != nil }

func wait(why string) plan { return plan{why: why} }

// makePlan decides about the number of Machines (CP-03, CP-04, CP-07, CP-16, CP-20). Machines go one at a
// time, and only when everything else is known to work. Several may be made at once, because a Machine
// that joins cannot hurt: it is a learner until it has the data, and etcd takes one learner after the other.
func makePlan(f fleet, w wish) plan {
	active := f.active()
	switch {
	case len(f.instances) == 0 && w.initialized:
		return wait("every control plane machine is gone, and the cluster's data with them: set spec.restore to a backup, or delete the cluster")
	case len(f.instances) == 0:
		return plan{create: 1, first: true}
	case !w.initialized:
		return planFirst(f, active)
	case len(active) == 0:
		// The last one is being deleted. Another one joins first, then it can leave.
		return f.add(1)
	case len(active) < len(f.instances):
		gone := f.filter((*instance).deleting)[0]
		return wait(fmt.Sprintf("Machine %s is being deleted", gone.name()))
	}
	if i := f.hopeless(active); i != nil {
		return plan{remove: i.machine}
	}
	outdated := f.filter(func(i *instance) bool { return len(i.outdated) > 0 })
	if len(outdated) > 0 {
		return f.rollOut(active, outdated, w)
	}
	switch missing := w.replicas - len(active); {
	case missing > 0:
		return f.add(missing)
	case missing < 0:
		return f.drop(f.victim(active, w.domains))
	}
	return plan{}
}

// planFirst is for the time before the API server has answered: there is one Machine, and no data. When
// the spec has changed the Machine may never work, so it is made again.
func planFirst(f fleet, active []*instance) plan {
	switch {
	case len(active) == 0:
		return wait(fmt.Sprintf("Machine %s is being deleted", f.instances[0].name()))
	case len(active) == 1 && len(active[0].outdated) > 0:
		return plan{remove: active[0].machine}
	}
	return wait("the first machine is not ready yet")
}

// rollOut replaces Machines that are not up to date: with maxSurge 1 the new one comes first. A member
// that has been unhealthy for long goes before that: etcd's advice is to remove what is dead before
// anything is added.
func (f fleet) rollOut(active, outdated []*instance, w wish) plan {
	for _, i := range outdated {
		if f.stacked && i.member != nil && i.member.voting && i.member.sick && len(active) > 1 {
			return f.drop(i)
		}
	}
	if w.held != "" {
		w.maxSurge = 0 // What is missing is made, because a majority is worth more than a backup.
	}
	if missing := w.replicas + w.maxSurge - len(active); missing > 0 {
		return f.add(missing)
	}
	if w.held != "" {
		return wait(w.held)
	}
	return f.drop(f.victim(outdated, w.domains))
}

// hopeless is a Machine without a vote that will not get one: an outdated one that has never joined, which
// may wait for something that the new spec has mended, or one whose member has left. Nothing is lost with it.
// While nobody can be asked no Machine is known to be one.
func (f fleet) hopeless(active []*instance) *instance {
	if len(active) < 2 || f.unknown != "" {
		return nil
	}
	for _, i := range active {
		unsure := i.unidentified() && len(f.strays) > 0
		if len(i.outdated) > 0 && !f.joined(i) && !unsure || i.member != nil && i.member.left {
			return i
		}
	}
	return nil
}

// add makes Machines, if etcd is fit for more members.
func (f fleet) add(n int) plan {
	if !f.stacked {
		return plan{create: n}
	}
	if f.unknown != "" {
		return wait(f.unknown)
	}
	for _, m := range f.strays {
		if !m.left {
			return wait(fmt.Sprintf("the etcd member %s belongs to no Machine and has to leave first", m.name))
		}
	}
	if problems := f.unhealthyMembers(); len(problems) > 0 {
		return wait(join(problems))
	}
	if f.votes().voting == 0 {
		return wait("etcd has no voting member yet")
	}
	return plan{create: n}
}

// drop deletes a Machine, if everything else works.
func (f fleet) drop(victim *instance) plan {
	if why := f.cannotSpare(victim); why != "" {
		return wait(why)
	}
	return plan{remove: victim.machine}
}

// cannotSpare says why a Machine cannot go in the ordinary course of things; "" when it can.
func (f fleet) cannotSpare(victim *instance) string {
	var problems []string
	healthy := 0
	for _, i := range f.active() {
		switch {
		case i == victim:
		case !f.healthy(i):
			problems = append(problems, f.problem(i))
		case i.settling():
			problems = append(problems, fmt.Sprintf("Machine %s has to be Ready for %d seconds first", i.name(), *i.machine.Spec.MinReadySeconds))
		default:
			healthy++
		}
	}
	switch {
	case f.unknown != "":
		return f.unknown
	case healthy == 0:
		return join(append([]string{fmt.Sprintf("Machine %s cannot go, because no other one is healthy", victim.name())}, problems...))
	case !f.joined(victim):
		return "" // It has no vote: the others do not depend on it.
	case len(problems) > 0:
		return join(problems)
	case !f.stacked:
		return ""
	}
	if others := f.unhealthyMembers(victim.member.name); len(others) > 0 {
		return join(others)
	}
	return f.unsafe(victim.member.name)
}
