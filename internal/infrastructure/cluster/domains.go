package cluster

import (
	"cmp"
	"context"
	"slices"

	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/order"
)

// setFailureDomains shows the failure domains of the hosts that the cluster may use (IC-04) and that its network reaches. A
// domain stays while its hosts are away, but gets no new control plane machines.
func (r *Reconciler) setFailureDomains(ctx context.Context, s *scope) error {
	within, err := hostselection.Within(ctx, r.Client, r.Pool, s.capstan)
	if err != nil {
		return err
	}
	offering, _, _, err := hostselection.Offering(ctx, r.Client, s.capstan, hostselection.Reached(s.usable, r.Pool, within))
	if err != nil {
		return err
	}
	s.capstan.Status.FailureDomains = failureDomains(offering)
	return nil
}

// failureDomains of hosts, by name; at most 100, which is all that the contract has room for: those for control planes before others. Control
// plane machines would wait for ever in one where every host that may have them takes no more machines, repels them by a taint, or is lost:
// the replacement of a machine on a lost host must go elsewhere. If all of them are lost, there is no other place.
func failureDomains(usable []infrav1.CapstanHost) []clusterv1.FailureDomain {
	lost := func(h *infrav1.CapstanHost) bool { return conditions.IsFalse(h, infrav1.HostConnectedCondition) }
	allLost := true
	for i := range usable {
		allLost = allLost && (lost(&usable[i]) || !takesControlPlane(&usable[i]))
	}
	byName := map[string]bool{}
	for i := range usable {
		h, name := &usable[i], placement.FailureDomain(&usable[i])
		byName[name] = byName[name] || takesControlPlane(h) && (allLost || !lost(h))
	}
	var out []clusterv1.FailureDomain
	for name, controlPlane := range byName {
		out = append(out, clusterv1.FailureDomain{Name: name, ControlPlane: ptr.To(controlPlane)})
	}
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int {
		return cmp.Or(order.TrueFirst(*a.ControlPlane, *b.ControlPlane), cmp.Compare(a.Name, b.Name))
	})
	out = out[:min(len(out), 100)]
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func takesControlPlane(h *infrav1.CapstanHost) bool {
	return placement.Schedulable(h) && h.DeletionTimestamp.IsZero() && placement.AllowsControlPlane(h) && !placement.Repels(h)
}
