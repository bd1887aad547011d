package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// tunnelPort is the UDP port of VXLAN.
const tunnelPort = 4789

// ntfSticky keeps an entry when a machine of this box sends from the MAC address of a machine on another box (NTF_STICKY).
const ntfSticky = 0x40

// tunnel is the VXLAN device of a network, as a port of the network's bridge.
type tunnel struct{ device, bridge int }

// HasAddress returns whether an interface of the box has the address.
func HasAddress(address netip.Addr) (bool, error) {
	index, err := linkWith(address)
	return index != 0, err
}

// linkWith returns the index of the interface with the address, or 0.
func linkWith(address netip.Addr) (int, error) {
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	for _, a := range all {
		if found, ok := netip.AddrFromSlice(a.IP); ok && found.Unmap() == address {
			return a.LinkIndex, nil
		}
	}
	return 0, err
}

// ensureTunnel creates or repairs the VXLAN device. It comes up last, when its port of the bridge floods nothing, so that
// the gateway and unknown addresses stay invisible on other boxes.
func ensureTunnel(n Network, subnet Subnet) error {
	bridge, err := netlink.LinkByName(BridgeName(n.ID))
	if err != nil {
		return fmt.Errorf("bridge %s: %w", BridgeName(n.ID), err)
	}
	device, err := vxlan(n)
	if err != nil {
		return err
	}
	if device.MasterIndex != bridge.Attrs().Index {
		if err := netlink.LinkSetMaster(device, bridge); err != nil {
			return fmt.Errorf("adding %s to bridge %s: %w", device.Name, bridge.Attrs().Name, err)
		}
	}
	if err := silencePort(device.Index); err != nil {
		return fmt.Errorf("setting the bridge port %s: %w", device.Name, err)
	}
	if err := setHostAddress(bridge, n, subnet); err != nil {
		return err
	}
	// The device is only a port: it needs no address of its own, with which the kernel would send router solicitations.
	if err := set(filepath.Join(procIPv6, "conf", device.Name, "disable_ipv6"), "1"); err != nil {
		return err
	}
	return netlink.LinkSetUp(device)
}

// vxlan returns the VXLAN device of a network. It replaces a device with other properties, which another program created.
func vxlan(n Network) (*netlink.Vxlan, error) {
	name := TunnelName(n.ID)
	link, err := netlink.LinkByName(name)
	if device, ok := link.(*netlink.Vxlan); err == nil && ok && matches(device, *n.Overlay) {
		return device, nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !isNoLink(err) {
		return nil, fmt.Errorf("device %s: %w", name, err)
	}
	attrs := netlink.NewLinkAttrs()
	// The MAC address is set at creation, because udev and NetworkManager change a random one.
	attrs.Name, attrs.MTU, attrs.HardwareAddr = name, n.Overlay.MTU, MAC(n.ID, n.Overlay.Address.String())
	device := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(n.Overlay.VNI), SrcAddr: n.Overlay.end().AsSlice(), Port: tunnelPort, Learning: false,
	}
	if err := netlink.LinkAdd(device); errors.Is(err, unix.EEXIST) {
		return nil, vniConflict(n.Overlay.VNI, "a VXLAN device of another program")
	} else if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("creating the VXLAN device %s: this kernel has no VXLAN: install its module vxlan", name)
	} else if err != nil {
		return nil, fmt.Errorf("creating the VXLAN device %s: %w", name, err)
	}
	link, err = netlink.LinkByName(name)
	if device, ok := link.(*netlink.Vxlan); err == nil && ok {
		return device, nil
	}
	return nil, fmt.Errorf("device %s: %w", name, err)
}

func matches(device *netlink.Vxlan, o Overlay) bool {
	local, _ := netip.AddrFromSlice(device.SrcAddr)
	return device.VxlanId == int(o.VNI) && local.Unmap() == o.end() && device.Port == tunnelPort && !device.Learning && device.MTU == o.MTU
}

// silencePort makes the bridge forward only frames for known destinations to a port, learn nothing from it, and answer
// requests for the addresses behind it. The kernel still sends multicast of the box itself to the port; the VXLAN device
// drops it, because it has no entry for it.
func silencePort(index int) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_BRIDGE)
	msg.Index = int32(index)
	req.AddData(msg)
	port := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	for attr, on := range map[int]byte{
		nl.IFLA_BRPORT_LEARNING: 0, nl.IFLA_BRPORT_UNICAST_FLOOD: 0, nl.IFLA_BRPORT_MCAST_FLOOD: 0, nl.IFLA_BRPORT_BCAST_FLOOD: 0,
		nl.IFLA_BRPORT_NEIGH_SUPPRESS: 1,
	} {
		port.AddRtAttr(attr, []byte{on})
	}
	req.AddData(port)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// setHostAddress makes the box connect to the machines of the network from its hostAddress.
