package machinepool

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// checkDomains refuses failure domains of which the cluster has none. A single missing one can come back: a domain is missing while its
// hosts are abandoned, and the pool goes on in the others.
func checkDomains(wanted []string, known []clusterv1.FailureDomain) *invalid {
	var names []string
	for _, d := range known {
		if slices.Contains(wanted, d.Name) {
			return nil
		}
		names = append(names, d.Name)
	}
	if len(wanted) == 0 {
		return nil
	}
	return &invalid{infrav1.PoolInvalidFailureDomainReason, fmt.Sprintf(
		"The MachinePool's spec.failureDomains name %s, but the cluster has %s: name one of these, or set spec.failureDomain of a CapstanHost",
		strings.Join(wanted, ", "), cmp.Or(strings.Join(names, ", "), "none"))}
}

// missingDomains returns the wanted failure domains that the cluster lacks.
func missingDomains(wanted []string, known []clusterv1.FailureDomain) (missing []string) {
	for _, name := range wanted {
		if !slices.ContainsFunc(known, func(d clusterv1.FailureDomain) bool { return d.Name == name }) {
			missing = append(missing, name)
		}
	}
	return missing
}

// openDomains returns the wanted failure domains in which one of the pool's hosts takes a new machine. In another one, the machine would wait,
// for example for the end of a drain that itself waits for the machine. A machine with volumes waits for the host of its volume anyway, so
// all domains that exist are open to it. While none is open, a machine waits in any that exists.
func openDomains(want desired, known []clusterv1.FailureDomain, hosts []infrav1.CapstanHost, machine infrav1.CapstanMachineSpec) []string {
	takes := map[string]bool{}
	for i := range hosts {
		h := &hosts[i]
		able := takesMachines(h) && slices.Contains(h.Status.Versions, want.version) && !placement.Repels(h, machine.HostTolerations...)
		if able || len(machine.Volumes) > 0 {
			takes[placement.FailureDomain(h)] = true
		}
	}
	var open, closed []string
	for _, d := range known { // A host that the network of the cluster does not reach is in none of them.
		switch {
		case !slices.Contains(want.domains, d.Name):
		case takes[d.Name]:
			open = append(open, d.Name)
		default:
			closed = append(closed, d.Name)
		}
	}
	if len(open) == 0 {
		return closed
	}
	return open
}

// takesMachines reports whether a host is not drained, rebooted, cordoned, deleted or lost.
func takesMachines(h *infrav1.CapstanHost) bool {
	return placement.Schedulable(h) && h.DeletionTimestamp.IsZero() && !conditions.IsFalse(h, infrav1.HostConnectedCondition)
}
