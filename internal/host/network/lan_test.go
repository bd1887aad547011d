package network

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// userLAN is a network of the user: a switch with a router, and boxes with a bridge to the switch.
type userLAN struct {
	*rack
	wire, router netns.NsHandle
}

// userNetwork is the network of a cluster in a userLAN.
func userNetwork(id string) Network {
	pods := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/48")}
	return Network{ID: id, CIDR: "198.18.7.0/24", IPv6CIDR: "2001:db8:7::/64", Cluster: "default/" + id, LAN: &LAN{Bridge: "br-lab", Pods: pods}}
}

func newUserLAN(t *testing.T) *userLAN {
	l := &userLAN{rack: newRack(t, false)}
	l.wire, l.router = l.namespace(), l.namespace()
	l.must(in(l.wire, func() error { return addBridge("switch") }))
	l.plugIn(l.router, "switch-router")
	l.must(in(l.router, func() error { return up("lan", "198.18.7.1/24", "2001:db8:7::1/64") }))
	return l
}

func addBridge(name string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return err
	}
	return up(name)
}

// plugIn connects the link lan of a namespace with the switch.
func (l *userLAN) plugIn(ns netns.NsHandle, port string) {
	l.Helper()
	l.must(testnetns.Cable(testnetns.End{NS: ns, Name: "lan"}, testnetns.End{NS: l.wire, Name: port}))
	l.must(in(l.wire, func() error { return attach("switch", 0, port) }))
}

// box adds a box with a bridge to the LAN, on which the box has no address.
func (l *userLAN) box() *rackBox {
	l.Helper()
	b := l.add()
	l.plugIn(b.ns, "switch-"+b.HostID)
	l.must(in(b.ns, func() error {
		if err := addBridge("br-lab"); err != nil {
			return err
		}
		return attach("br-lab", 0, "lan")
	}))
	return b
}

// Machines on two boxes are in a network of the user: they reach each other, the router and each other's pods, without an
// address of a box in between. The removal of the network leaves nothing on the box.
func TestLAN(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a, b := l.box(), l.box()
	n := userNetwork("n")
	var before string
	l.must(in(a.ns, func() error { before = links(t); return nil }))
	l.ensure(n, a, b)
	onA, onB := l.machine(a, n, "m-a", "198.18.7.10", "2001:db8:7::10"), l.machine(b, n, "m-b", "198.18.7.20", "2001:db8:7::20")
	l.serve(onA, ":80", "a")
	l.serve(onB, ":80", "b")
	l.serve(l.router, ":80", "router")
	l.reaches("machine on the other box", onA, "198.18.7.20:80", "b")
	l.reaches("router", onA, "198.18.7.1:80", "router")
	l.reaches("machine from the router", l.router, "198.18.7.10:80", "a")
	l.reaches("machine on the other box, IPv6", onA, "[2001:db8:7::20]:80", "b")
	l.reaches("router, IPv6", onA, "[2001:db8:7::1]:80", "router")
	l.reaches("machine from the router, IPv6", l.router, "[2001:db8:7::10]:80", "a")
	l.podsReach(onA, onB)

	l.must(in(a.ns, func() error {
		cable, err := netlink.LinkByName(VethName("m-a"))
		if err != nil {
			return err
		}
		port, err := netlink.LinkGetProtinfo(cable)
		if err == nil && !port.Guard {
			t.Error("the bridge accepts frames of the spanning tree from a machine")
		}
		return err
	}))
	l.lanGuarded(a, n)
	l.must(in(a.ns, func() error {
		if err := errors.Join(a.Unplug("m-a"), a.UnleaseAll("m-a"), a.Release(t.Context(), n.ID)); err != nil {
			return err
		}
		if after := links(t); after != before {
			t.Errorf("after the removal the box has %s, want %s", after, before)
		}
		if rules := nft(t, "list", "ruleset"); rules != "" {
			t.Errorf("after the removal the box has the rules %s", rules)
		}
		return nil
	}))
	l.reaches("the LAN after the removal", onB, "198.18.7.1:80", "router")
}

