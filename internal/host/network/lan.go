package network

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
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
	networks, err := b.list()
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
	return nil
}

// lanStation is a machine of this box in a LAN.
type lanStation struct {
	cable   string
	mac     net.HardwareAddr
	address netip.Addr
}

// stations returns the machines of the box in a network.
func (b Box) stations(networkID string) (all []lanStation, err error) {
	paths, err := filepath.Glob(filepath.Join(b.dir(networkID), "leases", "*"))
	for _, path := range paths {
		address, invalid := netip.ParseAddr(filepath.Base(path))
		var l Lease
		if invalid == nil && atomicfile.ReadJSON(path, &l) == nil && !l.Bridge {
			all = append(all, lanStation{cable: VethName(l.Machine), mac: MAC(networkID, address.String()), address: address})
		}
	}
	return all, err
}

// lanFilter returns the rules for what the machines of a network send into their LAN. The packets pass no rules for IP,
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
	// The bridge itself receives some frames to 01:80:c2:00:00:00/44 in the hook input only.
	for _, hook := range []knftables.BaseChainHook{knftables.PreroutingHook, knftables.InputHook} {
		r.chains = append(r.chains, knftables.Chain{
			Name: string(hook), Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(hook), Priority: knftables.PtrTo(knftables.FilterPriority),
		})
		if len(jumps) > 0 {
			r.rules[string(hook)] = []string{"iifname vmap { " + strings.Join(jumps, ", ") + " }"}
		}
	}
	return r, nil
}

// rules returns what a machine may send: ARP and IPv4 with its own addresses, and packets between pods of the cluster to other
// machines. The MAC addresses of machines begin with 02:ca. Everything else is dropped, for example IPv6, VLAN tags and offers of a
// DHCP server.
func (s lanStation) rules(pods []netip.Prefix) []string {
	rules := []string{
		fmt.Sprintf("ether saddr != %s drop", s.mac),
		"ether type { 8021q, 8021ad } drop",
		fmt.Sprintf("arp saddr ether %s arp saddr ip %s accept", s.mac, s.address),
		"udp sport 67 drop",
		fmt.Sprintf("ip saddr %s accept", s.address),
	}
	if len(pods) > 0 {
		rules = append(rules, fmt.Sprintf("ether daddr & ff:ff:00:00:00:00 == 02:ca:00:00:00:00 ip saddr { %s } ip daddr { %[1]s } accept", join(pods)))
	}
	return append(rules, "drop")
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
