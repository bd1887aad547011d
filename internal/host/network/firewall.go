package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/knftables"

	"capstan.dev/capstan/internal/host/fencing"
)

// firewall contains the data that determine the nftables rules of a network.
type firewall struct {
	networkID string
	subnets   []Subnet
	overlay   *Overlay
	own       netip.Addr   // the hostAddress of this box, if there is an overlay
	hosts     []netip.Addr // from which the other boxes send VXLAN packets
	redirect  Redirect
	services  []Service
}

func (b Box) firewall(n Network, subnets []Subnet) (firewall, error) {
	peers, err := b.peers(n.ID)
	if err != nil {
		return firewall{}, err
	}
	redirect, err := b.redirect(n.ID)
	if err != nil {
		return firewall{}, err
	}
	services, err := b.services(n.ID)
	f := firewall{networkID: n.ID, subnets: subnets, overlay: n.Overlay, hosts: peers.ends(), redirect: redirect, services: services}
	if n.Overlay != nil {
		f.own = n.hostAddress(n.Overlay.Address)
	}
	return f, err
}

// writeFirewall writes the rules of a network.
func (b Box) writeFirewall(ctx context.Context, n Network, subnets []Subnet) error {
	r, err := b.ruleset(n, subnets)
	if err != nil {
		return err
	}
	return r.write(ctx)
}

// rewriteFirewall writes the rules of a network after a change of its records.
func (b Box) rewriteFirewall(ctx context.Context, n Network) error {
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return err
	}
	return b.writeFirewall(ctx, n, subnets)
}

// rules returns the rules by chain. They work with bridge-nf-call-iptables on and off. If it is on, frames between ports of
// the bridge pass through prerouting and forward, with the bridge as their interface.
//
// The rules do not limit connections from the box to its machines, because the box does not forward these packets. They do
// not limit connections to the load balancer either, because it runs on the box and must be reachable from outside.
func (f firewall) rules() map[string][]string {
	bridge := BridgeName(f.networkID)
	var masquerade []string
	for _, subnet := range f.subnets {
		// A connection from the box to its own load balancer has a source address in the subnet and leaves through lo.
		// Masquerading would replace the source by the address of another link, and the kernel drops the connection when
		// that address is removed.
		masquerade = append(masquerade, fmt.Sprintf("%s saddr %s oifname != { %s, lo } masquerade", family(subnet.Prefix.Addr()), subnet.Prefix, bridge))
	}
	return map[string][]string{
		// The box must not track connections between machines. Two clusters may have equal Pod networks, and connection
		// tracking would confuse their connections.
		"prerouting": {
			fmt.Sprintf("iifname %s ether daddr != %s notrack", bridge, gatewayMAC(f.networkID, f.subnets)),
		},
		"endpoint": append(f.redirection(), f.toServices()...),
		"local":    append(f.localRedirection(), f.toServices()...),
		"input":    slices.Concat(f.admitTunnel(), f.admitProbes(), f.protectLink(), f.protectHost()),
		"output":   f.keepInLink(),
		"forward": slices.Concat(clampSegments(bridge), f.closeLink(), []string{
			// A machine could otherwise send packets for the tunnels of another box, with the source address of a third one.
			fmt.Sprintf("iifname %s oifname != %s udp dport %d drop", bridge, bridge, tunnelPort),
		}, f.ownSources(), f.keepProbes(), []string{
			fmt.Sprintf("iifname %s oifname %s accept", bridge, bridge),
			fmt.Sprintf("oifname %s ct state established,related accept", bridge),
		}, f.admitServices(), []string{
			fmt.Sprintf("oifname %s drop", bridge),
		}),
		"postrouting": append(masquerade, f.hairpin()...),
	}
}

// clampSegments lowers the segment size that both ends of a TCP connection with the outside announce, so that it fits the smaller of the
// routes to them takes. Otherwise a connection through a smaller MTU depends on ICMP messages, which firewalls on the way drop.
// Connections between machines are not clamped: all of them have the MTU of their network.
func clampSegments(bridge string) (rules []string) {
	for _, direction := range []string{"iifname %s oifname != %s", "iifname != %s oifname %s"} {
		rules = append(rules, fmt.Sprintf(direction+" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu", bridge, bridge))
	}
	return rules
}

// ownSources drops packets to the outside with other sources than machines have. The source of a pod becomes that of its machine before, so these
// packets are forged, or nobody can answer them. The box would send them with the source that a pod has chosen.
func (f firewall) ownSources() (rules []string) {
	outside := fmt.Sprintf("iifname %s oifname != %[1]s ", BridgeName(f.networkID))
	for _, subnet := range f.subnets {
		rules = append(rules, fmt.Sprintf("%s%s saddr != %s drop", outside, family(subnet.Prefix.Addr()), subnet.Prefix))
	}
	switch {
	case len(f.subnets) > 1:
		return rules
	case hasIPv6(f.subnets):
		return append(rules, outside+"meta nfproto ipv4 drop")
	}
	return append(rules, outside+"meta nfproto ipv6 drop")
}

