package network

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/overhead"
)

// FitsLink returns an error if the interface with the tunnel address cannot carry the packets of an overlay.
func FitsLink(o Overlay, encrypted bool) error {
	index, err := linkWith(o.Address)
	if err != nil || index == 0 {
		return err
	}
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	return o.fits(link.Attrs().Name, link.Attrs().MTU, overhead.Of(o.Address, encrypted))
}

// LinkMTUs returns the MTUs of the box's own interfaces that carry less than usual packets, by each of their addresses. An interface
// that ends meanwhile is left out.
func LinkMTUs() (map[string]int32, error) {
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, err
	}
	mtus := map[string]int32{}
	for _, a := range addresses {
		address, ok := netip.AddrFromSlice(a.IP)
		if !ok || address.IsLinkLocalUnicast() {
			continue
		}
		link, err := netlink.LinkByIndex(a.LinkIndex)
		if err != nil || ownLink.MatchString(link.Attrs().Name) || link.Attrs().MTU >= overhead.EthernetMTU {
			continue
		}
		mtus[address.Unmap().String()] = int32(link.Attrs().MTU)
	}
	return mtus, nil
}

// fits compares the overlay with an interface. Packets of up to 1500 bytes are not refused: clusters with the default MTU work on
// smaller interfaces, where the kernel fragments.
func (o Overlay) fits(name string, mtu, extra int) error {
	if need := o.MTU + extra; need > overhead.EthernetMTU && need > mtu {
		return fmt.Errorf("machines with the MTU %d need packets of %d bytes between the hosts, and interface %s with the tunnel address %s carries %d: raise its MTU, or create the cluster with a spec.network.mtu of %d at most",
			o.MTU, need, name, o.Address, mtu, mtu-extra)
	}
	return nil
}
