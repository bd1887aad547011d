package network

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/cidr"
)

// Overlay connects the network with the cluster's networks on other boxes.
type Overlay struct {
	VNI uint32 `json:"vni"`
	// Address is this box's tunnel address.
	Address netip.Addr `json:"address"`
	// MTU of the bridge and the machines' interfaces, in bytes.
	MTU int `json:"mtu"`
	// Key is the public WireGuard key of this box if the overlay is encrypted. Ensure sets it.
	Key string `json:"key,omitempty"`
}

// Peers are the other boxes that have a network, and the machines there.
type Peers struct {
	Machines []Peer       `json:"machines,omitempty"`
	Hosts    []netip.Addr `json:"hosts,omitempty"`
	// Keys are the public WireGuard keys of all boxes of an encrypted overlay, by tunnel address.
	Keys map[netip.Addr]string `json:"keys,omitempty"`
}

// Peer is a machine on another box.
type Peer struct {
	// Addresses of the machine. The first one determines its MAC address.
	Addresses []netip.Addr `json:"addresses"`
	// Host is the tunnel address of its box.
	Host netip.Addr `json:"host"`
}

// TunnelName returns the name of a network's VXLAN device.
func TunnelName(networkID string) string { return "cpx" + hash(networkID) }

// hosts returns the tunnel addresses of all other boxes, sorted.
func (p Peers) hosts() []netip.Addr {
	all := slices.Clone(p.Hosts)
	for _, m := range p.Machines {
		all = append(all, m.Host)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// hostAddress returns the address from which a box connects to the machines of a network. All boxes have the same gateway
// address, so the machines could not send answers to it back to another box. The address has the family of the machines'
// first address. The reserved ranges in hostAddresses belong to no other network. 27 bits are enough for the hash of a tunnel
// address to be unique among the boxes of a network.
func (n Network) hostAddress(tunnel netip.Addr) netip.Addr {
	sum := sha256.Sum256([]byte(n.ID + " host " + tunnel.String()))
	if prefix, err := netip.ParsePrefix(n.CIDR); err == nil && prefix.Addr().Is6() {
		return netip.AddrFrom16([16]byte(append([]byte{0x40, 0}, sum[:14]...)))
	}
	return netip.AddrFrom4([4]byte{0xf0 | sum[0]&0x07, sum[1], sum[2], sum[3]})
}

// hostAddresses contain every hostAddress.
var hostAddresses = []netip.Prefix{netip.MustParsePrefix("240.0.0.0/5"), cidr.Hosts}

func isHostAddress(a netip.Addr) bool {
	return slices.ContainsFunc(hostAddresses, func(p netip.Prefix) bool { return p.Contains(a) })
}

// table is a table of the kernel.
type table int

const (
	// tunnelTable contains the tunnel address of the box where a MAC address is.
	tunnelTable table = iota
	// portTable contains the MAC addresses behind the bridge's port to the tunnel.
	portTable
	// neighbourTable contains the MAC address of an IP address. The bridge answers ARP and neighbour solicitations with it.
	neighbourTable
	// routeTable contains the hostAddresses of other boxes.
	routeTable
)

// entry identifies an entry by its MAC or IP address.
type entry struct {
	table   table
	subject string
}

// entries are the values of entries: a tunnel address, a MAC address, or nothing.
type entries map[entry]string

// wantedEntries returns the entries by which the bridge reaches peers. Addresses of machines and load balancers on this box
// are local: the list of peers can be older than they are.
func (n Network) wantedEntries(peers Peers, local []string) entries {
	want := entries{}
	add := func(mac string, host netip.Addr, addresses ...netip.Addr) {
		want[entry{tunnelTable, mac}], want[entry{portTable, mac}] = peers.end(host).String(), ""
		for _, a := range addresses {
			want[entry{neighbourTable, a.String()}] = mac
		}
	}
	for _, m := range peers.Machines {
		if len(m.Addresses) == 0 || slices.ContainsFunc(m.Addresses, func(a netip.Addr) bool { return slices.Contains(local, a.String()) }) {
			continue
		}
		add(MAC(n.ID, m.Addresses[0].String()).String(), m.Host, m.Addresses...)
	}
	for _, host := range peers.hosts() {
		address := n.hostAddress(host)
		add(MAC(n.ID, host.String()).String(), host, address)
		want[entry{routeTable, address.String()}] = ""
	}
	return want
}

// difference returns the entries to write and the entries to remove, so that the kernel has the wanted ones.
func difference(want, have entries) (write, remove entries) {
	write, remove = entries{}, entries{}
	for e, value := range want {
		if found, ok := have[e]; !ok || found != value {
			write[e] = value
		}
	}
	for e, value := range have {
		if _, ok := want[e]; !ok {
			remove[e] = value
		}
	}
	return write, remove
}

// inOrder returns the entries in the order in which the kernel accepts them.
func (e entries) inOrder() []entry {
	return slices.SortedFunc(maps.Keys(e), func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.table, b.table), cmp.Compare(a.subject, b.subject))
	})
}

