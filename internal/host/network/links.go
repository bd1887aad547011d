package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/thread"
)

// Interface is the name of the machine's end of its cable.
const Interface = "eth0"

// ensureBridge creates or repairs the bridge with the addresses of the gateways.
func ensureBridge(name string, subnets []Subnet, mac net.HardwareAddr, mtu int) error {
	link, err := netlink.LinkByName(name)
	if isNoLink(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr = name, mac
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("creating bridge %s: %w", name, err)
		}
		link, err = netlink.LinkByName(name)
	}
	if err != nil {
		return fmt.Errorf("bridge %s: %w", name, err)
	}
	if err := setBridgeMTU(link, mtu); err != nil {
		return err
	}
	if err := setBridgeIPv6(procIPv6, name, hasIPv6(subnets)); err != nil {
		return err
	}
	for _, subnet := range subnets {
		address := &netlink.Addr{IPNet: ipNet(subnet.Gateway, subnet.Prefix.Bits()), Flags: unix.IFA_F_NODAD}
		if err := netlink.AddrReplace(link, address); err != nil {
			return fmt.Errorf("adding address %[2]s to bridge %[1]s: %[3]w", name, subnet.Gateway, err)
		}
	}
	return netlink.LinkSetUp(link)
}

// setBridgeMTU sets the MTU of a bridge without ports, which the cables of machines get. Machines keep theirs. The kernel follows the ports of a
// bridge, also when the last one leaves, until a call sets another MTU than it has: the MTU at creation does not count.
func setBridgeMTU(bridge netlink.Link, mtu int) error {
	if bridge.Attrs().MTU == mtu {
		return nil
	}
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().MasterIndex == bridge.Attrs().Index }) {
		return nil
	}
	if err := netlink.LinkSetMTU(bridge, mtu); err != nil {
		return fmt.Errorf("setting the MTU of bridge %s: %w", bridge.Attrs().Name, err)
	}
	return nil
}

// isUp reports whether a link exists, is up and has the addresses.
func isUp(name string, addresses []string) (bool, error) {
	link, err := netlink.LinkByName(name)
	if isNoLink(err) {
		return false, nil
	}
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		return false, err
	}
	found, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return false, err
	}
	have := map[string]bool{}
	for _, a := range found {
		have[text(a.IP)] = true
	}
	return !slices.ContainsFunc(addresses, func(a string) bool { return !have[a] }), nil
}

// hasRouteFrom reports whether a link has a route to a network with this source address.
func hasRouteFrom(name string, to netip.Prefix, source netip.Addr) (bool, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return false, err
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF)
	return slices.ContainsFunc(routes, func(r netlink.Route) bool {
		return r.Dst != nil && r.Dst.String() == to.String() && text(r.Src) == source.String()
	}), err
}

// addBridgeAddress adds an address to the bridge. The prefix has full length, because the bridge already has a route to its
// network.
func addBridgeAddress(name, address string) error {
	link, addr, err := bridgeAddress(name, address)
	if err != nil {
		return err
	}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return fmt.Errorf("adding address %[2]s to bridge %[1]s: %[3]w", name, address, err)
	}
	return nil
}

// deleteBridgeAddress removes an address from the bridge. A missing address is no error.
func deleteBridgeAddress(name, address string) error {
	link, addr, err := bridgeAddress(name, address)
	if isNoLink(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := netlink.AddrDel(link, addr); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing address %s from bridge %s: %w", address, name, err)
	}
	return nil
}

func bridgeAddress(name, address string) (netlink.Link, *netlink.Addr, error) {
	addr, err := netip.ParseAddr(address)
	if err != nil {
		return nil, nil, err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, nil, fmt.Errorf("bridge %s: %w", name, err)
	}
	return link, &netlink.Addr{IPNet: ipNet(addr, addr.BitLen()), Flags: unix.IFA_F_NODAD}, nil
}

// deleteLink removes a link. A missing link is no error.
func deleteLink(name string) error {
	link, err := netlink.LinkByName(name)
	if isNoLink(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	return nil
}

// uplinkMTU returns the smallest MTU of the interfaces with the default routes of the families, through which packets leave the box.
func uplinkMTU(subnets []Subnet) int {
	mtu := 1500
	for _, subnet := range subnets {
		outside := net.IPv4(1, 1, 1, 1)
		if subnet.Prefix.Addr().Is6() {
			outside = net.ParseIP("2000::1")
		}
		routes, err := netlink.RouteGet(outside) // This reads the routing table and sends no packet.
		if err != nil || len(routes) == 0 {
			continue
		}
		if link, err := netlink.LinkByIndex(routes[0].LinkIndex); err == nil {
			mtu = min(mtu, link.Attrs().MTU)
		}
	}
	return mtu
}

// ensureNetNS creates a network namespace that lasts as long as the mount at path, even without a process in it.
func ensureNetNS(path string) error {
	if isNetNS(path) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	_ = f.Close()
	thread.Throwaway(func() { err = unshareNetNS(path) })
	return err
}

// unshareNetNS moves this thread into a new network namespace, and mounts the namespace at path.
func unshareNetNS(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("creating a network namespace: %w", err)
	}
	// An interface announces its address when it comes up. A neighbour that asked before, for example the load balancer,
	// need not wait a second for its next attempt.
	if err := os.WriteFile("/proc/sys/net/ipv4/conf/default/arp_notify", []byte("1"), 0); err != nil {
		return err
	}
	if err := setMachineIPv6(procIPv6); err != nil {
		return err
	}
	own := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
	return unix.Mount(own, path, "", unix.MS_BIND, "")
}