// podsReach: pods of two machines reach each other. The machines are the next hops.
func (l *userLAN) podsReach(onA, onB netns.NsHandle) {
	l.Helper()
	pods := func(own, ownNet, othersNet, via string) func() error {
		return func() error {
			host := netip.MustParseAddr(own)
			if err := connect("lo", netip.PrefixFrom(host, host.BitLen()), netip.MustParsePrefix(ownNet), netip.Addr{}); err != nil {
				return err
			}
			eth0, err := netlink.LinkByName(Interface)
			if err != nil {
				return err
			}
			to := netip.MustParsePrefix(othersNet)
			return netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: ipNet(to.Addr(), to.Bits()), Gw: net.ParseIP(via), Src: host.AsSlice()})
		}
	}
	l.must(in(onA, pods("10.244.0.5", "10.244.0.0/24", "10.244.1.0/24", "198.18.7.20")))
	l.must(in(onB, pods("10.244.1.5", "10.244.1.0/24", "10.244.0.0/24", "198.18.7.10")))
	l.must(in(onA, pods("fd00:244::5", "fd00:244::/64", "fd00:244:0:1::/64", "2001:db8:7::20")))
	l.must(in(onB, pods("fd00:244:0:1::5", "fd00:244:0:1::/64", "fd00:244::/64", "2001:db8:7::10")))
	l.reaches("pod to a pod of another machine", onA, "10.244.1.5:80", "b")
	l.reaches("pod to a pod of another machine, IPv6", onA, "[fd00:244:0:1::5]:80", "b")
}

func links(t *testing.T) string {
	t.Helper()
	all, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, link := range all {
		names = append(names, link.Attrs().Name)
	}
	return strings.Join(names, " ")
}

// lanGuarded: capstand restores the rules of a LAN, and the cable to its bridge when the host has created it again.
func (l *userLAN) lanGuarded(a *rackBox, n Network) {
	l.Helper()
	l.must(in(a.ns, func() error {
		whole := nft(l.T, "list", "ruleset")
		if mended, err := a.mendFirewalls(l.Context()); err != nil || len(mended) > 0 {
			l.Errorf("no rule was missing: mended %v, %v", mended, err)
		}
		for _, harm := range [][]string{{"flush", "ruleset"}, {"flush", "chain", "bridge", TableName(n.ID), VethName("m-a")}} {
			nft(l.T, harm...)
			if mended, err := a.mendFirewalls(l.Context()); err != nil || len(mended) != 1 {
				l.Errorf("after %v: mended %v, %v", harm, mended, err)
			}
			if got := nft(l.T, "list", "ruleset"); got != whole {
				l.Errorf("after %v: %s, want %s", harm, got, whole)
			}
		}
		if err := deleteLink("br-lab"); err != nil {
			return err
		}
		var conflict ConflictError
		if err := a.Ensure(l.Context(), n); !errors.As(err, &conflict) || !strings.Contains(err.Error(), "this host has no bridge br-lab") {
			l.Errorf("without the bridge: %v", err)
		}
		if err := errors.Join(addBridge("br-lab"), attach("br-lab", 0, "lan"), a.Ensure(l.Context(), n)); err != nil {
			return err
		}
		return a.Plug(n.ID, "m-a", []Address{
			{Prefix: netip.MustParsePrefix("198.18.7.10/24"), Gateway: netip.MustParseAddr("198.18.7.1")},
			{Prefix: netip.MustParsePrefix("2001:db8:7::10/64"), Gateway: netip.MustParseAddr("2001:db8:7::1")},
		})
	}))
	ns, err := netns.GetFromPath(a.NetNS("m-a"))
	l.must(err)
	l.reaches("the router after the return of the bridge", ns, "198.18.7.1:80", "router")
	l.reaches("the router after the return of the bridge, IPv6", ns, "[2001:db8:7::1]:80", "router")
}

