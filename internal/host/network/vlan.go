package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/thread"
)

// The machines of a cluster can be in a VLAN of a LAN. The bridge of the box filters VLANs, and the port of each machine belongs to this
// VLAN only, without a tag. The bridge, and the ports of network cards, belong to the administrator.

// MaxVLAN is the largest VLAN identifier.
const MaxVLAN = 4094

// checkVLAN returns an error unless a bridge separates VLANs and carries one of them to another station than machines. Any bridge is right
// for VLAN 0.
func checkVLAN(bridge netlink.Link, vlan uint16) error {
	name := bridge.Attrs().Name
	switch {
	case vlan == 0:
		return nil
	case !filtersVLANs(bridge):
		return ConflictError{Subject: name, message: fmt.Sprintf("the bridge %s of this host does not separate VLANs: set VLANFiltering=yes for it in the host's network configuration, or offer the LAN without vlans in spec.lanNetworks of the CapstanHost", name)}
	}
	carried, err := carriesVLAN(bridge, vlan)
	if err == nil && !carried {
		return ConflictError{Subject: name, message: fmt.Sprintf("no port of the bridge %s of this host carries VLAN %d: add the VLAN to the port of the network card ([BridgeVLAN] VLAN=%[2]d), or remove it from spec.lanNetworks of the CapstanHost", name, vlan)}
	}
	return err
}

func filtersVLANs(bridge netlink.Link) bool {
	b, ok := bridge.(*netlink.Bridge)
	return ok && b.VlanFiltering != nil && *b.VlanFiltering
}

// carriesVLAN reports whether the bridge itself, or a port that is not one of capstand, belongs to a VLAN.
func carriesVLAN(bridge netlink.Link, vlan uint16) (bool, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return false, err
	}
	vlans, err := netlink.BridgeVlanList()
	for _, link := range links {
		at := link.Attrs()
		foreign := at.Index == bridge.Attrs().Index || at.MasterIndex == bridge.Attrs().Index && !ownLink.MatchString(at.Name)
		for _, v := range vlans[int32(at.Index)] {
			if foreign && v.Vid == vlan {
				return true, nil
			}
		}
	}
	return false, err
}

// attachVLAN makes a cable a port of a VLAN. The cable is down while it belongs to another one: the machine would receive its frames.
func attachVLAN(bridge netlink.Link, vlan uint16, cable netlink.Link) error {
	if cable.Attrs().MasterIndex != bridge.Attrs().Index {
		if err := errors.Join(netlink.LinkSetDown(cable), netlink.LinkSetMaster(cable, bridge)); err != nil {
			return err
		}
	}
	if _, err := joinVLAN(cable, vlan); err != nil {
		return err
	}
	return netlink.LinkSetUp(cable)
}

// joinVLAN makes a VLAN the only one of a port, and reports whether it changed the port.
func joinVLAN(port netlink.Link, vlan uint16) (changed bool, err error) {
	vlans, err := netlink.BridgeVlanList()
	if err != nil {
		return false, err
	}
	have := vlans[int32(port.Attrs().Index)]
	if len(have) == 1 && have[0].Vid == vlan && have[0].PortVID() && have[0].EngressUntag() {
		return false, nil
	}
	for _, other := range have {
		if other.Vid != vlan {
			err = errors.Join(err, netlink.BridgeVlanDel(port, other.Vid, false, false, false, true))
		}
	}
	if err = errors.Join(err, netlink.BridgeVlanAdd(port, vlan, true, true, false, true)); err != nil {
		return false, fmt.Errorf("VLAN %d of %s: %w", vlan, port.Attrs().Name, err)
	}
	return true, nil
}

// mendVLANs moves the ports of this capstand's machines back into their VLANs. It disables the ports while their bridge does not separate
// VLANs.
func (b Box) mendVLANs(log *slog.Logger) error {
	_, err := b.mendAll(func(n Network) (bool, error) {
		if n.vlan() == 0 {
			return false, nil
		}
		cut, mended, err := b.mendVLAN(n)
		if cut {
			log.Error("The bridge of a LAN does not separate VLANs any more: capstand disables the ports of the machines until it does", "cluster", n.Cluster, "id", n.ID, "bridge", n.Bridge(), "vlan", n.vlan())
		}
		if mended {
			log.Warn("Another program on this host changed the VLANs of a machine's port; capstand restored them", "cluster", n.Cluster, "id", n.ID, "bridge", n.Bridge(), "vlan", n.vlan())
		}
		return mended, err
	})
	return err
}