func setHostAddress(bridge netlink.Link, n Network, subnet Subnet) error {
	own := n.hostAddress(n.Overlay.Address)
	// Without a route of the kernel to the address, which entries would report as a route to another box.
	address := &netlink.Addr{IPNet: ipNet(own, own.BitLen()), Flags: unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE}
	if err := netlink.AddrReplace(bridge, address); err != nil {
		return fmt.Errorf("adding address %s to bridge %s: %w", own, bridge.Attrs().Name, err)
	}
	route := &netlink.Route{
		LinkIndex: bridge.Attrs().Index, Dst: ipNet(subnet.Prefix.Addr(), subnet.Prefix.Bits()), Src: own.AsSlice(), Scope: netlink.SCOPE_LINK,
	}
	if own.Is6() {
		// IPv4 replaces the kernel's route to the network. In IPv6 it stays, with a metric of 256.
		route.Priority = 128
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route to %s from %s: %w", subnet.Prefix, own, err)
	}
	return nil
}

func findTunnel(networkID string) (tunnel, error) {
	device, err := netlink.LinkByName(TunnelName(networkID))
	if err != nil {
		return tunnel{}, err
	}
	bridge, err := netlink.LinkByName(BridgeName(networkID))
	if err != nil {
		return tunnel{}, err
	}
	return tunnel{device: device.Attrs().Index, bridge: bridge.Attrs().Index}, nil
}

// entries reads the entries for other boxes from the kernel.
func (t tunnel) entries() (entries, error) {
	have := entries{}
	forwarding, err := netlink.NeighList(t.device, unix.AF_BRIDGE)
	if err != nil {
		return nil, fmt.Errorf("reading the forwarding table: %w", err)
	}
	for _, f := range forwarding {
		mac := f.HardwareAddr.String()
		switch {
		case f.Flags&netlink.NTF_SELF != 0:
			have[entry{tunnelTable, mac}] = text(f.IP)
		case f.State&netlink.NUD_PERMANENT == 0: // Permanent is the device's own address.
			have[entry{portTable, mac}] = ""
		}
	}
	neighbours, err := netlink.NeighList(t.bridge, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("reading the neighbours: %w", err)
	}
	for _, n := range neighbours {
		if n.State&netlink.NUD_PERMANENT != 0 {
			have[entry{neighbourTable, text(n.IP)}] = n.HardwareAddr.String()
		}
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{LinkIndex: t.bridge}, netlink.RT_FILTER_OIF)
	if err != nil {
		return nil, fmt.Errorf("reading the routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(r.Dst.IP); ok && isHostAddress(addr.Unmap()) {
			have[entry{routeTable, addr.Unmap().String()}] = ""
		}
	}
	return have, nil
}

func text(ip net.IP) string {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap().String()
}

// apply writes and removes entries.
func (t tunnel) apply(write, remove entries) error {
	for _, e := range write.inOrder() {
		if err := t.write(e, write[e]); err != nil {
			return fmt.Errorf("entry for %s: %w", e.subject, err)
		}
	}
	for _, e := range remove.inOrder() {
		if err := t.remove(e, remove[e]); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("removing the entry for %s: %w", e.subject, err)
		}
	}
	return nil
}

func (t tunnel) write(e entry, value string) error {
	if e.table == routeTable {
		return netlink.RouteReplace(t.route(e))
	}
	neigh, err := t.neigh(e, value)
	if err != nil {
		return err
	}
	return netlink.NeighSet(neigh)
}

func (t tunnel) remove(e entry, value string) error {
	if e.table == routeTable {
		return netlink.RouteDel(t.route(e))
	}
	neigh, err := t.neigh(e, value)
	if err != nil {
		return err
	}
	return netlink.NeighDel(neigh)
}

func (t tunnel) route(e entry) *netlink.Route {
	to := netip.MustParseAddr(e.subject)
	return &netlink.Route{LinkIndex: t.bridge, Dst: ipNet(to, to.BitLen()), Scope: netlink.SCOPE_LINK}
}

func (t tunnel) neigh(e entry, value string) (*netlink.Neigh, error) {
	n := &netlink.Neigh{LinkIndex: t.device, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT}
	mac := e.subject
	switch e.table {
	case tunnelTable:
		n.Flags, n.IP = netlink.NTF_SELF, net.ParseIP(value)
	case portTable:
		n.Flags, n.State = netlink.NTF_MASTER|ntfSticky, netlink.NUD_NOARP
	default:
		n.LinkIndex, n.Family, n.IP, mac = t.bridge, 0, net.ParseIP(e.subject), value
	}
	var err error
	n.HardwareAddr, err = net.ParseMAC(mac)
	return n, err
}
