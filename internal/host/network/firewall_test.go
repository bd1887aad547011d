package network

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A connection from the box to a load balancer on the box survives the removal of other networks. If the rules of a network
// masqueraded such a connection, the kernel would give it another network's address and drop it with that address.
func TestConnectionOutlivesOtherNetwork(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	b := box(t, t.TempDir(), "a")
	for _, n := range []Network{
		{ID: "other", CIDR: "10.231.6.0/24", Cluster: "default/other"},
		{ID: "own", CIDR: "10.231.7.0/24", Cluster: "default/own"},
	} {
		if err := b.Ensure(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := testnetns.LoopbackUp(); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "10.231.7.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if got, want := server.RemoteAddr().String(), client.LocalAddr().String(); got != want {
		t.Errorf("the client has the address %s, and the server sees %s", want, got)
	}

	if err := b.Release(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := server.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(server, make([]byte, len("hello"))); err != nil {
		t.Errorf("the connection does not work after the removal of another network: %v", err)
	}
}

// A machine, and a pod whose packets it forwards, send to the outside with an address of the machine's network only.
func TestForgedSources(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	for forged, of := range map[string]stack{"198.51.100.66": ipv4, "2001:db8:66::66": ipv6} {
		var receiver net.PacketConn
		l.must(in(l.client, func() (err error) { receiver, err = net.ListenPacket("udp", port(of.client, 9)); return err }))
		address := netip.MustParseAddr(forged)
		l.must(in(l.machines[0], func() error { return up("lo", netip.PrefixFrom(address, address.BitLen()).String()) }))
		for _, source := range []string{forged, of.machines[0]} {
			l.must(in(l.machines[0], func() error {
				dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(port(source, 0)))}
				conn, err := dialer.DialContext(t.Context(), "udp", port(of.client, 9))
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.Write([]byte(source))
				return err
			}))
		}
		l.must(receiver.SetReadDeadline(time.Now().Add(15 * time.Second)))
		packet := make([]byte, 64)
		n, from, err := receiver.ReadFrom(packet)
		if err != nil || string(packet[:n]) != of.machines[0] || netip.MustParseAddrPort(from.String()).Addr().String() != of.box {
			t.Errorf("the first packet from source %s comes from %v, %v, want one of %s from %s", packet[:n], from, err, of.machines[0], of.box)
		}
		_ = receiver.Close()
	}
}

// Packets of a family that a network does not have are forged too.
func TestOwnSources(t *testing.T) {
	for cidr, test := range map[string]struct{ ipv6, want string }{
		"10.231.7.0/24": {"", "ip saddr != 10.231.7.0/24 drop, meta nfproto ipv6 drop"},
		"10.231.8.0/24": {"fd00:7::/64", "ip saddr != 10.231.8.0/24 drop, ip6 saddr != fd00:7::/64 drop"},
		"fd00:7::/64":   {"", "ip6 saddr != fd00:7::/64 drop, meta nfproto ipv4 drop"},
	} {
		subnets, err := Subnets(cidr, test.ipv6)
		if err != nil {
			t.Fatal(err)
		}
		outside := "iifname " + BridgeName("n") + " oifname != " + BridgeName("n") + " "
		if got := strings.ReplaceAll(strings.Join(firewall{networkID: "n", subnets: subnets}.ownSources(), ", "), outside, ""); got != test.want {
			t.Errorf("%s: %q, want %q", cidr, got, test.want)
		}
	}
}

// Both directions of the traffic with the outside are clamped before any other rule of the chain can accept a packet.
func TestClampSegments(t *testing.T) {
	const rest = " tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"
	bridge := BridgeName("n")
	want := []string{"iifname " + bridge + " oifname != " + bridge + rest, "iifname != " + bridge + " oifname " + bridge + rest}
	subnets, err := Subnets("10.231.7.0/24", "")
	if err != nil {
		t.Fatal(err)
	}
	if got := (firewall{networkID: "n", subnets: subnets}).rules()["forward"]; strings.Join(got[:2], "\n") != strings.Join(want, "\n") {
		t.Errorf("the chain forward starts with %q, want %q", got[:2], want)
	}
}

// The ends of a connection between a machine and the outside announce segments that fit the path to the outside, whose MTU is
// smaller than that of the machine and that of the other end.
func TestSegmentsFitPath(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	const mtu = 1300
	for family, headers := range map[string]int{"IPv4": 20 + 20, "IPv6": 40 + 20} {
		t.Run(family, func(t *testing.T) {
			r := newRack(t, family == "IPv6")
			a, outside := r.add(), r.add()
			n := Network{ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/n"}
			r.ensure(n, a)
			machine := r.machine(a, n, "m", "10.231.7.10", "fd00:7::10")
			r.must(in(a.ns, func() error { return limitRoutes(mtu) }))
			r.serve(outside.ns, ":80", "outside")
			atOutside, atMachine := r.capture(outside.ns, "uplink"), r.capture(machine, Interface)
			r.reaches("machine to the outside", machine, netip.AddrPortFrom(outside.tunnel, 80).String(), "outside")
			if got := r.segmentSize(atOutside, 80); got != mtu-headers {
				t.Errorf("the machine announces segments of %d bytes to the outside, want %d", got, mtu-headers)
			}
			if got := r.segmentSize(atMachine, 0); got != mtu-headers {
				t.Errorf("the outside announces segments of %d bytes to the machine, want %d", got, mtu-headers)
			}
		})
	}
}

// limitRoutes sets the MTU of the default routes.
func limitRoutes(mtu int) error {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	for _, route := range routes {
		if route.Gw != nil && err == nil {
			route.MTU = mtu
			err = netlink.RouteReplace(&route)
		}
	}
	return err
}

// capture receives the frames of a device in a network namespace.
func (r *rack) capture(ns netns.NsHandle, device string) (fd int) {
	r.Helper()
	r.must(in(ns, func() (err error) { fd, err = listenRaw(device); return err }))
	r.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// segmentSize returns the size in the first captured TCP packet with SYN to a port, or with SYN and ACK if the port is 0.
func (r *rack) segmentSize(fd int, port uint16) int {
	r.Helper()
	for {
		frame := make([]byte, 2000)
		size, _, err := unix.Recvfrom(fd, frame, 0)
		if err != nil {
			r.Fatalf("no packet that opens a connection: %v", err)
		}
		tcp := tcpOf(frame[:size])
		if len(tcp) < 24 {
			continue
		}
		const syn, synACK, maxSegmentSize = 0x02, 0x12, 2
		opens := tcp[13] == syn && binary.BigEndian.Uint16(tcp[2:]) == port || port == 0 && tcp[13] == synACK
		if opens && tcp[20] == maxSegmentSize { // Linux sends this option first.
			return int(binary.BigEndian.Uint16(tcp[22:]))
		}
	}
}

// tcpOf returns the TCP packet in a frame, or nil.
func tcpOf(frame []byte) []byte {
	switch {
	case len(frame) > 34 && frame[12] == 0x08 && frame[13] == 0x00 && frame[23] == unix.IPPROTO_TCP:
		return frame[14+4*int(frame[14]&0xf):]
	case len(frame) > 54 && frame[12] == 0x86 && frame[13] == 0xdd && frame[20] == unix.IPPROTO_TCP:
		return frame[54:]
	}
	return nil
}