func isNetNS(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

func deleteNetNS(path string) error {
	for isNetNS(path) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

// Address of a machine.
type Address struct {
	Prefix  netip.Prefix // Address with the prefix length of its network.
	Gateway netip.Addr
}

// plug creates the cable from the bridge, or one of its VLANs, to the machine's eth0 and sets its addresses and routes.
func plug(bridge string, vlan uint16, veth, nsPath string, mac net.HardwareAddr, addresses []Address) error {
	ns, err := netns.GetFromPath(nsPath)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()

	eth0, err := inside.LinkByName(Interface)
	if isNoLink(err) {
		if err := addCable(bridge, veth, int(ns), mac); err != nil {
			return err
		}
		eth0, err = inside.LinkByName(Interface)
	}
	if err != nil {
		return err
	}
	if err := attach(bridge, vlan, veth); err != nil {
		return err
	}
	return configure(inside, eth0, addresses)
}

func addCable(bridge, veth string, nsFD int, mac net.HardwareAddr) error {
	if err := deleteLink(veth); err != nil { // The other end was in a removed namespace.
		return err
	}
	on, err := netlink.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", bridge, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = veth, on.Attrs().MTU
	cable := &netlink.Veth{
		LinkAttrs: attrs, PeerName: Interface, PeerHardwareAddr: mac,
		PeerNamespace: netlink.NsFd(nsFD), PeerMTU: uint32(on.Attrs().MTU),
	}
	if err := netlink.LinkAdd(cable); err != nil {
		return fmt.Errorf("creating cable %s: %w", veth, err)
	}
	return nil
}

// attach makes a cable a port of a bridge. vlan is 0 on a bridge of capstand.
func attach(bridge string, vlan uint16, veth string) error {
	on, err := netlink.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", bridge, err)
	}
	cable, err := netlink.LinkByName(veth)
	if err != nil {
		return fmt.Errorf("cable %s: %w", veth, err)
	}
	if vlan != 0 {
		return attachVLAN(on, vlan, cable)
	}
	if err := netlink.LinkSetMaster(cable, on); err != nil {
		return err
	}
	return netlink.LinkSetUp(cable)
}

func configure(inside *netlink.Handle, eth0 netlink.Link, addresses []Address) error {
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, a := range addresses {
		address := &netlink.Addr{IPNet: ipNet(a.Prefix.Addr(), a.Prefix.Bits()), Flags: unix.IFA_F_NODAD}
		if err := inside.AddrReplace(eth0, address); err != nil {
			return fmt.Errorf("address %s: %w", a.Prefix, err)
		}
	}
	// After the addresses, so that the interface announces them (arp_notify).
	if err := errors.Join(inside.LinkSetUp(lo), inside.LinkSetUp(eth0)); err != nil {
		return err
	}
	for _, a := range addresses {
		route := &netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: a.Gateway.AsSlice()}
		if err := inside.RouteReplace(route); err != nil {
			return fmt.Errorf("route through %s: %w", a.Gateway, err)
		}
	}
	return nil
}

// hostRoutes lists the networks that the box has routes to, except through the named bridges, and the gateways of all these routes. A gateway
// need not be in a network with a route.
func hostRoutes(except []string) ([]UsedRange, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, err
	}
	var used []UsedRange
	for _, route := range routes {
		name := linkOf(route, except)
		if name == "" {
			continue
		}
		for _, gateway := range gateways(route) {
			used = append(used, Used(gateway, "the host's gateway through "+name))
		}
		if route.Dst == nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(route.Dst.IP); ok {
			bits, _ := route.Dst.Mask.Size()
			used = append(used, UsedRange{netip.PrefixFrom(addr.Unmap(), bits), "the host's route through " + name})
		}
	}
	return used, nil
}

// gateways returns the next hops of a route.
func gateways(route netlink.Route) (all []netip.Addr) {
	for _, path := range append(route.MultiPath, &netlink.NexthopInfo{Gw: route.Gw}) {
		if addr, ok := netip.AddrFromSlice(path.Gw); ok {
			all = append(all, addr)
		}
	}
	return all
}

// linkOf returns the name of the first link of a route that is not in except. Routes with several paths have one link for each.
// Unreachable routes and the like have none: more specific routes override them.
func linkOf(route netlink.Route, except []string) string {
	links := []int{route.LinkIndex}
	for _, path := range route.MultiPath {
		links = append(links, path.LinkIndex)
	}
	for _, index := range links {
		if link, err := netlink.LinkByIndex(index); err == nil && !slices.Contains(except, link.Attrs().Name) {
			return link.Attrs().Name
		}
	}
	return ""
}

func ipNet(addr netip.Addr, bits int) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(bits, addr.BitLen())}
}

func isNoLink(err error) bool {
	var none netlink.LinkNotFoundError
	return errors.As(err, &none)
}
