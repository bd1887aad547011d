// Package loadbalancer keeps the members of a cluster's load balancer: its control plane machines (IM-06).
//
// Layer: reconciler.
package loadbalancer

import (
	"cmp"
	"context"
	"net"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// Port on which the cluster's load balancer listens: the one that was asked for, else that of the
// endpoint, else 6443.
func Port(c *infrav1.CapstanCluster) int32 {
	return cmp.Or(c.Spec.LoadBalancer.Port, c.Spec.ControlPlaneEndpoint.Port, infrav1.DefaultLoadBalancerPort)
}

// Backends are the API servers of the control plane machines that have an address and are not leaving,
// by name. They listen where the Cluster says. machines are the cluster's Machines; only they tell which
// CapstanMachines are of the control plane. A Machine that is being drained keeps its place until its CapstanMachine
// is deleted.
func Backends(cluster *clusterv1.Cluster, machines []clusterv1.Machine, infra []infrav1.CapstanMachine) []*hostpb.Backend {
	port := strconv.Itoa(int(cmp.Or(cluster.Spec.ClusterNetwork.APIServerPort, infrav1.DefaultAPIServerPort)))
	controlPlane := map[string]bool{}
	for i := range machines {
		m := &machines[i]
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok && m.Spec.InfrastructureRef.Kind == "CapstanMachine" {
			controlPlane[m.Spec.InfrastructureRef.Name] = true
		}
	}
	var out []*hostpb.Backend
	for i := range infra {
		m := &infra[i]
		if controlPlane[m.Name] && m.Spec.ID != "" && m.DeletionTimestamp.IsZero() && len(m.Spec.Network.Addresses) > 0 {
			out = append(out, &hostpb.Backend{
				Name:    m.Name,
				Address: net.JoinHostPort(m.Spec.Network.Addresses[0].Address, port),
			})
		}
	}
	slices.SortFunc(out, func(a, b *hostpb.Backend) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Desired is the load balancer that a cluster shall have.
func Desired(c *infrav1.CapstanCluster, cluster client.ObjectKey, backends []*hostpb.Backend) *hostpb.LoadBalancer {
	port := strconv.Itoa(int(Port(c)))
	lb := &hostpb.LoadBalancer{
		Id: c.Spec.ID, Namespace: cluster.Namespace, Name: cluster.Name, NetworkId: c.Spec.ID,
		// The gateway of the cluster's network.
		Listen:   []string{net.JoinHostPort("", port)},
		Backends: backends,
	}
	// The host's own address, or one of the cluster's network that becomes the host's with the balancer.
	if address := cmp.Or(c.Spec.LoadBalancer.BindAddress, c.Spec.LoadBalancer.Address); address != "" {
		lb.Listen = append(lb.Listen, net.JoinHostPort(address, port))
	}
	return lb
}

// Ensure makes the host's load balancer what is desired and returns it. It calls the host only when
// something differs.
func Ensure(ctx context.Context, host *connections.Host, desired *hostpb.LoadBalancer) (*hostpb.LoadBalancer, error) {
	if current := host.LoadBalancer(desired.GetId()); current != nil && proto.Equal(wanted(current), wanted(desired)) {
		return current, nil
	}
	return host.EnsureLoadBalancer(ctx, desired)
}

// wanted is the part of a load balancer that the host does not fill in.
func wanted(lb *hostpb.LoadBalancer) *hostpb.LoadBalancer {
	out := &hostpb.LoadBalancer{
		Id: lb.GetId(), Namespace: lb.GetNamespace(), Name: lb.GetName(), NetworkId: lb.GetNetworkId(), Listen: slices.Clone(lb.GetListen()),
	}
	if len(out.Listen) > 0 {
		// The host may fill in the gateway address where the host part was empty.
		_, port, _ := net.SplitHostPort(out.Listen[0])
		out.Listen[0] = port
	}
	for _, b := range lb.GetBackends() {
		out.Backends = append(out.Backends, &hostpb.Backend{Name: b.GetName(), Address: b.GetAddress()})
	}
	slices.SortFunc(out.Backends, func(a, b *hostpb.Backend) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Members lists the Backends of a cluster, except the CapstanMachine of the given name: that one is known
// to leave, even if the cache does not show it yet.
func Members(ctx context.Context, c client.Reader, cluster *clusterv1.Cluster, except string) ([]*hostpb.Backend, error) {
	of := client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.Name}
	machines, infra := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	if err := c.List(ctx, machines, client.InNamespace(cluster.Namespace), of, client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		return nil, err
	}
	// All machines of the cluster, and only read: they are not copied.
	if err := c.List(ctx, infra, client.InNamespace(cluster.Namespace), of, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(Backends(cluster, machines.Items, infra.Items), func(b *hostpb.Backend) bool { return b.GetName() == except }), nil
}
