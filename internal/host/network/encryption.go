package network

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/overhead"
)

// encrypt returns the network as this box has it: with its key if it encrypts overlays.
func (b Box) encrypt(n Network) Network {
	if n.Overlay != nil && b.Link != nil {
		overlay := *n.Overlay
		overlay.Key, n.Overlay = b.Link.Public.String(), &overlay
	}
	return n
}

func (o *Overlay) encrypted() bool { return o != nil && o.Key != "" }

// end is the address from which this box sends VXLAN packets.
func (o Overlay) end() netip.Addr { return end(o.Address, o.Key) }

// end is the address from which the box with a tunnel address sends VXLAN packets.
func (p Peers) end(host netip.Addr) netip.Addr { return end(host, p.Keys[host]) }

// end returns an address in the link if there is a valid key.
func end(host netip.Addr, key string) netip.Addr {
	if public, err := wireguard.ParsePublic(key); err == nil {
		return wireguard.Address(public)
	}
	return host
}

// ends are the addresses from which all other boxes send VXLAN packets.
func (p Peers) ends() (all []netip.Addr) {
	for _, host := range p.hosts() {
		all = append(all, p.end(host))
	}
	return all
}

// syncLink gives the link the boxes of all encrypted networks as its peers, and removes it without such a network. While a folder is
// damaged, its network may need the link and any of its peers: they stay. A network with another key belongs to another capstand of this
// box, and so does the link then.
func (b Box) syncLink() error {
	if b.Link == nil {
		return nil
	}
	networks, damage, err := b.survey()
	if err != nil {
		return err
	}
	var peers []wireguard.Peer
	mtu, foreign := 0, false
	for _, n := range networks {
		if !n.Overlay.encrypted() {
			continue
		}
		if n.Overlay.Key != b.Link.Public.String() {
			foreign = true
			continue
		}
		mtu = max(mtu, n.Overlay.MTU+overhead.VXLANIPv6)
		found, err := b.peers(n.ID)
		if err != nil {
			return err
		}
		peers = append(peers, found.ofLink()...)
	}
	switch {
	case mtu > 0:
		return b.Link.Ensure(mtu, unique(peers), damage != nil)
	case damage != nil || foreign:
		return nil
	}
	return b.Link.Remove()
}

// ofLink returns the boxes with a key.
func (p Peers) ofLink() (all []wireguard.Peer) {
	for _, host := range p.hosts() {
		if key, err := wireguard.ParsePublic(p.Keys[host]); err == nil {
			all = append(all, wireguard.Peer{Key: key, Host: host})
		}
	}
	return all
}

// unique removes peers with a key that an earlier peer has.
func unique(peers []wireguard.Peer) []wireguard.Peer {
	seen := map[wgtypes.Key]bool{}
	return slices.DeleteFunc(peers, func(p wireguard.Peer) bool {
		again := seen[p.Key]
		seen[p.Key] = true
		return again
	})
}

// hasLink returns whether the link of an encrypted network works.
func (b Box) hasLink(n Network) (bool, error) {
	if b.Link == nil || !n.Overlay.encrypted() {
		return true, nil
	}
	return b.Link.Whole()
}

// throughLink matches the packets that the link has authenticated.
func (f firewall) throughLink() string {
	if !f.overlay.encrypted() {
		return ""
	}
	return "iifname " + wireguard.Device + " "
}

// keepInLink drops VXLAN packets of an encrypted network that would leave the box beside the link, for example while another
// program has removed the link.
func (f firewall) keepInLink() []string {
	if !f.overlay.encrypted() {
		return nil
	}
	return []string{fmt.Sprintf("oifname != %s udp dport %d @th,96,24 %d drop", wireguard.Device, tunnelPort, f.overlay.VNI)}
}

// protectLink accepts nothing but VXLAN from other boxes through the link.
func (f firewall) protectLink() []string {
	if !f.overlay.encrypted() {
		return nil
	}
	return []string{
		fmt.Sprintf("iifname %s meta l4proto != udp drop", wireguard.Device),
		fmt.Sprintf("iifname %s udp dport != %d drop", wireguard.Device, tunnelPort),
	}
}

// closeLink forwards nothing into the link or from it.
func (f firewall) closeLink() []string {
	if !f.overlay.encrypted() {
		return nil
	}
	return []string{fmt.Sprintf("iifname %s drop", wireguard.Device), fmt.Sprintf("oifname %s drop", wireguard.Device)}
}
