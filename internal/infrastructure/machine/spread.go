package machine

import (
	"context"
	"maps"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// The machines of a cluster are spread over failure domains and hosts: control plane machines away from each other, and workers
// away from each other. Workers are made before most control plane machines of a new cluster, so counting both together would not
// spread either of them.

// choices are the hosts that this process has chosen and that its cache does not show yet. Machines that are placed at
// the same time would all go to one host otherwise.
type choices struct {
	mu sync.Mutex
	// hosts are the chosen hosts by the name of the machine, of each cluster.
	hosts map[client.ObjectKey]map[string]string
	// clusters are those of the machines in hosts.
	clusters map[client.ObjectKey]client.ObjectKey
}

func (c *choices) note(cluster *clusterv1.Cluster, m *infrav1.CapstanMachine) {
	machine, of := client.ObjectKeyFromObject(m), client.ObjectKeyFromObject(cluster)
	c.release(machine)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hosts == nil {
		c.hosts, c.clusters = map[client.ObjectKey]map[string]string{}, map[client.ObjectKey]client.ObjectKey{}
	}
	if c.hosts[of] == nil {
		c.hosts[of] = map[string]string{}
	}
	c.hosts[of][m.Name], c.clusters[machine] = m.Spec.HostName, of
}

// release removes the choice for a machine after the cache contains it or the machine is deleted.
func (c *choices) release(machine client.ObjectKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of, found := c.clusters[machine]
	if !found {
		return
	}
	delete(c.clusters, machine)
	if delete(c.hosts[of], machine.Name); len(c.hosts[of]) == 0 {
		delete(c.hosts, of)
	}
}

// of returns the chosen hosts of a cluster's machines, by the name of the machine.
func (c *choices) of(cluster client.ObjectKey) map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.hosts[cluster])
}

// countMembers counts the machines of each candidate that matter for the spread of this one.
func (r *Reconciler) countMembers(ctx context.Context, s *scope, candidates []placement.Host) error {
	cluster := client.ObjectKeyFromObject(s.cluster)
	machines, list := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	if err := r.Client.List(ctx, list, reconciling.OfCluster(cluster), client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	if err := r.Client.List(ctx, machines, reconciling.ControlPlaneOf(cluster), client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	chosen, peers := r.chosen.of(cluster), peersOf(s.capstan.Name, util.IsControlPlaneMachine(s.machine), machines.Items)
	members, outdated := membersOf(list.Items, chosen, peers(false)), membersOf(list.Items, chosen, peers(true))
	for i := range candidates {
		candidates[i].Members, candidates[i].Outdated = members[candidates[i].Name], outdated[candidates[i].Name]
	}
	return nil
}

// peersOf returns the selections of the machines with the role of a machine, by name: of those that stay, and of the outdated ones. Only
// control plane machines count as outdated. A rollout creates one before it removes another one, so it would move all of them to few hosts
// otherwise.
func peersOf(self string, isControlPlane bool, controlPlane []clusterv1.Machine) func(outdated bool) func(name string) bool {
	has, isOutdated := map[string]bool{}, map[string]bool{}
	for i := range controlPlane {
		m := &controlPlane[i]
		has[m.Spec.InfrastructureRef.Name] = true
		isOutdated[m.Spec.InfrastructureRef.Name] = conditions.IsFalse(m, clusterv1.MachineUpToDateCondition)
	}
	return func(outdated bool) func(string) bool {
		return func(name string) bool {
			return name != self && has[name] == isControlPlane && isOutdated[name] == outdated
		}
	}
}

// membersOf counts machines by host: those of the list that stay, and those that were chosen a moment ago, by name.
func membersOf(machines []infrav1.CapstanMachine, chosen map[string]string, counts func(name string) bool) map[string]int {
	hosts := map[string]string{}
	maps.Copy(hosts, chosen)
	for i := range machines {
		m := &machines[i]
		switch {
		case !m.DeletionTimestamp.IsZero():
			delete(hosts, m.Name)
		case m.Spec.HostName != "":
			hosts[m.Name] = m.Spec.HostName
		}
	}
	out := map[string]int{}
	for name, host := range hosts {
		if counts(name) {
			out[host]++
		}
	}
	return out
}
