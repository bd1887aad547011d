package controlplane

import (
	"cmp"
	"slices"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// victim is the Machine that goes when one has to: of those that somebody has marked for deletion, else of
// those that are not up to date, else of those that are not healthy, the oldest in the failure domain with
// the most Machines. The same Machines always give the same victim.
func (f fleet) victim(candidates []*instance, domains []clusterv1.FailureDomain) *instance {
	crowd := f.crowd(domains)
	return slices.MinFunc(candidates, func(a, b *instance) int {
		return cmp.Or(
			first(marked(a), marked(b)),
			first(len(a.outdated) > 0, len(b.outdated) > 0),
			first(f.ailing(a), f.ailing(b)),
			cmp.Compare(crowd[domainOf(b.machine)], crowd[domainOf(a.machine)]),
			a.machine.CreationTimestamp.Compare(b.machine.CreationTimestamp.Time),
			cmp.Compare(a.name(), b.name()),
		)
	})
}

func marked(i *instance) bool {
	_, ok := i.machine.Annotations[clusterv1.DeleteMachineAnnotation]
	return ok
}

// first orders what is true before what is not.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// crowd counts the Machines of each failure domain. One that is not for control planes any more counts as
// the fullest.
func (f fleet) crowd(domains []clusterv1.FailureDomain) map[string]int {
	out := map[string]int{}
	for _, i := range f.active() {
		out[domainOf(i.machine)]++
	}
	for name := range out {
		if len(domains) > 0 && !slices.ContainsFunc(domains, func(d clusterv1.FailureDomain) bool { return d.Name == name }) {
			out[name] += len(f.instances)
		}
	}
	return out
}

// place is the failure domain for the next Machine: the one with the fewest Machines that will stay, then
// the one with the fewest of all, then the first by name (CP-16). "" when there are none.
func place(domains []clusterv1.FailureDomain, machines []*clusterv1.Machine, outdated map[string][]string) string {
	if len(domains) == 0 {
		return ""
	}
	stay, all := map[string]int{}, map[string]int{}
	for _, m := range machines {
		all[domainOf(m)]++
		if m.DeletionTimestamp.IsZero() && len(outdated[m.Name]) == 0 {
			stay[domainOf(m)]++
		}
	}
	return slices.MinFunc(domains, func(a, b clusterv1.FailureDomain) int {
		return cmp.Or(cmp.Compare(stay[a.Name], stay[b.Name]), cmp.Compare(all[a.Name], all[b.Name]), cmp.Compare(a.Name, b.Name))
	}).Name
}

// forControlPlanes are the failure domains that control plane machines may stand in.
func forControlPlanes(domains []clusterv1.FailureDomain) []clusterv1.FailureDomain {
	return slices.DeleteFunc(slices.Clone(domains), func(d clusterv1.FailureDomain) bool { return !ptr.Deref(d.ControlPlane, false) })
}
