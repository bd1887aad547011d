package overlay

import (
	"cmp"
	"net/netip"
	"slices"

	"go4.org/netipx"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cidr"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Network is the part of the cluster's network that a host with this tunnel address has.
func Network(c *infrav1.CapstanCluster, cluster client.ObjectKey, tunnel string) *hostpb.Network {
	n := &hostpb.Network{
		Id: c.Spec.ID, Namespace: cluster.Namespace, Name: cluster.Name,
		Cidr: c.Spec.Network.MachineCIDR, Ipv6Cidr: c.Spec.Network.MachineIPv6CIDR,
	}
	if o := c.Spec.Network.Overlay; o.VNI != 0 {
		n.Overlay = &hostpb.Overlay{Vni: uint32(o.VNI), Address: tunnel, Mtu: o.MTU}
	}
	return n
}

// WithLAN attaches the machines of a network to the bridge of a host to a network of the user, in a VLAN unless vlan is 0. pods are the
// pod networks of the Cluster; the host needs those of the families that the machines have.
func WithLAN(n *hostpb.Network, offer *infrav1.LANNetwork, vlan int32, pods []string) *hostpb.Network {
	if len(pods) == 0 {
		pods = []string{cidr.DefaultPods}
	}
	n.Lan = &hostpb.LAN{Bridge: offer.Bridge, Vlan: uint32(vlan)}
	for _, text := range pods {
		if p, err := netip.ParsePrefix(text); err == nil && hasFamily(n, p.Addr()) {
			n.Lan.Pods = append(n.Lan.Pods, p.Masked().String())
		}
	}
	return n
}

// hasFamily reports whether the machines of a network have addresses of the family of an address.
func hasFamily(n *hostpb.Network, a netip.Addr) bool {
	first, err := netip.ParsePrefix(n.GetCidr())
	return err == nil && first.Addr().Is4() == a.Is4() || a.Is6() && n.GetIpv6Cidr() != ""
}

// Host is a host as the overlay sees it.
type Host struct {
	Name string
	// Box that it stands on; empty when it is unknown.
	Box string
	// Tunnel is its tunnel address; empty when it has none.
	Tunnel string
	// Key is the WireGuard key with which it encrypts its overlays; empty when it does not.
	Key string
}

// Encrypted reports whether the host encrypts its overlays.
func (h Host) Encrypted() bool { return h.Key != "" }

// connects reports whether two hosts can exchange the packets of a cluster.
func connects(a, b Host) bool {
	return SameFamily(a.Tunnel, b.Tunnel) && a.Encrypted() == b.Encrypted()
}

// Disagreement says that a host encrypts its overlays, or not, and the load balancer's host decides otherwise.
func Disagreement(encrypted bool) string {
	if encrypted {
		return "it encrypts its overlays, and the load balancer's host does not: start all capstands of the cluster's hosts with the same --overlay-encryption"
	}
	return "it does not encrypt its overlays, and the load balancer's host does: start its capstand with --overlay-encryption=WireGuard"
}

// together reports whether two hosts have one network between them without a tunnel.
func together(a, b Host) bool {
	return a.Name == b.Name || a.Box != "" && a.Box == b.Box || a.Tunnel != "" && a.Tunnel == b.Tunnel
}

// SameFamily reports whether two tunnel addresses can exchange packets.
func SameFamily(a, b string) bool {
	first, errFirst := netip.ParseAddr(a)
	second, errSecond := netip.ParseAddr(b)
	return errFirst == nil && errSecond == nil && first.Is4() == second.Is4()
}

// Hosts are the names of the hosts that have a part of the cluster's network: that of the load balancer, and those
// with machines. Sorted.
func Hosts(balancer string, machines []infrav1.CapstanMachine) []string {
	names := []string{balancer}
	for i := range machines {
		if placed(&machines[i]) {
			names = append(names, machines[i].Spec.HostName)
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

// placed reports whether the machine has, or may have, a place on a host.
func placed(m *infrav1.CapstanMachine) bool {
	return m.Spec.ID != "" && m.Spec.HostName != "" && len(m.Spec.Network.Addresses) > 0
}

// Balancers are those of the hosts that have a load balancer, one on each box, because the hosts of a box share the
// gateway address: the host of the cluster's load balancer, elsewhere one that has a balancer already, else the
// first by name.
func Balancers(hosts []Host, balancer string, have map[string]bool) map[string]bool {
	rank := func(h Host) int {
		switch {
		case h.Name == balancer:
			return 0
		case have[h.Name]:
			return 1
		}
		return 2
	}
	sorted := slices.SortedFunc(slices.Values(hosts), func(a, b Host) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	out := map[string]bool{}
	var chosen []Host
	for _, h := range sorted {
		if !slices.ContainsFunc(chosen, func(c Host) bool { return together(c, h) }) {
			chosen, out[h.Name] = append(chosen, h), true
		}
	}
	return out
}

// Peers are the machines of the cluster on other boxes than the host's, sorted by their first address. A machine with an
// address that the network does not have, or that comes first with another machine, is left out: the host would refuse all of
// them.
func Peers(on Host, machines []infrav1.CapstanMachine, hosts map[string]Host, networks []netip.Prefix) []*hostpb.Peer {
	sorted := make([]*infrav1.CapstanMachine, 0, len(machines))
	for i := range machines {
		if placed(&machines[i]) {
			sorted = append(sorted, &machines[i])
		}
	}
	slices.SortFunc(sorted, preferred)
	taken := map[netip.Addr]bool{}
	var out []*hostpb.Peer
	for _, m := range sorted {
		addresses := usable(m, networks, taken)
		for _, a := range addresses {
			taken[a] = true
		}
		h, known := hosts[m.Spec.HostName]
		if len(addresses) == 0 || !known || !connects(h, on) || together(h, on) {
			continue
		}
		out = append(out, &hostpb.Peer{Addresses: texts(addresses), Host: h.Tunnel})
	}
	slices.SortFunc(out, func(a, b *hostpb.Peer) int { return cmp.Compare(a.Addresses[0], b.Addresses[0]) })
	return out
}

// Tunnels are the tunnel addresses of those of the named hosts that are on other boxes, sorted. Their load balancers connect to
// the machines on this one.
func Tunnels(on Host, names []string, hosts map[string]Host) (out []string) {
	for _, name := range names {
		if h, known := hosts[name]; known && connects(h, on) && !together(h, on) {
			out = append(out, h.Tunnel)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Keys are the WireGuard keys of those of the named hosts that have peers or tunnels, by tunnel address; nil without encryption.
// Hosts that the cluster does not use can have the same tunnel address.
func Keys(on Host, names []string, peers []*hostpb.Peer, tunnels []string, hosts map[string]Host) (out map[string]string) {
	wanted := map[string]bool{}
	for _, p := range peers {
		wanted[p.Host] = true
	}
	for _, t := range tunnels {
		wanted[t] = true
	}
	for _, name := range names {
		h, known := hosts[name]
		if !known || !h.Encrypted() || !connects(h, on) || !wanted[h.Tunnel] {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[h.Tunnel] = h.Key
	}
	return out
}

// preferred orders the machines that claim one address: one that stays before one that leaves, one that was made before
// one that was not, the older one.
func preferred(a, b *infrav1.CapstanMachine) int {
	rank := func(m *infrav1.CapstanMachine) int {
		switch {
		case !m.DeletionTimestamp.IsZero():
			return 2
		case m.Spec.ProviderID == "":
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// usable are the addresses of a machine; none if one of them is not of the network in its place, or is taken.
func usable(m *infrav1.CapstanMachine, networks []netip.Prefix, taken map[netip.Addr]bool) (out []netip.Addr) {
	if len(m.Spec.Network.Addresses) > len(networks) {
		return nil
	}
	for i, text := range m.Spec.Network.Addresses {
		a, err := netip.ParseAddr(text.Address)
		if err != nil || taken[a] || !OfMachines(networks[i], a) {
			return nil
		}
		out = append(out, a)
	}
	return out
}

// OfMachines reports whether a machine of the network can have the address.
func OfMachines(n netip.Prefix, a netip.Addr) bool {
	broadcast := n.Addr().Is4() && a == netipx.PrefixLastIP(n)
	return n.Contains(a) && a != n.Addr() && a != n.Addr().Next() && !broadcast
}

func texts(addresses []netip.Addr) (out []string) {
	for _, a := range addresses {
		out = append(out, a.String())
	}
	return out
}
