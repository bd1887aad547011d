package controlplane

import (
	"fmt"
	"slices"
	"time"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// stuckAfter is for how long the infrastructure of a Machine may be going before the Machine counts as gone: a host
// that is started again is back long before. A variable for tests.
var stuckAfter = 30 * time.Second

// stuckIn is how long it takes until a Machine counts as gone although it is there; zero if it does already, negative
// if it does not come to that. Nothing depends on such a Machine any more: its member has left etcd, our hook is off, and
// all that remains is infrastructure that cannot be removed, most often because its host is dead. What that
// is only the infrastructure provider knows, so that time has to tell.
func (f fleet) stuckIn(i *instance, going time.Time, now time.Time) time.Duration {
	_, hook := i.machine.Annotations[controlplanev1.PreTerminateHookAnnotation]
	if !i.deleting() || hook || going.IsZero() {
		return -1
	}
	if f.stacked && (f.unknown != "" || i.member != nil && !i.member.left) {
		return -1
	}
	return max(0, stuckAfter-now.Sub(going))
}

// withoutStuck leaves out the Machines that count as gone. going is since when each Machine's infrastructure has been
// going.
func (f fleet) withoutStuck(going map[string]time.Time, now time.Time) fleet {
	out := f
	out.instances = slices.DeleteFunc(slices.Clone(f.instances), func(i instance) bool {
		return f.stuckIn(&i, going[i.name()], now) == 0
	})
	return out
}

// nextStuck is when the next Machine counts as gone, which is no event; 0 when none will.
func (s *scope) nextStuck(now time.Time) time.Duration {
	var next time.Duration
	f := s.everybody()
	for n := range f.instances {
		i := &f.instances[n]
		if in := f.stuckIn(i, s.going[i.name()], now); in > 0 && (next == 0 || in < next) {
			next = in
		}
	}
	return next
}

// stuck says which Machines count as gone although they are there.
func (s *scope) stuck() []string {
	var out []string
	known := s.fleet()
	for _, m := range s.machines.SortedByCreationTimestamp() {
		if known.find(m.Name) == nil {
			out = append(out, fmt.Sprintf("Machine %s has left the cluster, and its %s %s is still there: the host may not answer; bring it back, or see that object's conditions",
				m.Name, m.Spec.InfrastructureRef.Kind, m.Spec.InfrastructureRef.Name))
		}
	}
	return out
}
