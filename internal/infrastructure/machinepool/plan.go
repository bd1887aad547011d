package machinepool

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// instance contains the properties of one machine that the plan needs.
type instance struct {
	// name of the CapstanMachine.
	name string
	// created is the time of its creation.
	created time.Time
	// leaving is true if it, or its Machine, is being deleted already.
	leaving bool
	// stuck is true if it cannot leave: its host does not answer, perhaps for good.
	stuck bool
	// available is true if its Machine has been ready for long enough.
	available bool
	// failed is true if it will not come back by itself.
	failed bool
	// remediate is true if a MachineHealthCheck requires its replacement.
	remediate bool
	// outdated is true if it differs from the pool's current spec and is replaced.
	outdated bool
	// behind is true if it differs from the pool's current spec, or if its update in place is not finished.
	behind bool
	// update is the state of its update in place.
	update updateState
	// marked is true if it must be deleted first.
	marked bool
	// domain is its failure domain.
	domain string
}

// unhealthy reports whether the machine has failed or must be remediated.
func (i instance) unhealthy() bool { return i.failed || i.remediate }

// interrupted reports whether the machine is updated in place, or drained for it. Its pods and its Node can stop at any moment. A machine
// whose update was refused serves, perhaps for ever, so that it must not hold replacements back.
func (i instance) interrupted() bool {
	return i.update.busy() && !i.update.refused || i.update.drained
}

// desired is the desired state of the pool.
type desired struct {
	replicas int
	// policy determines which of equal machines is deleted first.
	policy infrav1.DeletePolicy
	// domains are the failure domains to spread over; none leaves the choice to placement.
	domains []string
	// open are those of them that can have new machines now, or while none can, those of the cluster.
	open []string
	// missing are those of them that the cluster lacks.
	missing []string
	budget  budget
	// frozen is true if no machine can be made as it should be: nothing is created or replaced, but
	// the pool may shrink.
	frozen bool

	// version and secret are those of new machines. hash covers all their properties.
	version, secret, hash string
	// minReady is for how long a Node must have been ready until its machine counts as available.
	minReady time.Duration
	// updating is the input of updates in place.
	updating updateInput
}

// budget limits how machines are replaced, in machines.
type budget struct{ maxSurge, maxUnavailable int }

// minAvailable is the number of machines that stay available while machines are replaced.
func (d desired) minAvailable() int { return max(0, d.replicas-d.budget.maxUnavailable) }

// plan contains the next actions. Every change leads to a new plan from the current state, so the outcome of the last
// plan does not matter.
type plan struct {
	// create has the failure domain of each machine to make; empty for any.
	create []string
	// remove has the names of the machines to delete, in the order of the choice.
	remove []string
	causes causes
}

// causes are the numbers of machines to delete by the cause of their deletion.
type causes struct{ surplus, outdated, unhealthy int }

func (c causes) String() string {
	var all []string
	for _, cause := range []struct {
		n    int
		name string
	}{{c.surplus, "more than replicas"}, {c.outdated, "outdated"}, {c.unhealthy, "unhealthy"}} {
		if cause.n > 0 {
			all = append(all, fmt.Sprintf("%d %s", cause.n, cause.name))
		}
	}
	return strings.Join(all, ", ")
}

func (p plan) empty() bool { return len(p.create) == 0 && len(p.remove) == 0 }

// after returns the machines as they are when the plan has been carried out: those that it deletes are leaving.
func (p plan) after(all []instance) []instance {
	removed := map[string]bool{}
	for _, name := range p.remove {
		removed[name] = true
	}
	out := slices.Clone(all)
	for n := range out {
		out[n].leaving = out[n].leaving || removed[out[n].name]
	}
	return out
}

// makePlan decides which machines to create and to delete. It depends only on its arguments and has these properties,
// which the property test checks:
//
//   - machines that are being deleted do not count as replicas, but they count for maxSurge: the pool never
//     exceeds replicas + maxSurge, including machines that still drain. Machines whose deletion is stuck do not
//     count, because a dead host would otherwise reduce the pool;
//   - machines that are updated in place are not available: updates and replacements share one budget. Refused updates use none of it;
//   - an available machine is deleted only if replicas - maxUnavailable others are available, unless it is
//     surplus and marked for deletion;
//   - except for replacements, only surplus machines are deleted;
//   - equal arguments give equal plans, and the next plan continues one that was executed in part.
func makePlan(want desired, instances []instance) plan {
	s := newState(want, instances)
	s.shrink()
	if want.frozen {
		return s.plan
	}
	s.replaceOutdated()
	s.remediate()
	s.grow()
	return s.plan
}

// state is a plan in the making.
type state struct {
	want desired
	// active are the machines that are not leaving and that the plan keeps, in the order in which
	// they would be deleted.
	active []instance
	plan   plan

	// Numbers of machines, kept up to date so that a plan for thousands of machines is quick.
	leaving   int
	available int
	outdated  int
	comingUp  int            // not available, but not broken
	fresh     int            // up to date, but not available
	domains   map[string]int // all, by failure domain
	current   map[string]int // up to date, by failure domain
}

func newState(want desired, instances []instance) *state {
	s := &state{want: want, domains: map[string]int{}, current: map[string]int{}}
	for _, i := range instances {
		if i.leaving {
			if !i.stuck {
				s.leaving++
			}
			continue
		}
		// A machine that has failed or is updated is not available, regardless of its Node.
		i.available = i.available && !i.unhealthy() && !i.interrupted()
		s.active = append(s.active, i)
		s.account(i, 1)
	}
	slices.SortFunc(s.active, want.order)
	return s
}

