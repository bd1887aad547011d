package model

import (
	"cmp"
	"slices"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/order"
)

// victim selects the Machine to remove: one that is marked for deletion, otherwise one whose member is dead, because no other one can join
// before it leaves, otherwise one without a vote in etcd, otherwise an outdated one, otherwise an unhealthy one, otherwise the oldest one in
// the failure domain with the most Machines. The same Machines always have the same victim.
func (f Fleet) victim(candidates []*Instance, domains []clusterv1.FailureDomain) *Instance {
	crowd := f.crowd(domains)
	return slices.MinFunc(candidates, func(a, b *Instance) int {
		return cmp.Or(
			order.TrueFirst(marked(a), marked(b)),
			order.TrueFirst(a.dead(), b.dead()),
			order.TrueFirst(f.hasNoVote(a), f.hasNoVote(b)),
			order.TrueFirst(len(a.Outdated) > 0, len(b.Outdated) > 0),
			order.TrueFirst(f.isUnhealthy(a), f.isUnhealthy(b)),
			cmp.Compare(crowd[FailureDomainOf(b.Machine)], crowd[FailureDomainOf(a.Machine)]),
			a.Machine.CreationTimestamp.Compare(b.Machine.CreationTimestamp.Time),
			cmp.Compare(a.Name(), b.Name()),
		)
	})
}

func marked(i *Instance) bool {
	_, ok := i.Machine.Annotations[clusterv1.DeleteMachineAnnotation]
	return ok
}

// hasNoVote reports whether no member of etcd can be that of the Machine and have a vote. A member without a Machine may be that of a Machine
// whose name is not known yet, as after a move. With an external etcd, it reports that the API server has never served.
func (f Fleet) hasNoVote(i *Instance) bool {
	return !f.joined(i) && (!i.unidentified() || len(f.Unassigned) == 0)
}

// dead reports whether the member of a Machine has a vote and has been unhealthy for long.
func (i *Instance) dead() bool {
	return i.Member != nil && i.Member.voting && i.Member.unhealthyForLong
}

// crowd counts the Machines of each failure domain. A domain that is not for control planes any more counts as the fullest.
func (f Fleet) crowd(domains []clusterv1.FailureDomain) map[string]int {
	out := map[string]int{}
	for _, i := range f.active() {
		out[FailureDomainOf(i.Machine)]++
	}
	for name := range out {
		if len(domains) > 0 && !slices.ContainsFunc(domains, func(d clusterv1.FailureDomain) bool { return d.Name == name }) {
			out[name] += len(f.Instances)
		}
	}
	return out
}

// PlaceMachine returns the failure domain for the next Machine: the one with the fewest Machines that stay, then the fewest
// of all, then the first by name (CP-16). "" without failure domains.
func PlaceMachine(domains []clusterv1.FailureDomain, machines []*clusterv1.Machine, outdated map[string][]string) string {
	if len(domains) == 0 {
		return ""
	}
	stay, all := map[string]int{}, map[string]int{}
	for _, m := range machines {
		all[FailureDomainOf(m)]++
		if m.DeletionTimestamp.IsZero() && len(outdated[m.Name]) == 0 {
			stay[FailureDomainOf(m)]++
		}
	}
	return slices.MinFunc(domains, func(a, b clusterv1.FailureDomain) int {
		return cmp.Or(cmp.Compare(stay[a.Name], stay[b.Name]), cmp.Compare(all[a.Name], all[b.Name]), cmp.Compare(a.Name, b.Name))
	}).Name
}

// LimitsHosts reports whether a CapstanMachine can run on some hosts only: by its own fields, or because a host has the volumes that it gets.
// The failure domains of the Cluster are those of all hosts, and that of a Machine never changes. So the machine could wait for ever in a
// domain without such a host.
func LimitsHosts(m infrav1.CapstanMachineSpec) bool {
	selects := m.HostSelector != nil && len(m.HostSelector.MatchLabels)+len(m.HostSelector.MatchExpressions) > 0
	image := cmp.Or(m.Image, infrav1.DefaultMachineImage) != infrav1.DefaultMachineImage
	return selects || image || m.HostName != "" || len(m.HostTolerations)+len(m.HostMounts)+len(m.Devices)+len(m.Volumes) > 0
}

// ForControlPlanes returns the failure domains that control plane Machines may use.
func ForControlPlanes(domains []clusterv1.FailureDomain) []clusterv1.FailureDomain {
	return slices.DeleteFunc(slices.Clone(domains), func(d clusterv1.FailureDomain) bool { return !ptr.Deref(d.ControlPlane, false) })
}
