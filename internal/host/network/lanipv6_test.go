package network

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/net/icmp"
	icmpv6 "golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// Machines with IPv6 only, on two boxes, are in a network of the user, and no station has the address of another one.
func TestLANIPv6Only(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a, b := l.box(), l.box()
	n := userNetwork("n")
	n.CIDR, n.IPv6CIDR = n.IPv6CIDR, ""
	l.ensure(n, a, b)
	onA, onB := l.machine(a, n, "m-a", "2001:db8:7::10"), l.machine(b, n, "m-b", "2001:db8:7::20")
	l.serve(onA, ":80", "a")
	l.serve(onB, ":80", "b")
	l.serve(l.router, ":80", "router")
	l.reaches("machine on the other box", onA, "[2001:db8:7::20]:80", "b")
	l.reaches("router", onA, "[2001:db8:7::1]:80", "router")
	l.reaches("machine from the router", l.router, "[2001:db8:7::10]:80", "a")
	l.endpoint(a, onA)
	l.must(in(a.ns, func() error {
		for address, want := range map[string]string{"2001:db8:7::20": MAC(n.ID, "2001:db8:7::20").String(), "2001:db8:7::30": ""} {
			link, err := netlink.LinkByName("br-lab")
			if err != nil {
				return err
			}
			if mac, err := probeLAN(t.Context(), link, 0, netip.MustParseAddr(address)); err != nil || mac.String() != want {
				t.Errorf("probe of %s: %s, %v, want %s", address, mac, err, want)
			}
		}
		return nil
	}))
}

// endpoint: machines and the router reach a virtual address on the bridge of a box, whose bridge has no link-local address. The address of a
// machine is refused.
func (l *userLAN) endpoint(a *rackBox, onA netns.NsHandle) {
	l.Helper()
	const virtual = "2001:db8:7::f1"
	l.must(in(a.ns, func() error {
		const conf = "/proc/sys/net/ipv6/conf/br-lab/"
		if err := errors.Join(set(conf+"disable_ipv6", "1"), set(conf+"addr_gen_mode", "1"), set(conf+"disable_ipv6", "0")); err != nil {
			return err
		}
		if err := up("br-lab", "2001:db8:7::3/64"); err != nil {
			return err
		}
		link, err := VirtualLink(netip.MustParseAddr(virtual))
		if err != nil || link.Attrs().Name != "br-lab" {
			l.Fatalf("%v, %v", link, err)
		}
		if err := ProbeVirtual(l.Context(), link, netip.MustParseAddr("2001:db8:7::20")); err == nil {
			l.Error("the address of a machine is free")
		}
		return errors.Join(ProbeVirtual(l.Context(), link, netip.MustParseAddr(virtual)),
			HoldVirtual(link, netip.MustParseAddr(virtual), virtualLife), AnnounceVirtual(link, netip.MustParseAddr(virtual)))
	}))
	l.serve(a.ns, "["+virtual+"]:6443", "endpoint")
	l.reaches("endpoint from its own box", onA, "["+virtual+"]:6443", "endpoint")
	l.reaches("endpoint from the router", l.router, "["+virtual+"]:6443", "endpoint")
}

// A machine gets no MAC address of another station, whose link-local address follows from it.
func TestLANLinkLocal_ALL18(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a := l.box()
	n := userNetwork("n")
	l.ensure(n, a)
	two := []Address{{Prefix: netip.MustParsePrefix("198.18.7.10/24")}, {Prefix: netip.MustParsePrefix("2001:db8:7::10/64")}}
	if got := Probed(n.ID, two[:1]); len(got) != 1 {
		t.Errorf("a machine without IPv6: %v", got)
	}
	probed := Probed(n.ID, two)
	probe := func() (err error) {
		l.must(in(a.ns, func() error {
			for _, address := range probed {
				err = errors.Join(err, a.ProbeLAN(t.Context(), *n.LAN, address))
			}
			return nil
		}))
		return err
	}
	if err := probe(); err != nil {
		t.Error(err)
	}
	local := linkLocal(MAC(n.ID, lanOwn))
	l.must(in(l.router, func() error { return up("lan", local.String()+"/64") }))
	var inUse InUseError
	if err := probe(); !errors.As(err, &inUse) || inUse.Address != local.String() {
		t.Errorf("another station has the link-local address: %v", err)
	}
}