func (s *state) account(i instance, n int) {
	s.domains[i.domain] += n
	if i.outdated {
		s.outdated += n
	} else {
		s.current[i.domain] += n
	}
	if i.available {
		s.available += n
		return
	}
	if !i.unhealthy() && !i.interrupted() { // An update can wait without end, for example for memory. Repairs must not wait for it.
		s.comingUp += n
	}
	if !i.outdated {
		s.fresh += n
	}
}

// allowed is the maximum number of machines. While outdated machines exist, it includes maxSurge machines that replace
// them.
func (s *state) allowed() int {
	if s.outdated > 0 && !s.want.frozen {
		return s.want.replicas + s.want.budget.maxSurge
	}
	return s.want.replicas
}

// spare is the number of available machines that may be deleted.
func (s *state) spare() int { return s.available - s.want.minAvailable() }

// shrink deletes surplus machines. One of them can always be deleted: if all remaining machines are available, they are
// more than replicas.
func (s *state) shrink() {
	for len(s.active) > s.allowed() {
		s.remove(s.first(func(i instance) bool { return !i.available || s.spare() > 0 || i.marked }))
		s.plan.causes.surplus++
	}
}

// replaceOutdated deletes outdated machines as the budget allows, starting with those that are not ready. The number is
// limited by the new machines that are not available yet, so that a management plane without contact to all Nodes does
// not replace all machines at once.
func (s *state) replaceOutdated() {
	for s.outdated > 0 && len(s.active)-s.fresh > s.want.minAvailable() {
		victim := s.first(func(i instance) bool { return i.outdated && (!i.available || s.spare() > 0) })
		if victim < 0 {
			return
		}
		s.remove(victim)
		s.plan.causes.outdated++
	}
}

// remediate deletes machines whose replacement a MachineHealthCheck requires. They are not available, so the budget
// only limits the number of parallel replacements: machines that are being deleted, missing or starting count. A machine whose host
// carries out its update is deleted after the update: its Node may be not Ready because of it, and the update has a deadline of its own.
func (s *state) remediate() {
	atOnce := max(1, s.want.budget.maxSurge+s.want.budget.maxUnavailable)
	for max(s.leaving, s.want.replicas-len(s.active))+s.comingUp < atOnce {
		victim := s.first(func(i instance) bool { return i.remediate && !i.update.attended })
		if victim < 0 {
			return
		}
		s.remove(victim)
		s.plan.causes.unhealthy++
	}
}

// grow creates missing machines, and the replacements of outdated ones.
func (s *state) grow() {
	n := min(s.want.replicas-(len(s.active)-s.outdated), s.want.replicas+s.want.budget.maxSurge-len(s.active)-s.leaving)
	for ; n > 0; n-- {
		domain := s.emptiest()
		s.current[domain]++
		s.plan.create = append(s.plan.create, domain)
	}
}

// emptiest is the open failure domain with the fewest up to date machines, the first by name among equals.
func (s *state) emptiest() string {
	if len(s.want.open) == 0 {
		return ""
	}
	return slices.MinFunc(s.want.open, func(a, b string) int {
		return cmp.Or(cmp.Compare(s.current[a], s.current[b]), cmp.Compare(a, b))
	})
}

func (s *state) remove(index int) {
	s.account(s.active[index], -1)
	s.leaving++
	s.plan.remove = append(s.plan.remove, s.active[index].name)
	if index == 0 {
		s.active = s.active[1:]
		return
	}
	s.active = slices.Delete(s.active, index, index+1)
}

// first returns the index of the first machine to delete, or -1 if none may be deleted. Among healthy machines that are not replaced
// anyway, it is one in the fullest failure domain, so that the pool stays balanced.
func (s *state) first(may func(instance) bool) int {
	first := slices.IndexFunc(s.active, may)
	if first < 0 || rank(s.active[first]) < rankOutdatedNotAvailable || s.active[first].outdated || len(s.domains) < 2 {
		return first
	}
	fullest := 0
	for _, n := range s.domains {
		fullest = max(fullest, n)
	}
	best := first
	for i := first + 1; i < len(s.active) && rank(s.active[i]) == rank(s.active[first]) && s.domains[s.active[best].domain] < fullest; i++ {
		if may(s.active[i]) && s.domains[s.active[i].domain] > s.domains[s.active[best].domain] {
			best = i
		}
	}
	return best
}

const (
	rankMarked = iota
	rankUnhealthy
	rankOutdatedNotAvailable
	rankOutdated
	rankNotAvailable
	rankOther
)

// rank returns the class of a machine: lower classes are deleted first. Outdated machines include those that wait for their update in
// place, so that a pool keeps its updated ones. Core's MachineSet has the same order, without the class of outdated machines.
func rank(i instance) int {
	switch {
	case i.marked:
		return rankMarked
	case i.unhealthy():
		return rankUnhealthy
	case i.behind && !i.available:
		return rankOutdatedNotAvailable
	case i.behind:
		return rankOutdated
	case !i.available:
		return rankNotAvailable
	}
	return rankOther
}

// order compares machines for their deletion: by rank, then by policy, then by name.
func (d desired) order(a, b instance) int {
	var order int
	switch d.policy {
	case infrav1.NewestDeletePolicy:
		order = b.created.Compare(a.created)
	case infrav1.RandomDeletePolicy:
		// Random, but the same each time: a plan that is made twice must not delete two machines.
		order = cmp.Compare(hash(a.name), hash(b.name))
	default:
		order = a.created.Compare(b.created)
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), order, cmp.Compare(a.name, b.name))
}

func hash(s string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(s))
	return h.Sum64()
}
