package machine

import (
	"context"
	"maps"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// The machines of a cluster are spread over failure domains and hosts: control plane machines away from each other, and workers
// away from each other. Workers are made before most control plane machines of a new cluster, so counting both together would not
// spread either of them.

// choices are the hosts that this process has chosen and that its cache does not show yet. Machines that are placed at
// the same time would all go to one host otherwise.
type choices struct {
	mu    sync.Mutex
	hosts map[client.ObjectKey]choice
}

type choice struct{ cluster, host string }

func (c *choices) note(cluster *clusterv1.Cluster, m *infrav1.CapstanMachine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hosts == nil {
		c.hosts = map[client.ObjectKey]choice{}
	}
	c.hosts[client.ObjectKeyFromObject(m)] = choice{cluster.Name, m.Spec.HostName}
}

// release removes the choice for a machine after the cache contains it or the machine is deleted.
func (c *choices) release(machine client.ObjectKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.hosts, machine)
}

// of returns the chosen hosts of a cluster's machines, by the name of the machine.
func (c *choices) of(cluster client.ObjectKey) map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]string{}
	for machine, its := range c.hosts {
		if machine.Namespace == cluster.Namespace && its.cluster == cluster.Name {
			out[machine.Name] = its.host
		}
	}
	return out
}

// countMembers sets the Members of each candidate: its machines that count for the spread of this one.
func (r *Reconciler) countMembers(ctx context.Context, s *scope, candidates []placement.Host) error {
	of := []client.ListOption{client.InNamespace(s.cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}, client.UnsafeDisableDeepCopy}
	machines, list := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	if err := r.Client.List(ctx, list, of...); err != nil {
		return err
	}
	if err := r.Client.List(ctx, machines, append(of, client.HasLabels{clusterv1.MachineControlPlaneLabel})...); err != nil {
		return err
	}
	controlPlane := map[string]bool{}
	for i := range machines.Items {
		controlPlane[machines.Items[i].Spec.InfrastructureRef.Name] = true
	}
	members := membersOf(list.Items, r.chosen.of(client.ObjectKeyFromObject(s.cluster)), func(name string) bool {
		return name != s.capstan.Name && controlPlane[name] == util.IsControlPlaneMachine(s.machine)
	})
	for i := range candidates {
		candidates[i].Members = members[candidates[i].Name]
	}
	return nil
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