// packet6 returns an IPv6 packet.
func packet6(from, to string, next byte, payload []byte) []byte {
	hops := byte(ndpHops)
	if next == 0 {
		hops = 1 // a report of a multicast listener
	}
	p := binary.BigEndian.AppendUint16([]byte{6 << 4, 0, 0, 0}, uint16(len(payload)))
	return slices.Concat(p, []byte{next, hops}, netip.MustParseAddr(from).AsSlice(), netip.MustParseAddr(to).AsSlice(), payload)
}

// message6 returns an ICMPv6 message with its checksum.
func message6(from, to string, kind byte, body ...[]byte) []byte {
	m, err := (&icmp.Message{Type: icmpv6.ICMPType(kind), Body: &icmp.RawBody{Data: bytes.Join(body, nil)}}).
		Marshal(icmp.IPv6PseudoHeader(net.ParseIP(from), net.ParseIP(to)))
	if err != nil {
		panic(err)
	}
	return m
}

func icmp6(from, to string, kind byte, body ...[]byte) []byte {
	return packet6(from, to, unix.IPPROTO_ICMPV6, message6(from, to, kind, body...))
}

// neighbour6 returns a solicitation or an advertisement, with options.
func neighbour6(from, to string, kind byte, target string, options ...[]byte) []byte {
	return icmp6(from, to, kind, slices.Concat(make([]byte, 4), netip.MustParseAddr(target).AsSlice(), bytes.Join(options, nil)))
}

func macOption(kind byte, mac net.HardwareAddr) []byte { return append([]byte{kind, 1}, mac...) }

func udp6(from, to string, source, target uint16) []byte {
	return packet6(from, to, unix.IPPROTO_UDP, ports(source, target))
}

func ports(source, target uint16) []byte {
	p := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, source), target)
	return append(p, 0, 8, 0, 1)
}

// routerAdvertisement announces a router for half an hour, and a network for addresses.
func routerAdvertisement(from, to string) []byte {
	prefix := slices.Concat([]byte{3, 4, 64, 0xc0, 0, 0, 7, 8, 0, 0, 7, 8, 0, 0, 0, 0}, netip.MustParseAddr("2001:db8:bad::").AsSlice())
	return icmp6(from, to, 134, []byte{64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0}, prefix)
}

// extension returns an extension header of 8 bytes before a payload.
func extension(next byte, payload []byte) []byte {
	return append([]byte{next, 0, 1, 4, 0, 0, 0, 0}, payload...)
}

// fragment returns a fragment at an offset of 8 bytes each, with more fragments after it.
func fragment(next byte, offset uint16, payload []byte) []byte {
	return append([]byte{next, 0, byte(offset >> 5), byte(offset<<3) | 1, 0, 0, 0, 7}, payload...)
}