// SetPeers records the peers of a network and writes their entries.
func (b Box) SetPeers(ctx context.Context, networkID string, peers Peers) error {
	return b.locked(func() error {
		before, damaged := b.peers(networkID)
		restore := former(b.peersFile(networkID))
		if err := atomicfile.WriteJSON(b.peersFile(networkID), peers, 0o644); err != nil {
			return err
		}
		if n, ok := b.Network(networkID); ok && (damaged != nil || !slices.Equal(before.ends(), peers.ends())) {
			if err := b.rewriteFirewall(ctx, n); err != nil {
				return errors.Join(err, restore())
			}
		}
		return b.syncPeers(networkID)
	})
}

// HasPeers returns whether the box has a readable record of the network's peers. The record lasts until the box reboots.
func (b Box) HasPeers(networkID string) bool {
	_, err := b.peers(networkID)
	return err == nil && atomicfile.Exists(b.peersFile(networkID))
}

// Neighbours returns the address of this box in a network with an overlay, and the tunnel addresses of the other boxes by their
// addresses there.
func (b Box) Neighbours(n Network) (own netip.Addr, others map[netip.Addr]netip.Addr, err error) {
	peers, err := b.peers(n.ID)
	own, others = n.Neighbours(peers)
	return own, others, err
}

// Neighbours returns the address of this box in a network with an overlay, and those of the other boxes; see Box.Neighbours.
func (n Network) Neighbours(peers Peers) (own netip.Addr, others map[netip.Addr]netip.Addr) {
	others = map[netip.Addr]netip.Addr{}
	for _, host := range peers.hosts() {
		others[n.hostAddress(host)] = host
	}
	return n.hostAddress(n.Overlay.Address), others
}

func (b Box) peersFile(networkID string) string { return filepath.Join(b.dir(networkID), "peers.json") }

// peers returns the recorded peers of a network. A damaged record is an error, which leaves the entries as they are.
func (b Box) peers(networkID string) (p Peers, err error) {
	if err := atomicfile.ReadJSON(b.peersFile(networkID), &p); !errors.Is(err, fs.ErrNotExist) {
		return p, err
	}
	return Peers{}, nil
}