// mendVLAN disables the ports of a network while the bridge does not separate VLANs (cut), and otherwise repairs their VLANs (mended).
// A cable that is missing, or that was removed from the bridge, is restored with the links of its machine.
func (b Box) mendVLAN(n Network) (cut, mended bool, err error) {
	bridge, err := netlink.LinkByName(n.Bridge())
	if isNoLink(err) {
		return false, false, nil
	}
	if err != nil {
		return false, false, err
	}
	stations, err := b.stations(n.ID)
	for _, s := range stations {
		cable, linkErr := netlink.LinkByName(s.cable)
		if linkErr != nil || cable.Attrs().MasterIndex != bridge.Attrs().Index {
			continue
		}
		up := cable.Attrs().Flags&net.FlagUp != 0
		if !filtersVLANs(bridge) {
			if up {
				cut, err = true, errors.Join(err, netlink.LinkSetDown(cable))
			}
			continue
		}
		changed, joinErr := joinVLAN(cable, n.vlan())
		mended = mended || changed || !up
		if err = errors.Join(err, joinErr); joinErr == nil && !up {
			err = errors.Join(err, netlink.LinkSetUp(cable))
		}
	}
	return cut, mended, err
}

// Station describes the link that connects the box itself with the LAN.
func (l LAN) Station() string {
	if l.VLAN == 0 {
		return "the bridge " + l.Bridge
	}
	return fmt.Sprintf("the VLAN interface %s.%d (VLAN %[2]d on the bridge %[1]s)", l.Bridge, l.VLAN)
}

// HasStation reports whether a link connects the box itself with the LAN: the bridge, or the interface of its VLAN.
func (l LAN) HasStation(link netlink.Link) bool {
	if l.VLAN == 0 {
		return link.Attrs().Name == l.Bridge
	}
	vlan, ok := link.(*netlink.Vlan)
	bridge, err := netlink.LinkByName(l.Bridge)
	return ok && err == nil && vlan.VlanId == int(l.VLAN) && vlan.ParentIndex == bridge.Attrs().Index
}

// probeLAN returns the MAC address of another station that has an address, or nil. The box need not be a station of the VLAN: it probes as
// a port of its own, whose other end is in a network namespace without addresses. The port ends with the namespace, also after a crash.
func probeLAN(ctx context.Context, bridge netlink.Link, vlan uint16, address netip.Addr) (net.HardwareAddr, error) {
	if vlan == 0 {
		return probeStation(ctx, bridge, address)
	}
	ns, err := bareNetNS()
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	port := VethName(fmt.Sprint("probe of ", address, " in ", bridge.Attrs().Name, " ", vlan, " ", os.Getpid()))
	if err := addCable(bridge.Attrs().Name, port, int(ns), MAC("probe", address.String())); err != nil {
		return nil, err
	}
	var mac net.HardwareAddr
	err = attach(bridge.Attrs().Name, vlan, port)
	if err == nil {
		thread.Throwaway(func() { mac, err = probeIn(ctx, ns, address) })
	}
	return mac, errors.Join(err, deleteLink(port))
}

// bareNetNS creates a network namespace without a process and without IPv6. It lasts as long as the handle.
func bareNetNS() (ns netns.NsHandle, err error) {
	thread.Throwaway(func() {
		if ns, err = netns.New(); err != nil {
			err = fmt.Errorf("creating a network namespace: %w", err)
			return
		}
		if err = os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0); errors.Is(err, os.ErrNotExist) {
			err = nil // a kernel without IPv6
		}
	})
	return ns, err
}

// probeIn probes at the interface of a network namespace.
func probeIn(ctx context.Context, ns netns.NsHandle, address netip.Addr) (net.HardwareAddr, error) {
	if err := netns.Set(ns); err != nil {
		return nil, err
	}
	link, err := netlink.LinkByName(Interface)
	if err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return nil, err
	}
	return probeStation(ctx, link, address)
}

// probeStation probes an address at a link that can be without addresses.
func probeStation(ctx context.Context, link netlink.Link, address netip.Addr) (net.HardwareAddr, error) {
	if address.Is4() {
		return probe(ctx, link, address)
	}
	ask, err := duplicateSearch(link.Attrs().HardwareAddr, address)
	if err != nil {
		return nil, err
	}
	fd, to, err := packets(link, typeIPv6)
	if err != nil {
		return nil, err
	}
	return probeWith(ctx, fd, to, ask, func(frame []byte) net.HardwareAddr { return advertisedIn(frame, address) })
}