// A machine cannot send IPv6 packets with addresses of other stations into the LAN, messages about these addresses, or those of a router.
// No extension header or fragment opens a way.
func TestLANSpoofingIPv6_ALL18(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a := l.box()
	n := userNetwork("n")
	l.ensure(n, a)
	const six, twin, router, all = "2001:db8:7::10", "2001:db8:7::11", "2001:db8:7::1", "ff02::1"
	onA := l.machine(a, n, "m-a", lanOwn, six)
	l.machine(a, n, "m-b", "198.18.7.11", twin)
	own, other, station := MAC(n.ID, lanOwn), net.HardwareAddr{2, 0, 0, 0, 0, 9}, net.HardwareAddr{2, 0, 0, 0, 0, 1}
	local, elsewhere := linkLocal(own).String(), MAC("other", "198.18.7.77")
	groups := []byte{0, 0, 0, 0} // a report without groups
	alert := func(from string, kind byte) []byte {
		return packet6(from, "ff02::16", 0, slices.Concat([]byte{unix.IPPROTO_ICMPV6, 0, 5, 2, 0, 0, 1, 0}, message6(from, "ff02::16", kind, groups)))
	}
	for _, tc := range []struct {
		name   string
		to     net.HardwareAddr
		packet []byte
		passes bool
	}{
		{"own address", station, udp6(six, router, 9, 7), true},
		{"own link-local address", station, udp6(local, router, 9, 7), true},
		{"own solicitation", station, neighbour6(six, router, 135, router, macOption(ndpSource, own)), true},
		{"own solicitation without an option", station, neighbour6(local, router, 135, router), true},
		{"own search for duplicates", station, neighbour6("::", "ff02::1:ff00:10", 135, six), true},
		{"own search for duplicates, with a nonce", station, neighbour6("::", "ff02::1:ff00:10", 135, local, []byte{14, 1, 1, 2, 3, 4, 5, 6}), true},
		{"own advertisement", station, neighbour6(six, all, 136, six, macOption(ndpTarget, own)), true},
		{"own advertisement without an option", station, neighbour6(local, router, 136, local), true},
		{"own report of listeners", station, alert(local, 143), true},
		{"report of listeners without an address", station, alert("::", 143), true},
		{"packet too big", station, icmp6(six, router, 2, make([]byte, 4)), true},
		{"echo", station, icmp6(six, router, 128, make([]byte, 4)), true},
		{"first fragment of an echo", station, packet6(six, router, 44, fragment(58, 0, icmp6(six, router, 128, make([]byte, 4))[40:])), true},
		{"later fragment", station, packet6(six, router, 44, fragment(17, 4, make([]byte, 8))), true},
		{"echo behind a header", station, packet6(six, router, 60, extension(58, icmp6(six, router, 128, make([]byte, 4))[40:])), true},
		{"pod to pod, another machine", elsewhere, udp6("fd00:244::5", "fd00:244:0:1::5", 9, 7), true},
		{"packet too big, from a pod", elsewhere, icmp6("fd00:244::5", "fd00:244:0:1::5", 2, make([]byte, 4)), true},

		{"source of another station", station, udp6("2001:db8:7::99", router, 9, 7), false},
		{"source of a machine of the cluster", station, udp6(twin, router, 9, 7), false},
		{"source of the router, to a machine", elsewhere, udp6(router, "2001:db8:7::77", 9, 7), false},
		{"link-local address of the router", station, udp6("fe80::1", all, 9, 7), false},
		{"no source", station, udp6("::", router, 9, 7), false},
		{"advertisement of the router", station, routerAdvertisement(local, all), false},
		{"advertisement of the router, own address", station, routerAdvertisement(six, all), false},
		{"advertisement of the router, from a pod to a machine", elsewhere, routerAdvertisement("fd00:244::5", "fd00:244:0:1::1"), false},
		{"advertisement of the router behind a header", station, packet6(local, all, 60, extension(58, routerAdvertisement(local, all)[40:])), false},
		{"advertisement of the router in a fragment", station, packet6(local, all, 44, fragment(58, 0, routerAdvertisement(local, all)[40:])), false},
		{"advertisement of the router behind a header in a fragment", station, packet6(local, all, 44, fragment(60, 0, extension(58, nil))), false},
		{"the same with padding that resembles an echo", station, append(packet6(local, all, 44, fragment(60, 0, extension(58, nil))), 128, 0, 0, 0), false},
		{"the same from a pod to a machine", elsewhere, append(packet6("fd00:244::5", "fd00:244:0:1::1", 44, fragment(60, 0, extension(58, nil))), 128, 0, 0, 0), false},
		{"rest of it behind a header", station, packet6(local, all, 44, fragment(60, 1, routerAdvertisement(local, all)[40:])), false},
		{"redirect", station, icmp6(local, all, 137, make([]byte, 36)), false},
		{"query for listeners", station, icmp6(local, all, 130, make([]byte, 20)), false},
		{"router of multicast", station, icmp6(local, "ff02::6a", 151), false},
		{"report of listeners of another station", station, alert("fe80::1", 143), false},
		{"advertisement of another address", station, neighbour6(six, all, 136, router, macOption(ndpTarget, own)), false},
		{"advertisement of the twin's address", station, neighbour6(six, all, 136, twin, macOption(ndpTarget, own)), false},
		{"advertisement of another address, link-local", station, neighbour6(local, all, 136, "fe80::1"), false},
		{"advertisement with another MAC", station, neighbour6(six, all, 136, six, macOption(ndpTarget, other)), false},
		{"advertisement with two MACs", station, neighbour6(six, all, 136, six, macOption(ndpTarget, own), macOption(ndpTarget, other)), false},
		{"advertisement behind a header", station, packet6(six, all, 60, extension(58, neighbour6(six, all, 136, router, macOption(ndpTarget, own))[40:])), false},
		{"own advertisement behind a header, with an option in the padding", station, append(packet6(six, all, 60, extension(58, neighbour6(six, all, 136, six)[40:])), macOption(ndpTarget, own)...), false},
		{"advertisement from a pod to a machine", elsewhere, neighbour6("fd00:244::5", "fd00:244:0:1::1", 136, router, macOption(ndpTarget, own)), false},
		{"solicitation with another MAC", station, neighbour6(six, router, 135, router, macOption(ndpSource, other)), false},
		{"solicitation of another station", station, neighbour6(router, twin, 135, twin, macOption(ndpSource, own)), false},
		{"solicitation from a pod to a machine", elsewhere, neighbour6("fd00:244::5", "fd00:244:0:1::1", 135, router, macOption(ndpSource, own)), false},
		{"search for duplicates of another address", station, neighbour6("::", "ff02::1:ff00:1", 135, router), false},
		{"search for duplicates with a MAC", station, neighbour6("::", "ff02::1:ff00:10", 135, six, macOption(ndpSource, own)), false},
		{"DHCP server", station, udp6(local, all, 547, 9), false},
		{"answer of a DHCP server", station, udp6(local, all, 9, 546), false},
		{"answer of a DHCP server behind a header", station, packet6(local, all, 60, extension(17, ports(9, 546))), false},
		{"answer of a DHCP server behind a header in a fragment", station, packet6(local, all, 44, fragment(60, 0, extension(17, nil))), false},
		{"pod to pod, a station", station, udp6("fd00:244::5", "fd00:244:0:1::5", 9, 7), false},
		{"pod to a machine's address", elsewhere, udp6("fd00:244::5", "2001:db8:7::77", 9, 7), false},
		{"machine's address to a pod", elsewhere, udp6("2001:db8:7::77", "fd00:244::5", 9, 7), false},
	} {
		good := lanFrame(station, own, etherIPv4, lanUDP(lanOwn, "198.18.7.1", 7))
		if got := l.arrives(onA, lanFrame(tc.to, own, typeIPv6, tc.packet), good); got != tc.passes {
			t.Errorf("%s: arrives in the LAN: %v, want %v", tc.name, got, tc.passes)
		}
	}
}

