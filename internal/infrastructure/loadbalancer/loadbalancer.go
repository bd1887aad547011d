// Package loadbalancer decides about the load balancer of a cluster: the addresses at which it listens, the virtual address of the
// endpoint, and its backends, the API servers of the control plane machines (IM-06).
//
// Layer: reconciler. Allowed imports: api, library, contract.
package loadbalancer

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/reconciling"
)

// Port returns the port of the cluster's load balancer: that of the spec, else that of the endpoint, else 6443.
func Port(c *infrav1.CapstanCluster) int32 {
	return cmp.Or(c.Spec.LoadBalancer.Port, c.Spec.ControlPlaneEndpoint.Port, infrav1.DefaultLoadBalancerPort)
}

// Backends are the API servers of the control plane machines that have an address and are not leaving, by name. Their
// port is that of the Cluster. machines are the cluster's Machines, whose labels identify the control plane machines. A
// Machine that is being drained keeps its place until its CapstanMachine is deleted. A machine whose address is not of the
// cluster's network is left out: the host would refuse all of them.
func Backends(cluster *clusterv1.Cluster, n infrav1.ClusterNetworkSpec, machines []clusterv1.Machine, infra []infrav1.CapstanMachine) []*hostpb.Backend {
	port := strconv.Itoa(int(cmp.Or(cluster.Spec.ClusterNetwork.APIServerPort, infrav1.DefaultAPIServerPort)))
	controlPlane := map[string]bool{}
	for i := range machines {
		m := &machines[i]
		if util.IsControlPlaneMachine(m) && m.Spec.InfrastructureRef.Kind == infrav1.MachineKind {
			controlPlane[m.Spec.InfrastructureRef.Name] = true
		}
	}
	var out []*hostpb.Backend
	for i := range infra {
		m := &infra[i]
		if controlPlane[m.Name] && m.Spec.ID != "" && m.DeletionTimestamp.IsZero() && inNetwork(m, n) {
			out = append(out, &hostpb.Backend{
				Name:    m.Name,
				Address: net.JoinHostPort(m.Spec.Network.Addresses[0].Address, port),
			})
		}
	}
	slices.SortFunc(out, func(a, b *hostpb.Backend) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// inNetwork reports whether the first address of a machine is one of the network's for machines.
func inNetwork(m *infrav1.CapstanMachine, n infrav1.ClusterNetworkSpec) bool {
	cidr, err := netip.ParsePrefix(n.MachineCIDR)
	if err != nil || len(m.Spec.Network.Addresses) == 0 {
		return false
	}
	a, err := netip.ParseAddr(m.Spec.Network.Addresses[0].Address)
	if n.LAN.Name != "" {
		return err == nil && cidr.Contains(a)
	}
	return err == nil && overlay.OfMachines(cidr, a)
}

// Host is the host on which a load balancer is made.
type Host struct {
	// Name of the CapstanHost.
	Name string
	// Tunnel is its tunnel address.
	Tunnel string
	// Virtual is the virtual address that the host may have; see VirtualAddress.
	Virtual *hostpb.VirtualAddress
}

// InLAN reports whether a cluster in a network of the user has a load balancer of Capstan. It listens at the virtual address only,
// because the hosts are no gateways there.
func InLAN(c *infrav1.CapstanCluster) bool {
	return c.Spec.Network.LAN.Name != "" && c.Spec.LoadBalancer.Mode != infrav1.LoadBalancerExternal
}

// Moves reports whether several hosts can have the load balancer of a cluster.
func Moves(c *infrav1.CapstanCluster) bool { return c.Spec.Network.Overlay.VNI != 0 || InLAN(c) }

// ownAddress returns the address from the pool if it is one of the cluster's network, which becomes the host's with the balancer; empty
// otherwise. In a LAN, such an address is virtual.
func ownAddress(c *infrav1.CapstanCluster) string {
	if InLAN(c) {
		return ""
	}
	cidr, err := netip.ParsePrefix(c.Spec.Network.MachineCIDR)
	addr, errAddr := netip.ParseAddr(c.Spec.LoadBalancer.Address)
	if err != nil || errAddr != nil || !cidr.Contains(addr) {
		return ""
	}
	return c.Spec.LoadBalancer.Address
}

// maybeVirtual reports whether the load balancer's settings admit a virtual address as endpoint: none of its own, and of a pool only the
// address that is the endpoint.
func maybeVirtual(c *infrav1.CapstanCluster) bool {
	lb := c.Spec.LoadBalancer
	return Moves(c) && lb.Mode != infrav1.LoadBalancerExternal && lb.BindAddress == "" &&
		(lb.AddressFromPool == nil || lb.Address == c.Spec.ControlPlaneEndpoint.Host && ownAddress(c) == "")
}

// IsVirtual reports whether the endpoint of a cluster is a virtual address of a host. Only the administrator of the host
// decides which addresses are: a namespace can write any endpoint.
func IsVirtual(c *infrav1.CapstanCluster, allowed []string) bool {
	addr, err := netip.ParseAddr(c.Spec.ControlPlaneEndpoint.Host)
	// All clusters and hosts compare addresses as text, so another notation of an IPv6 address is none.
	if err != nil || addr.String() != c.Spec.ControlPlaneEndpoint.Host || addr.Is6() != network.IPv6Only(c.Spec.Network) || !maybeVirtual(c) {
		return false
	}
	return slices.ContainsFunc(Virtual(c, allowed), func(prefix netip.Prefix) bool { return prefix.Contains(addr) })
}

// Virtual returns the networks among the virtual addresses of a host from which a cluster can have its endpoint: those of the family of
// its machines and, in a LAN, inside of the LAN.
func Virtual(c *infrav1.CapstanCluster, allowed []string) []netip.Prefix {
	lan, _ := netip.ParsePrefix(c.Spec.Network.MachineCIDR)
	return slices.DeleteFunc(network.OfFamily(allowed, network.IPv6Only(c.Spec.Network)), func(p netip.Prefix) bool {
		return InLAN(c) && (!lan.Contains(p.Addr()) || p.Bits() < lan.Bits())
	})
}

// Serves reports whether a host can have the endpoint of a cluster in a LAN: its virtual addresses contain the endpoint, or any address
// of the LAN as long as the cluster has no endpoint.
func Serves(c *infrav1.CapstanCluster, h *infrav1.CapstanHost) bool {
	if c.Spec.ControlPlaneEndpoint.Host == "" {
		return len(Virtual(c, h.Spec.VirtualAddresses)) > 0
	}
	return IsVirtual(c, h.Spec.VirtualAddresses)
}

// Reserves reports whether a cluster keeps other clusters from having its endpoint as their virtual address. A namespace can write
// any endpoint, so a cluster reserves only a virtual address of a host that admits its namespace, or one that a host has for it: a
// permission that ends does not move the address of a running cluster.
func Reserves(c *infrav1.CapstanCluster, admitting []infrav1.CapstanHost, held bool) bool {
	return held || slices.ContainsFunc(admitting, func(h infrav1.CapstanHost) bool { return IsVirtual(c, h.Spec.VirtualAddresses) })
}

// Reports are the known facts about the virtual endpoint of a cluster. Each load balancer has the state that its host last reported. It is nil
// without a report.
type Reports struct {
	// Initialized: the API server has answered.
	Initialized bool
	// Current is the load balancer of the host in question, First that of the load balancer's host.
	Current, First *hostpb.LoadBalancer
	// Others are the load balancers of the other hosts. One that takes part in the election proves that the load balancer's host took part
	// before, if that host is lost or no longer has the address.
	Others []*hostpb.LoadBalancer
}

// VirtualAddress returns the part of a host in the virtual endpoint of a cluster; nil if the host must not have it. Before the API
// server has answered, only the load balancer's host has the address. Then it moves by election, which begins on that host: as
// long as it may have the address without an election, no other host may take part.
func VirtualAddress(c *infrav1.CapstanCluster, h *infrav1.CapstanHost, r Reports) *hostpb.VirtualAddress {
	if !IsVirtual(c, h.Spec.VirtualAddresses) {
		return nil
	}
	v := &hostpb.VirtualAddress{Address: c.Spec.ControlPlaneEndpoint.Host}
	if h.Name == c.Spec.LoadBalancer.HostName {
		v.First = !r.Initialized && (r.Current.GetVirtualAddress() == nil || r.Current.GetVirtualAddress().GetFirst())
		return v
	}
	takesPart := func(lb *hostpb.LoadBalancer) bool {
		return lb.GetVirtualAddress().GetAddress() == v.Address && !lb.GetVirtualAddress().GetFirst()
	}
	proven := takesPart(r.First) || r.Initialized && r.First.GetVirtualAddress() == nil && slices.ContainsFunc(r.Others, takesPart)
	if !takesPart(r.Current) && !proven {
		return nil
	}
	return v
}

// Desired is the load balancer that a cluster shall have on a host.
func Desired(c *infrav1.CapstanCluster, cluster client.ObjectKey, backends []*hostpb.Backend, on Host) *hostpb.LoadBalancer {
	port := strconv.Itoa(int(Port(c)))
	lb := &hostpb.LoadBalancer{
		Id: c.Spec.ID, Namespace: cluster.Namespace, Name: cluster.Name, NetworkId: c.Spec.ID,
		// The gateway of the cluster's network.
		Listen:   []string{net.JoinHostPort("", port)},
		Backends: backends,
	}
	if InLAN(c) {
		lb.Endpoint = net.JoinHostPort(c.Spec.ControlPlaneEndpoint.Host, strconv.Itoa(int(cmp.Or(c.Spec.ControlPlaneEndpoint.Port, Port(c)))))
		lb.Listen, lb.VirtualAddress = []string{lb.Endpoint}, on.Virtual
		return lb
	}
	address := Additional(c, on)
	if address != "" {
		lb.Listen = append(lb.Listen, net.JoinHostPort(address, port))
	}
	lb.Endpoint = redirected(c, address)
	if lb.Endpoint != "" {
		lb.VirtualAddress = on.Virtual
	}
	return lb
}

// Additional returns the address besides the gateway on which the load balancer of a host listens; empty if there is
// none. It is the host's own address, or one of the cluster's network that becomes the host's with the balancer. It
// becomes the host of an endpoint that has none.
func Additional(c *infrav1.CapstanCluster, on Host) string {
	lb := c.Spec.LoadBalancer
	first := on.Name == lb.HostName
	own := ownAddress(c)
	switch {
	case own != "" || lb.BindAddress != "" && first:
		return cmp.Or(lb.BindAddress, own)
	case c.Spec.ControlPlaneEndpoint.Host == "" && first:
		return tunnelEndpoint(c, on.Tunnel)
	case c.Spec.ControlPlaneEndpoint.Host == on.Tunnel:
		return tunnelEndpoint(c, on.Tunnel)
	}
	return ""
}

// tunnelEndpoint returns the tunnel address if it can be the endpoint: all machines have addresses of its family.
func tunnelEndpoint(c *infrav1.CapstanCluster, tunnel string) string {
	if addr, err := netip.ParseAddr(tunnel); err != nil || addr.Is6() != network.IPv6Only(c.Spec.Network) || c.Spec.Network.Overlay.VNI == 0 || c.Spec.LoadBalancer.BindAddress != "" {
		return ""
	}
	return tunnel
}

// redirected returns the endpoint that machines reach through the load balancer of their own host, because another host
// has its address. It returns "" for an endpoint that is not redirected.
func redirected(c *infrav1.CapstanCluster, listens string) string {
	endpoint := c.Spec.ControlPlaneEndpoint
	addr, err := netip.ParseAddr(endpoint.Host)
	cidr, errCIDR := netip.ParsePrefix(c.Spec.Network.MachineCIDR)
	if err != nil || errCIDR != nil || addr.Is6() != cidr.Addr().Is6() || !addr.IsGlobalUnicast() || endpoint.Port == 0 || c.Spec.Network.Overlay.VNI == 0 ||
		endpoint.Host == listens || cidr.Contains(addr) {
		return ""
	}
	return net.JoinHostPort(endpoint.Host, strconv.Itoa(int(endpoint.Port)))
}

// NeedsPort reports whether the controller chooses the port: the load balancer shares the tunnel address of its host
// with those of other clusters.
func NeedsPort(c *infrav1.CapstanCluster, on Host) bool {
	return c.Spec.LoadBalancer.Port == 0 && c.Spec.ControlPlaneEndpoint.IsZero() && c.Spec.LoadBalancer.AddressFromPool == nil && tunnelEndpoint(c, on.Tunnel) != ""
}

// Ensure creates or updates the host's load balancer and returns it. It calls the host only if the desired state
// differs.
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
		Endpoint: lb.GetEndpoint(),
	}
	if v := lb.GetVirtualAddress(); v != nil {
		out.VirtualAddress = &hostpb.VirtualAddress{Address: v.GetAddress(), First: v.GetFirst()}
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

// ListBackends lists the Backends of a cluster in a network, except the CapstanMachine of the given name: that one is known
// to leave, even if the cache does not show it yet.
func ListBackends(ctx context.Context, c client.Reader, cluster *clusterv1.Cluster, n infrav1.ClusterNetworkSpec, except string) ([]*hostpb.Backend, error) {
	key := client.ObjectKeyFromObject(cluster)
	machines, infra := &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	// The machines of the cluster, and only read: they are not copied.
	if err := c.List(ctx, machines, reconciling.ControlPlaneOf(key), client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	if err := c.List(ctx, infra, reconciling.OfCluster(key), client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(Backends(cluster, n, machines.Items, infra.Items), func(b *hostpb.Backend) bool { return b.GetName() == except }), nil
}
