package network

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"sigs.k8s.io/knftables"

	"capstan.dev/capstan/internal/atomicfile"
)

// LAN is a network of the user to which the machines of a cluster are attached. The box is no gateway there: it does not
// route, and it translates no addresses.
type LAN struct {
	// Bridge of the box to the LAN. capstand does not create, change or remove it.
	Bridge string `json:"bridge"`
	// VLAN of the bridge, which must filter VLANs. 0: the machines have the VLAN of a port without configuration.
	VLAN uint16 `json:"vlan,omitempty"`
	// Pods are the pod networks of the cluster.
	Pods []netip.Prefix `json:"pods,omitempty"`
}

var (
	bridgeForm = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,15}$`)
	// ownLink matches the names of links that capstand creates.
	ownLink = regexp.MustCompile(`^(cap|cpm|cpx)[0-9a-f]{10}$|^capwg$`)
)

// CheckLANBridge returns an error for a name that no bridge to a LAN can have.
func CheckLANBridge(name string) error {
	switch {
	case !bridgeForm.MatchString(name) || name == "." || name == "..":
		return fmt.Errorf("%q is not the name of a bridge: expected at most 15 letters, digits and the characters ._-", name)
	case ownLink.MatchString(name):
		return fmt.Errorf("%s is the name of a link of capstand: expected a bridge of the host's own configuration", name)
	}
	return nil
}

// lanLink returns the bridge of the box to a LAN.
func lanLink(lan LAN) (netlink.Link, error) {
	name := lan.Bridge
	link, err := netlink.LinkByName(name)
	if isNoLink(err) {
		return nil, ConflictError{Subject: name, message: fmt.Sprintf("this host has no bridge %s: create it in the host's network configuration, or correct spec.lanNetworks of the CapstanHost", name)}
	}
	if err != nil {
		return nil, fmt.Errorf("bridge %s: %w", name, err)
	}
	if link.Type() != "bridge" {
		return nil, ConflictError{Subject: name, message: fmt.Sprintf("the interface %s of this host is no bridge (its type is %s): create a bridge with this interface as its port, and name the bridge in spec.lanNetworks of the CapstanHost", name, link.Type())}
	}
	return link, checkVLAN(link, lan.VLAN)
}

// Bridge returns the name of the bridge to which the machines of a network are attached.
func (n Network) Bridge() string {
	if n.LAN != nil {
		return n.LAN.Bridge
	}
	return BridgeName(n.ID)
}

// vlan returns the VLAN of the bridge to which the machines of a network are attached, or 0.
func (n Network) vlan() uint16 {
	if n.LAN != nil {
		return n.LAN.VLAN
	}
	return 0
}

// port describes where the machines of a network are attached.
func (n Network) port() string {
	if vlan := n.vlan(); vlan != 0 {
		return fmt.Sprintf("VLAN %d of bridge %s", vlan, n.Bridge())
	}
	return "bridge " + n.Bridge()
}

// admitLAN returns an error if the box cannot attach machines to the LAN of a network. other is the record of the network, if
// it exists.
func admitLAN(n, other Network) error {
	if (n.LAN == nil) != (other.LAN == nil) || n.Bridge() != other.Bridge() || n.vlan() != other.vlan() {
		return ConflictError{Subject: n.CIDR, message: fmt.Sprintf("network %s of cluster %s is on %s on this box and cannot move to %s; delete the machines of the cluster on this host first",
			n.ID, n.Cluster, other.port(), n.port())}
	}
	return nil
}

// Probed returns the addresses that no other station of a LAN may have before a machine gets its own: these, and its link-local address if
// it has IPv6. That one follows from the MAC address, which a tenant could choose by the id of a network.
func Probed(networkID string, addresses []Address) (all []netip.Addr) {
	for _, a := range addresses {
		all = append(all, a.Prefix.Addr())
	}
	if slices.ContainsFunc(all, netip.Addr.Is6) {
		all = append(all, linkLocal(MAC(networkID, all[0].String())))
	}
	return all
}

// ProbeLAN returns an InUseError if the box itself, or another station of the LAN, has an address.
func (b Box) ProbeLAN(ctx context.Context, lan LAN, address netip.Addr) error {
	link, err := lanLink(lan)
	if err != nil {
		return err
	}
	if has, err := HasAddress(address); err != nil {
		return err
	} else if has {
		return InUseError{Address: address.String(), message: fmt.Sprintf("address %s is an address of this host: exclude it from the pool", address)}
	}
	on := Network{LAN: &lan}.port()
	mac, err := probeLAN(ctx, link, lan.VLAN, address)
	if err != nil {
		return fmt.Errorf("probing address %s on %s: %w; the bridge must be up", address, on, err)
	}
	if mac != nil {
		return InUseError{Address: address.String(), message: fmt.Sprintf("address %s belongs to the station %s in the LAN of %s: free it, or exclude it from the pool", address, mac, on)}
	}
	return nil
}

// lentElsewhere returns an InUseError if a machine of another network of the box, on the same bridge and VLAN, has one of the addresses.
func (b Box) lentElsewhere(networkID string, addresses []string) error {
	n, ok := b.Network(networkID)
	if !ok || n.LAN == nil {
		return nil
	}
	networks, damage, err := b.survey()
	if err != nil {
		return err
	}
	for _, other := range networks {
		if other.ID == n.ID || other.LAN == nil || other.port() != n.port() {
			continue
		}
		for _, address := range addresses {
			var l Lease
			if atomicfile.ReadJSON(b.lease(other.ID, address), &l) == nil && !l.stale() {
				return InUseError{Address: address, message: fmt.Sprintf("address %s belongs to a machine of another cluster on %s of this host: exclude it from the pool", address, n.port())}
			}
		}
	}
	if slices.ContainsFunc(addresses, func(address string) bool { return !atomicfile.Exists(b.lease(networkID, address)) }) {
		return damage // The leases in a damaged folder are unknown.
	}
	return nil // The network had the addresses before.
}

// lanStation is a machine of this box in a LAN.
type lanStation struct {
	cable string
	mac   net.HardwareAddr
	// addresses of the machine, IPv4 first: the MAC address follows from the first one, as that of the cable does.
	addresses []netip.Addr
}

// stations returns the machines of the box in a network, ordered by their cables.
func (b Box) stations(networkID string) ([]lanStation, error) {
	paths, err := filepath.Glob(filepath.Join(b.dir(networkID), "leases", "*"))
	byCable := map[string][]netip.Addr{}
	for _, path := range paths {
		address, invalid := netip.ParseAddr(filepath.Base(path))
		var l Lease
		if invalid == nil && atomicfile.ReadJSON(path, &l) == nil && !l.Bridge {
			byCable[VethName(l.Machine)] = append(byCable[VethName(l.Machine)], address)
		}
	}
	var all []lanStation
	for _, cable := range slices.Sorted(maps.Keys(byCable)) {
		addresses := byCable[cable]
		slices.SortFunc(addresses, netip.Addr.Compare) // IPv4 before IPv6
		all = append(all, lanStation{cable: cable, mac: MAC(networkID, addresses[0].String()), addresses: addresses})
	}
	return all, err
}

// lanFilter returns the rules for the frames that the machines of a network send into their LAN. They pass no rules for IP,
// because the box does not route them.
func (b Box) lanFilter(n Network) (ruleset, error) {
	stations, err := b.stations(n.ID)
	if err != nil {
		return ruleset{}, err
	}
	r := ruleset{family: knftables.BridgeFamily, networkID: n.ID, cidr: n.CIDR, rules: map[string][]string{}}
	var jumps []string
	for _, s := range stations {
		r.chains = append(r.chains, knftables.Chain{Name: s.cable})
		r.rules[s.cable] = s.rules(n.LAN.Pods)
		jumps = append(jumps, s.cable+" : jump "+s.cable)
	}
	for _, at := range []struct {
		hook   knftables.BaseChainHook
		frames string
	}{{knftables.PreroutingHook, ""}, {knftables.InputHook, toBridges}} {
		name := string(at.hook)
		r.chains = append(r.chains, knftables.Chain{
			Name: name, Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(at.hook), Priority: knftables.PtrTo(knftables.FilterPriority),
		})
		if len(jumps) > 0 {
			r.rules[name] = []string{at.frames + "iifname vmap { " + strings.Join(jumps, ", ") + " }"}
		}
	}
	return r, nil
}

// toBridges matches frames that a bridge receives itself. They pass the hook input only. All other frames to the box have passed the hook
// prerouting before, and have a tag in the hook input if the bridge has put them into a VLAN.
const toBridges = "ether daddr & ff:ff:ff:ff:ff:f0 == 01:80:c2:00:00:00 "

// toMachine matches frames to machines of Capstan, by the first bytes of MAC.
const toMachine = "ether daddr & ff:ff:00:00:00:00 == 02:ca:00:00:00:00"

// rules returns the rules that accept frames of a machine: ARP, neighbour discovery and IP with its own addresses, and packets
// between pods of the cluster to other machines. Everything else is dropped, for example VLAN tags and the packets of a router or a
// DHCP server.
func (s lanStation) rules(pods []netip.Prefix) []string {
	rules := []string{
		fmt.Sprintf("ether saddr != %s drop", s.mac),
		"ether type { 8021q, 8021ad } drop",
		"udp sport 67 drop",
		headersInFragments,
	}
	for _, address := range s.addresses {
		if address.Is4() {
			rules = append(rules, fmt.Sprintf("arp saddr ether %s arp saddr ip %s accept", s.mac, address), fmt.Sprintf("ip saddr %s accept", address))
		} else {
			rules = append(rules, s.ipv6Rules(address)...)
		}
	}
	four, six := byFamily(pods)
	if len(four) > 0 {
		rules = append(rules, fmt.Sprintf("%s ip saddr { %s } ip daddr { %[2]s } accept", toMachine, join(four)))
	}
	if len(six) > 0 {
		between := fmt.Sprintf("%s ip6 saddr { %s } ip6 daddr { %[2]s } ", toMachine, join(six))
		rules = append(rules, between+"meta l4proto != 58 accept", between+messages, between+laterFragments)
	}
	return append(rules, "drop")
}

// Protocols have numbers, UDP 17 and ICMPv6 58, because nft reads names from a file that a host can lack.
const (
	// messages accepts errors, among them "packet too big", and echoes. Neighbour discovery, advertisements of routers, redirects and
	// queries for multicast listeners are not among them.
	messages = "icmpv6 type { 1, 2, 3, 4, 128, 129 } accept"
	// headersInFragments drops fragments whose part of the packet begins with an extension header. The header of UDP or ICMPv6 can be missing
	// in the first one then, and nft would read padding of the frame instead.
	headersInFragments = "frag nexthdr { 0, 43, 44, 51, 60, 135, 139, 140 } drop"
	// laterFragments accepts the fragments without a header of UDP or ICMPv6. They have no effect if the first fragment is dropped.
	laterFragments = "meta l4proto { 17, 58 } frag frag-off != 0 accept"
)

// ipv6Rules returns the rules that accept packets with an IPv6 address of a machine, or with its link-local one. Messages of
// neighbour discovery have no other option than the machine's own MAC address, or the nonce of a search for duplicates, and no
// extension headers. They say nothing about other addresses.
func (s lanStation) ipv6Rules(address netip.Addr) []string {
	local := linkLocal(s.mac)
	own := fmt.Sprintf("ip6 saddr { %s, %s } ", address, local)
	target := fmt.Sprintf("@th,64,128 { 0x%x, 0x%x } ", address.As16(), local.As16())
	mac := func(option int) string {
		return fmt.Sprintf("ip6 length 32 @th,192,64 0x%02x01%x accept", option, []byte(s.mac))
	}
	const (
		none, nonce = "ip6 length 24 accept", "ip6 length 32 @th,192,16 0x0e01 accept"
		ask         = "ip6 nexthdr 58 icmpv6 type nd-neighbor-solicit "
		answer      = "ip6 nexthdr 58 icmpv6 type nd-neighbor-advert "
	)
	return []string{
		"ip6 saddr :: " + ask + target + none, "ip6 saddr :: " + ask + target + nonce,
		own + ask + none, own + ask + mac(ndpSource),
		own + answer + target + none, own + answer + target + mac(ndpTarget),
		// Switches that filter multicast send solicitations to listeners only.
		fmt.Sprintf("ip6 saddr { ::, %s } ip6 daddr ff02::/16 icmpv6 type { 131, 132, 143 } accept", local),
		own + messages,
		// Not the packets of a DHCP server. Two rules, because nft joins unequal comparisons of adjacent fields.
		"udp dport 546 drop", own + "udp sport != 547 accept",
		own + "meta l4proto != { 17, 58 } accept",
		own + laterFragments,
	}
}

// linkLocal returns the IPv6 address that the kernel gives an interface with a MAC address (RFC 4291).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

func byFamily(networks []netip.Prefix) (four, six []netip.Prefix) {
	for _, n := range networks {
		if n.Addr().Is4() {
			four = append(four, n)
		} else {
			six = append(six, n)
		}
	}
	return four, six
}

// guardPort disables the port of a machine when it sends frames of the spanning tree, which pass no rules. A machine could
// otherwise become the root of the LAN.
func guardPort(cable string) error {
	link, err := netlink.LinkByName(cable)
	if err == nil {
		err = netlink.LinkSetGuard(link, true)
	}
	if err != nil {
		return fmt.Errorf("guarding the port of cable %s: %w", cable, err)
	}
	return nil
}

// syncStations writes the rules of a network in a LAN after a change of its machines.
func (b Box) syncStations(networkID string) error {
	n, ok := b.Network(networkID)
	if !ok || n.LAN == nil {
		return nil
	}
	return b.rewriteFirewall(context.Background(), n)
}

// deleteFirewalls removes the rules of a network.
func (b Box) deleteFirewalls(ctx context.Context, networkID string) error {
	if n, ok := b.Network(networkID); !ok || n.LAN == nil { // A kernel need not have rules for bridges.
		return deleteTable(ctx, knftables.InetFamily, networkID)
	}
	return deleteTable(ctx, knftables.BridgeFamily, networkID)
}
