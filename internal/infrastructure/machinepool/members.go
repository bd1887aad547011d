package machinepool

import (
	"cmp"
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/labels/format"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
)

// member is a machine of the pool: the CapstanMachine, and the Machine that core has made for it, if it has.
type member struct {
	capstan *infrav1.CapstanMachine
	machine *clusterv1.Machine
}

// find reads the machines of the pool, sorted by name, and orphans: Machines whose CapstanMachine was deleted. It reads
// the Machines first. Core creates them after their CapstanMachines, so the orphans of a live reader are real. c may be
// a cache, which may be stale, or live.
func find(ctx context.Context, c client.Reader, s *scope) (members []member, orphans []clusterv1.Machine, err error) {
	machines := &clusterv1.MachineList{}
	if s.machinePool != nil {
		cluster := client.ObjectKey{Namespace: s.pool.Namespace, Name: s.machinePool.Spec.ClusterName}
		ofPool := client.MatchingLabels{clusterv1.MachinePoolNameLabel: format.MustFormatValue(s.machinePool.Name)}
		if err := c.List(ctx, machines, reconciling.OfCluster(cluster), ofPool); err != nil {
			return nil, nil, err
		}
	}
	list := &infrav1.CapstanMachineList{}
	if err := c.List(ctx, list, client.InNamespace(s.pool.Namespace), client.MatchingLabels{
		infrav1.MachinePoolLabel: format.MustFormatValue(s.pool.Name),
	}); err != nil {
		return nil, nil, err
	}
	members, orphans = match(s.machinePool, list.Items, machines.Items)
	return members, orphans, nil
}

// match finds the Machine of each CapstanMachine. Machines that are being deleted are no orphans.
func match(mp *clusterv1.MachinePool, capstans []infrav1.CapstanMachine, machines []clusterv1.Machine) (members []member, orphans []clusterv1.Machine) {
	byName := map[string]*clusterv1.Machine{}
	for i := range machines {
		if ref := machines[i].Spec.InfrastructureRef; ref.Kind == infrav1.MachineKind && ref.APIGroup == infrav1.GroupVersion.Group {
			byName[ref.Name] = &machines[i]
		}
	}
	for i := range capstans {
		m := &capstans[i]
		members = append(members, member{capstan: m, machine: byName[m.Name]})
		delete(byName, m.Name)
	}
	slices.SortFunc(members, func(a, b member) int { return cmp.Compare(a.capstan.Name, b.capstan.Name) })
	for _, m := range byName {
		if m.DeletionTimestamp.IsZero() && mp != nil && metav1.IsControlledBy(m, mp) {
			orphans = append(orphans, *m)
		}
	}
	slices.SortFunc(orphans, func(a, b clusterv1.Machine) int { return cmp.Compare(a.Name, b.Name) })
	return members, orphans
}

// leaving reports whether the machine, or its Machine, is being deleted.
func (m member) leaving() bool {
	return !m.capstan.DeletionTimestamp.IsZero() || m.machine != nil && !m.machine.DeletionTimestamp.IsZero()
}

// stuckAfter is for how long a machine has been removed in vain before it counts as stuck: a manager or a capstand
// that is restarted is back long before.
const stuckAfter = 30 * time.Second

// deletionBlocked reports whether the machine is to be deleted and that this is not possible now.
func deletionBlocked(m *infrav1.CapstanMachine) bool {
	return !m.DeletionTimestamp.IsZero() && conditions.GetReason(m, clusterv1.DeletingCondition) == infrav1.DeletionBlockedReason
}

// stuckIn returns the time until a machine with a blocked deletion counts as stuck. It is zero if it is stuck, and
// negative if its deletion is not blocked.
func stuckIn(m *infrav1.CapstanMachine, now time.Time) time.Duration {
	if !deletionBlocked(m) {
		return -1
	}
	return max(0, stuckAfter-now.Sub(m.DeletionTimestamp.Time))
}

// availableIn returns the time until the machine counts as available, if its Machine stays ready. It is zero if it is
// available, and negative if the Machine is not ready or is being deleted. Core sets no minReadySeconds on the Machines of pools, so their
// Available condition does not include it.
func (m member) availableIn(minReady time.Duration, now time.Time) time.Duration {
	if m.machine == nil || !m.machine.Status.NodeRef.IsDefined() || m.leaving() {
		return -1
	}
	ready := conditions.Get(m.machine, clusterv1.ReadyCondition)
	if ready == nil || ready.Status != metav1.ConditionTrue {
		return -1
	}
	return max(0, minReady-now.Sub(ready.LastTransitionTime.Time))
}