// An address belongs to one station of the LAN: a machine of any cluster of the box, the box itself, or another station.
func TestLANAddresses(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a, b := l.box(), l.box()
	n, other := userNetwork("n"), userNetwork("other")
	l.ensure(n, a, b)
	l.ensure(other, a)
	l.machine(a, n, "m-a", "198.18.7.10", "2001:db8:7::10")
	l.machine(b, n, "m-b", "198.18.7.20", "2001:db8:7::20")
	l.must(in(a.ns, func() error {
		var inUse InUseError
		if err := a.Lease(other.ID, "thief", "other/thief", []string{"198.18.7.10"}); !errors.As(err, &inUse) || inUse.Address != "198.18.7.10" {
			t.Errorf("the address of another cluster's machine: %v", err)
		}
		if err := a.Lease(other.ID, "thief", "other/thief", []string{"198.18.7.77", "2001:db8:7::10"}); !errors.As(err, &inUse) || inUse.Address != "2001:db8:7::10" {
			t.Errorf("the IPv6 address of another cluster's machine: %v", err)
		}
		if err := up("br-lab", "198.18.7.3/24", "2001:db8:7::3/64"); err != nil {
			return err
		}
		for address, want := range map[string]string{
			"198.18.7.1": "belongs to the station", "198.18.7.20": MAC(n.ID, "198.18.7.20").String(), "198.18.7.10": MAC(n.ID, "198.18.7.10").String(),
			"198.18.7.3": "is an address of this host", "2001:db8:7::3": "is an address of this host",
			"2001:db8:7::1": "belongs to the station", "2001:db8:7::20": MAC(n.ID, "198.18.7.20").String(), "2001:db8:7::10": MAC(n.ID, "198.18.7.10").String(),
		} {
			if err := a.ProbeLAN(t.Context(), *n.LAN, netip.MustParseAddr(address)); !errors.As(err, &inUse) || !strings.Contains(err.Error(), want) {
				t.Errorf("probe of %s: %v, want %q", address, err, want)
			}
		}
		for _, free := range []string{"198.18.7.30", "2001:db8:7::30"} {
			if err := a.ProbeLAN(t.Context(), *n.LAN, netip.MustParseAddr(free)); err != nil {
				t.Errorf("probe of a free address: %v", err)
			}
		}
		moved := n
		moved.LAN = &LAN{Bridge: "switch"}
		var conflict ConflictError
		for name, refused := range map[string]Network{"is no bridge": {ID: "x", CIDR: n.CIDR, IPv6CIDR: n.IPv6CIDR, Cluster: "default/x", LAN: &LAN{Bridge: "lan"}}, "no bridge switch": moved, "cannot move": {ID: n.ID, CIDR: n.CIDR, IPv6CIDR: n.IPv6CIDR, Cluster: n.Cluster}} {
			if err := a.Ensure(t.Context(), refused); !errors.As(err, &conflict) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		return nil
	}))
}

const (
	etherIPv4, etherVLAN, etherQinQ = 0x0800, 0x8100, 0x88a8
	lanOwn                          = "198.18.7.10"
)

// lanFrame returns an Ethernet frame.
func lanFrame(to, from net.HardwareAddr, kind uint16, payload ...[]byte) []byte {
	out := append(append(bytes.Clone(to), from...), byte(kind>>8), byte(kind))
	return append(out, bytes.Join(payload, nil)...)
}

func lanARP(hardware uint16, mac net.HardwareAddr, sender string) []byte {
	p := arp(arpReply, mac, netip.MustParseAddr(sender), netip.MustParseAddr("198.18.7.1"))[14:]
	binary.BigEndian.PutUint16(p, hardware)
	return p
}

// lanUDP returns an IPv4 packet, without its payload of 20 bytes.
func lanUDP(from, to string, port uint16) []byte {
	p := make([]byte, 28)
	copy(p, []byte{0x45, 0, 0, 48, 0, 0, 0, 0, 64, 17})
	copy(p[12:], netip.MustParseAddr(from).AsSlice())
	copy(p[16:], netip.MustParseAddr(to).AsSlice())
	binary.BigEndian.PutUint16(p[10:], checksum(p[:20]))
	binary.BigEndian.PutUint16(p[20:], port)
	binary.BigEndian.PutUint16(p[22:], 9)
	p[25] = 28
	return p
}

// A machine cannot send frames with addresses of other stations into the LAN, and nothing that the LAN itself consists of.
func TestLANSpoofing_ALL18(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a := l.box()
	n := userNetwork("n")
	n.IPv6CIDR = ""
	l.ensure(n, a)
	onA := l.machine(a, n, "m-a", lanOwn)
	l.machine(a, n, "m-b", "198.18.7.11")
	own, other, router := MAC(n.ID, lanOwn), net.HardwareAddr{2, 0, 0, 0, 0, 9}, net.HardwareAddr{2, 0, 0, 0, 0, 1}
	elsewhere := MAC("other", "198.18.7.77")
	good := lanUDP(lanOwn, "198.18.7.1", 7)
	for _, tc := range []struct {
		name   string
		frame  []byte
		passes bool
	}{
		{"own addresses", lanFrame(router, own, etherIPv4, good), true},
		{"own ARP", lanFrame(broadcast, own, typeARP, lanARP(1, own, lanOwn)), true},
		{"pod to pod, another machine", lanFrame(elsewhere, own, etherIPv4, lanUDP("10.244.0.5", "10.244.1.5", 7)), true},
		{"source MAC", lanFrame(router, other, etherIPv4, good), false},
		{"source IP", lanFrame(router, own, etherIPv4, lanUDP("198.18.7.99", "198.18.7.1", 7)), false},
		{"source IP of a machine of the cluster", lanFrame(router, own, etherIPv4, lanUDP("198.18.7.11", "198.18.7.1", 7)), false},
		{"source IP of the router, to a machine", lanFrame(elsewhere, own, etherIPv4, lanUDP("198.18.7.1", "198.18.7.77", 7)), false},
		{"no source IP", lanFrame(broadcast, own, etherIPv4, lanUDP("0.0.0.0", "255.255.255.255", 68)), false},
		{"ARP for another IP", lanFrame(broadcast, own, typeARP, lanARP(1, own, "198.18.7.1")), false},
		{"ARP with another MAC", lanFrame(broadcast, own, typeARP, lanARP(1, other, lanOwn)), false},
		{"ARP of another kind", lanFrame(broadcast, own, typeARP, lanARP(6, own, "198.18.7.1")), false},
		{"IPv6", lanFrame(broadcast, own, typeIPv6, make([]byte, 40)), false},
		{"VLAN tag", lanFrame(router, own, etherVLAN, []byte{0, 5, 8, 0}, good), false},
		{"two VLAN tags", lanFrame(router, own, etherQinQ, []byte{0, 5, 0x81, 0, 0, 6, 8, 0}, good), false},
		{"DHCP server", lanFrame(broadcast, own, etherIPv4, lanUDP(lanOwn, "255.255.255.255", 67)), false},
		{"pod to pod, a station", lanFrame(router, own, etherIPv4, lanUDP("10.244.0.5", "10.244.1.5", 7)), false},
		{"pod to a machine's address", lanFrame(elsewhere, own, etherIPv4, lanUDP("10.244.0.5", "198.18.7.77", 7)), false},
		{"machine's address to a pod", lanFrame(elsewhere, own, etherIPv4, lanUDP("198.18.7.77", "10.244.0.5", 7)), false},
		{"spanning tree", lanFrame(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, own, 38, []byte{0x42, 0x42, 3}), false},
	} {
		if got := l.arrives(onA, tc.frame, lanFrame(router, own, etherIPv4, good)); got != tc.passes {
			t.Errorf("%s: arrives in the LAN: %v, want %v", tc.name, got, tc.passes)
		}
	}
}

// arrives reports whether a frame of a machine arrives at the router. A good frame follows it, and arrives after it.
func (l *userLAN) arrives(machine netns.NsHandle, frame, good []byte) (arrived bool) {
	l.Helper()
	var wire int
	l.must(in(l.router, func() (err error) { wire, err = listenRaw("lan"); return err }))
	defer func() { _ = unix.Close(wire) }()
	l.must(in(machine, func() error {
		return sendRaw(append(frame, "the frame in question"...), append(good, "the frame that ends it"...))
	}))
	for {
		got := make([]byte, 2000)
		n, _, err := unix.Recvfrom(wire, got, 0)
		if err != nil {
			l.Fatalf("the good frame did not arrive: %v", err)
		}
		if bytes.Contains(got[:n], []byte("the frame that ends it")) {
			return arrived
		}
		arrived = arrived || bytes.Contains(got[:n], []byte("the frame in question"))
	}
}

// sendRaw sends frames from the interface of a machine.
func sendRaw(frames ...[]byte) error { return sendRawFrom(Interface, frames...) }

func sendRawFrom(device string, frames ...[]byte) error {
	fd, err := listenRaw(device)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	to := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index, Halen: 6}
	for _, frame := range frames {
		err = errors.Join(err, unix.Sendto(fd, frame, 0, to))
	}
	return err
}