// A machine takes neither addresses nor routes from the advertisements of a router, because its pool has chosen them.
func TestLANRouterAdvertisement_ALL18(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	a := l.box()
	n := userNetwork("n")
	l.ensure(n, a)
	onA := l.machine(a, n, "m-a", lanOwn, "2001:db8:7::10")
	witness := l.namespace()
	l.plugIn(witness, "switch-witness")
	l.must(in(witness, func() error {
		if err := set("/proc/sys/net/ipv6/conf/lan/forwarding", "0"); err != nil {
			return err
		}
		return up("lan")
	}))
	from := linkLocal(net.HardwareAddr{2, 0, 0, 0, 0, 1}).String()
	advertised := func(ns netns.NsHandle) (found bool) {
		l.must(in(ns, func() error {
			all, err := netlink.AddrList(nil, netlink.FAMILY_V6)
			for _, address := range all {
				found = found || netip.MustParsePrefix("2001:db8:bad::/64").Contains(netip.MustParseAddr(address.IP.String()))
			}
			return err
		}))
		return found
	}
	frame := lanFrame(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 1}, typeIPv6, routerAdvertisement(from, "ff02::1"))
	expect.True(t, "a station with the default settings takes an address", func() bool {
		l.must(in(l.router, func() error { return sendRawFrom("lan", frame) }))
		return advertised(witness)
	})
	if advertised(onA) {
		t.Error("the machine took an address from the advertisement of a router")
	}
	l.must(in(onA, func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Gw: net.ParseIP(from)}, netlink.RT_FILTER_GW)
		if len(routes) > 0 {
			t.Errorf("the machine has the routes %v of the advertisement", routes)
		}
		return err
	}))
}