// failure returns the reason why the machine will not recover by itself, or "".
func failure(m *infrav1.CapstanMachine) string {
	for _, t := range []string{infrav1.MachineRunningCondition, infrav1.BootstrapSucceededCondition} {
		switch c := conditions.Get(m, t); {
		case c == nil || c.Status != metav1.ConditionFalse:
		case c.Reason == infrav1.MachineFailedReason, c.Reason == infrav1.MachineLostReason, c.Reason == infrav1.BootstrapFailedReason:
			return c.Message
		}
	}
	return ""
}

// wantsRemediation reports whether a MachineHealthCheck waits for the Machine's owner to replace it. Core's
// MachinePool controller does nothing about it.
func wantsRemediation(m *clusterv1.Machine) bool {
	return m != nil && conditions.IsFalse(m, clusterv1.MachineOwnerRemediatedCondition)
}

// marked reports whether the machine has the annotation to be deleted first, for example from an autoscaler.
func (m member) marked() bool {
	_, ok := m.capstan.Annotations[clusterv1.DeleteMachineAnnotation]
	if !ok && m.machine != nil {
		_, ok = m.machine.Annotations[clusterv1.DeleteMachineAnnotation]
	}
	return ok
}

// domain is the failure domain that the machine was made for, or that it is in.
func (m member) domain() string {
	return cmp.Or(m.capstan.Annotations[infrav1.MachineFailureDomainAnnotation], m.capstan.Status.FailureDomain)
}

// misplaced reports whether the machine is outside of the failure domains of the pool, or waits for a host in one that has closed while
// another one is open, or that the pool does not require any more. The status of a machine is empty after a move or a restore. Every host is
// in a domain, so without one the host has not reported yet: the domain is unknown, and no difference.
func (d desired) misplaced(m member) bool {
	waits := m.capstan.Spec.HostName == ""
	if len(d.domains) == 0 {
		return waits && m.capstan.Annotations[infrav1.MachineFailureDomainAnnotation] != ""
	}
	unknown := m.domain() == "" && m.provisioned()
	domains := d.domains
	if waits && len(d.open) > 0 {
		domains = d.open
	}
	return !unknown && !slices.Contains(domains, m.domain())
}

func nodeVersion(m *clusterv1.Machine) string {
	if m == nil || m.Status.NodeInfo == nil {
		return ""
	}
	return m.Status.NodeInfo.KubeletVersion
}

// provisioned reports whether the host has started the machine. A move or a restore loses the status, and not the spec.
func (m member) provisioned() bool { return m.capstan.Spec.ProviderID != "" }

// hasRun reports whether the machine has something to lose. A machine that runs without the end of its bootstrap, or whose bootstrap has
// failed, has not run: hosts refuse its updates, and it can no longer join after a change of the bootstrap data. The last report about a
// machine that does not run, or whose host does not answer, can be older than the end of the bootstrap.
func (m member) hasRun() bool {
	boots := conditions.IsFalse(m.capstan, infrav1.BootstrapSucceededCondition) &&
		(conditions.GetReason(m.capstan, infrav1.BootstrapSucceededCondition) == infrav1.BootstrapFailedReason || conditions.IsTrue(m.capstan, infrav1.MachineRunningCondition))
	return m.provisioned() && !boots
}

// instances describes the members to the plan. It returns when the next of them becomes available, or counts as stuck, by
// the passing of time alone; zero if none does.
func instances(members []member, want desired, now time.Time) (out []instance, next time.Duration) {
	for _, m := range members {
		available, stuck := m.availableIn(want.minReady, now), stuckIn(m.capstan, now)
		next = order.Sooner(next, order.Sooner(available, stuck))
		update := want.updateOf(m)
		behind := want.outdated(m)
		out = append(out, instance{
			name:      m.capstan.Name,
			created:   m.capstan.CreationTimestamp.Time,
			leaving:   m.leaving(),
			stuck:     stuck == 0,
			available: available == 0,
			failed:    failure(m.capstan) != "",
			remediate: wantsRemediation(m.machine),
			outdated:  behind && want.replace(m, update),
			behind:    behind,
			update:    update,
			marked:    m.marked(),
			domain:    m.domain(),
		})
	}
	return out, next
}

// outdated reports whether the properties or the failure domain of the machine differ from those of a new one, or whether its
// update in place is not finished.
func (d desired) outdated(m member) bool {
	return m.isUpdating() || m.capstan.Annotations[infrav1.MachineSpecHashAnnotation] != d.hash || d.misplaced(m)
}