// local lists the addresses of the network that machines and load balancers of this box have.
func (b Box) local(networkID string) (all []string, err error) {
	found, err := os.ReadDir(filepath.Join(b.dir(networkID), "leases"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, lease := range found {
		all = append(all, lease.Name())
	}
	return all, nil
}

// wanted returns the entries that a network needs now.
func (b Box) wanted(n Network) (entries, error) {
	peers, err := b.peers(n.ID)
	if err != nil {
		return nil, err
	}
	local, err := b.local(n.ID)
	return n.wantedEntries(peers, local), err
}

// syncPeers makes the kernel's entries those of the recorded peers. A network without an overlay, and one whose links do not
// exist yet, needs nothing: Ensure creates the links.
func (b Box) syncPeers(networkID string) error {
	n, ok := b.Network(networkID)
	if !ok || n.Overlay == nil {
		return nil
	}
	want, err := b.wanted(n)
	if err != nil {
		return err
	}
	t, err := findTunnel(networkID)
	if isNoLink(err) {
		return nil
	}
	if err != nil {
		return err
	}
	have, err := t.entries()
	if err != nil {
		return err
	}
	if write, remove := difference(want, have); len(write)+len(remove) > 0 {
		return errors.Join(b.syncLink(), t.apply(write, remove))
	}
	return nil
}

// hasOverlay returns whether the tunnel of a network and all entries exist.
func (b Box) hasOverlay(n Network) (bool, error) {
	link, err := netlink.LinkByName(TunnelName(n.ID))
	if isNoLink(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	t, err := findTunnel(n.ID)
	if isNoLink(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	device, ok := link.(*netlink.Vxlan)
	if whole, err := b.hasLink(n); err != nil || !whole {
		return false, err
	}
	if !ok || !matches(device, *n.Overlay) || device.MasterIndex != t.bridge || device.Flags&net.FlagUp == 0 {
		return false, nil
	}
	want, err := b.wanted(n)
	if err != nil {
		return false, err
	}
	have, err := t.entries()
	write, remove := difference(want, have)
	return len(write)+len(remove) == 0, err
}

// ensureOverlay creates or repairs the VXLAN device of a network and its entries.
func (b Box) ensureOverlay(n Network, subnets []Subnet) error {
	if n.Overlay == nil {
		return nil
	}
	if err := b.syncLink(); err != nil {
		return err
	}
	if err := ensureTunnel(n, subnets[0]); err != nil {
		return err
	}
	return b.syncPeers(n.ID)
}

// admitOverlay compares the overlay of a network with that of another network record of the box.
func admitOverlay(n, other Network) error {
	switch {
	case other.ID == n.ID && !n.sameOverlay(other):
		return ConflictError{Subject: OverlaySubject(n.CIDR, n.Overlay.tunnel(), other.Overlay.tunnel()), message: "network " + n.ID + " of cluster " + n.Cluster + " has " + other.Overlay.String() +
			" on this box and cannot get " + n.Overlay.String() + ": all capstands of a box need the same tunnel address and encryption; delete the cluster first"}
	case other.ID != n.ID && n.Overlay != nil && other.Overlay != nil && n.Overlay.VNI == other.Overlay.VNI:
		return vniConflict(n.Overlay.VNI, "another cluster")
	case other.Overlay.encrypted() && n.Overlay.encrypted() && n.Overlay.Key != other.Overlay.Key:
		return ConflictError{Subject: n.CIDR, message: "another capstand of this box encrypts the overlay of a cluster" +
			": only one capstand of a box can have --overlay-encryption; remove it from one of them"}
	}
	return nil
}

// OverlaySubject is the subject of the conflict of two overlays of the network with this CIDR: the recorded tunnel address if it differs,
// else the CIDR. The tunnel address of a network without an overlay is empty.
func OverlaySubject(cidr, tunnel, recorded string) string {
	if tunnel == "" || recorded == "" || tunnel == recorded {
		return cidr
	}
	return recorded
}

func vniConflict(vni uint32, by string) ConflictError {
	text := strconv.Itoa(int(vni))
	return ConflictError{Subject: text, message: "VNI " + text + " belongs to " + by + " on this box: choose another VNI"}
}

func (n Network) sameOverlay(other Network) bool {
	if n.Overlay == nil || other.Overlay == nil {
		return n.Overlay == other.Overlay
	}
	return *n.Overlay == *other.Overlay
}

// tunnel is the tunnel address; empty without an overlay.
func (o *Overlay) tunnel() string {
	if o == nil {
		return ""
	}
	return o.Address.String()
}

func (o *Overlay) String() string {
	if o == nil {
		return "no overlay"
	}
	text := "an overlay with VNI " + strconv.Itoa(int(o.VNI)) + ", tunnel address " + o.Address.String() + " and MTU " + strconv.Itoa(o.MTU)
	if o.encrypted() {
		text += ", encrypted with the key of " + o.Key
	}
	return text
}