// admitTunnel drops VXLAN packets from machines with any source address, and packets with the network's VNI from
// other addresses than those of its boxes. Other VNIs belong to other networks and programs. The VNI follows the UDP header
// and four bytes of flags.
func (f firewall) admitTunnel() []string {
	rules := []string{fmt.Sprintf("iifname %s udp dport %d drop", BridgeName(f.networkID), tunnelPort)}
	if f.overlay == nil {
		return rules
	}
	ours := fmt.Sprintf("udp dport %d @th,96,24 %d", tunnelPort, f.overlay.VNI)
	if len(f.hosts) > 0 {
		var hosts []string
		for _, host := range f.hosts {
			hosts = append(hosts, host.String())
		}
		rules = append(rules, f.throughLink()+fmt.Sprintf("%s %s saddr { %s } accept", ours, family(f.overlay.end()), strings.Join(hosts, ", ")))
	}
	return append(rules, ours+" drop")
}

// admitProbes drops probes of fencing that no other box has sent: a pod could otherwise forge contacts with a lost box. The bridges of all
// boxes have the same MAC address, which no machine has.
func (f firewall) admitProbes() []string {
	if f.overlay == nil {
		return nil
	}
	probe := fmt.Sprintf("%s daddr %s udp dport %d drop", family(f.own), f.own, fencing.Port)
	return []string{
		fmt.Sprintf("iifname != %s %s", BridgeName(f.networkID), probe),
		fmt.Sprintf("ether saddr != %s %s", gatewayMAC(f.networkID, f.subnets), probe),
	}
}

// keepProbes forwards no probes of machines to other boxes, where they would come from the bridge of this one.
func (f firewall) keepProbes() (rules []string) {
	if f.overlay == nil {
		return nil
	}
	for _, addresses := range hostAddresses {
		rules = append(rules, fmt.Sprintf("oifname %s %s daddr %s udp dport %d drop", BridgeName(f.networkID), family(addresses.Addr()), addresses, fencing.Port))
	}
	return rules
}

// redirection sends connections of machines to the cluster's endpoint, which is an address of another box or virtual, to the
// load balancer of this box.
func (f firewall) redirection() []string {
	if !f.redirect.Endpoint.IsValid() {
		return nil
	}
	rules := []string{"iifname " + BridgeName(f.networkID) + " " + f.toBalancer()}
	if f.redirect.Virtual {
		// Connections from outside, while the box has the address.
		rules = append(rules, "fib daddr type local "+f.toBalancer())
	}
	return rules
}

// localRedirection sends connections of the box itself to a virtual address to its own load balancer.
func (f firewall) localRedirection() []string {
	if !f.redirect.Endpoint.IsValid() || !f.redirect.Virtual {
		return nil
	}
	return []string{f.toBalancer()}
}

func (f firewall) toBalancer() string {
	ip := family(f.redirect.Endpoint.Addr())
	return fmt.Sprintf("%s daddr %s tcp dport %d dnat %s to %s", ip, f.redirect.Endpoint.Addr(), f.redirect.Endpoint.Port(), ip, f.redirect.To)
}

// family returns the name of an address family in nftables.
func family(a netip.Addr) string {
	if a.Is6() {
		return "ip6"
	}
	return "ip"
}

var chains = []knftables.Chain{
	{Name: "prerouting", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.PreroutingHook), Priority: knftables.PtrTo(knftables.RawPriority)},
	{Name: "endpoint", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.PreroutingHook), Priority: knftables.PtrTo(knftables.DNATPriority)},
	{Name: "local", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.OutputHook), Priority: knftables.PtrTo(knftables.DNATPriority)},
	{Name: "input", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.InputHook), Priority: knftables.PtrTo(knftables.FilterPriority)},
	{Name: "output", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.OutputHook), Priority: knftables.PtrTo(knftables.FilterPriority)},
	{Name: "forward", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.ForwardHook), Priority: knftables.PtrTo(knftables.FilterPriority)},
	{Name: "postrouting", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.PostroutingHook), Priority: knftables.PtrTo(knftables.SNATPriority)},
}

// ruleset returns the nftables table of the network.
func (f firewall) ruleset() ruleset {
	return ruleset{family: knftables.InetFamily, networkID: f.networkID, cidr: f.subnets[0].Prefix.String(), chains: chains, rules: f.rules()}
}
