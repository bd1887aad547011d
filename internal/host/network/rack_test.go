package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// rack is a set of boxes, each of which is a network namespace with a tunnel address, and a router between them.
type rack struct {
	*testing.T
	router netns.NsHandle
	ipv6   bool
	boxes  int
	// bridgeNF is 1 if frames between the ports of a bridge pass the rules for IP, as on hosts with Docker.
	bridgeNF string
}

// rackBox is a box of a rack.
type rackBox struct {
	Box
	ns     netns.NsHandle
	tunnel netip.Addr
}

func newRack(t *testing.T, ipv6 bool) *rack {
	r := &rack{T: t, ipv6: ipv6, bridgeNF: "0"}
	if ipv6 {
		r.bridgeNF = "1"
	}
	r.router = r.namespace()
	return r
}

func (r *rack) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// namespace creates a network namespace that forwards.
func (r *rack) namespace() netns.NsHandle {
	ns, err := testnetns.New()
	r.must(err)
	r.must(in(ns, func() error {
		for _, path := range []string{"/proc/sys/net/bridge/bridge-nf-call-iptables", "/proc/sys/net/bridge/bridge-nf-call-ip6tables"} {
			if err := set(path, r.bridgeNF); err != nil { // The setting is missing in a kernel without br_netfilter.
				return err
			}
		}
		return nil
	}))
	return ns
}

// in runs f in a network namespace.
var in = testnetns.In

// add creates a box that reaches the others through the router.
func (r *rack) add() *rackBox {
	r.Helper()
	r.boxes++
	b := &rackBox{ns: r.namespace(), tunnel: netip.AddrFrom4([4]byte{192, 0, 2, byte(r.boxes)})}
	gateway, everything := netip.MustParsePrefix("198.51.100.1/32"), netip.MustParsePrefix("0.0.0.0/0")
	if r.ipv6 {
		b.tunnel = netip.MustParseAddr(fmt.Sprintf("fd00:99::%d", r.boxes))
		gateway, everything = netip.MustParsePrefix("fd00:98::1/128"), netip.MustParsePrefix("::/0")
	}
	b.Box = box(r.T, r.TempDir(), fmt.Sprint("box-", r.boxes))
	port := fmt.Sprint("port", r.boxes)
	r.must(testnetns.Cable(testnetns.End{NS: b.ns, Name: "uplink"}, testnetns.End{NS: r.router, Name: port}))
	r.must(in(r.router, func() error {
		return connect(port, gateway, netip.PrefixFrom(b.tunnel, b.tunnel.BitLen()), netip.Addr{})
	}))
	r.must(in(b.ns, func() error {
		if err := connect("uplink", netip.PrefixFrom(b.tunnel, b.tunnel.BitLen()), netip.PrefixFrom(gateway.Addr(), gateway.Bits()), netip.Addr{}); err != nil {
			return err
		}
		return connect("uplink", netip.Prefix{}, everything, gateway.Addr())
	}))
	return b
}

// connect configures a link with an address and a route.
var connect = testnetns.Connect

// ensure creates a cluster's network on boxes.
func (r *rack) ensure(n Network, boxes ...*rackBox) {
	r.Helper()
	for _, b := range boxes {
		r.must(in(b.ns, func() error { return b.Ensure(r.Context(), b.network(n)) }))
	}
}

// network returns a network as this box has it.
func (b *rackBox) network(n Network) Network {
	if n.Overlay != nil {
		overlay := *n.Overlay
		overlay.Address = b.tunnel
		n.Overlay = &overlay
	}
	return n
}

// machine creates a machine and returns its network namespace.
func (r *rack) machine(b *rackBox, n Network, id string, addresses ...string) netns.NsHandle {
	r.Helper()
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	r.must(err)
	var plugged []Address
	for i, a := range addresses {
		plugged = append(plugged, Address{Prefix: netip.PrefixFrom(netip.MustParseAddr(a), subnets[i].Prefix.Bits()), Gateway: subnets[i].Gateway})
	}
	r.Cleanup(func() {
		if err := in(b.ns, func() error { return b.Unplug(id) }); err != nil {
			r.Error(err)
		}
	})
	r.must(in(b.ns, func() error {
		if err := b.Lease(n.ID, id, "default/"+id, addresses); err != nil {
			return err
		}
		return b.Plug(n.ID, id, plugged)
	}))
	ns, err := netns.GetFromPath(b.NetNS(id))
	r.must(err)
	return ns
}

// peers sets the peers of boxes.
func (r *rack) peers(n Network, p Peers, boxes ...*rackBox) {
	r.Helper()
	for _, b := range boxes {
		own := Peers{Hosts: slices.DeleteFunc(slices.Clone(p.Hosts), func(h netip.Addr) bool { return h == b.tunnel })}
		own.Machines = slices.DeleteFunc(slices.Clone(p.Machines), func(m Peer) bool { return m.Host == b.tunnel })
		own.Keys = maps.Clone(p.Keys)
		delete(own.Keys, b.tunnel)
		r.must(in(b.ns, func() error { return b.SetPeers(r.Context(), n.ID, own) }))
	}
}

func peer(b *rackBox, addresses ...string) Peer {
	p := Peer{Host: b.tunnel}
	for _, a := range addresses {
		p.Addresses = append(p.Addresses, netip.MustParseAddr(a))
	}
	return p
}

// serve answers connections to a port of a network namespace with a greeting, after it has received 100 000 bytes.
func (r *rack) serve(ns netns.NsHandle, address, greeting string) {
	r.Helper()
	var listener net.Listener
	r.must(in(ns, func() (err error) { listener, err = net.Listen("tcp", address); return err }))
	r.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if _, err := io.ReadFull(conn, make([]byte, bulk)); err == nil {
					_, _ = io.WriteString(conn, greeting)
				}
			}()
		}
	}()
}

// bulk exceeds the size of a packet, so that a wrong MTU fails the test.
const bulk = 100_000

// call connects from a network namespace and returns the greeting.
func call(ns netns.NsHandle, address string, patience time.Duration) (string, error) {
	var answer []byte
	err := in(ns, func() error {
		conn, err := net.DialTimeout("tcp", address, patience)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := conn.Write(make([]byte, bulk)); err != nil {
			return err
		}
		answer, err = io.ReadAll(conn)
		return err
	})
	return string(answer), err
}

func (r *rack) reaches(what string, ns netns.NsHandle, address, greeting string) {
	r.Helper()
	if got, err := call(ns, address, time.Minute); got != greeting {
		r.Errorf("%s: got %q, %v, want an answer from %q", what, got, err, greeting)
	}
}

// blocked expects no answer. It waits less than a second, because an answer takes milliseconds.
func (r *rack) blocked(what string, ns netns.NsHandle, address string) {
	r.Helper()
	if got, err := call(ns, address, 700*time.Millisecond); err == nil {
		r.Errorf("%s: got an answer from %q", what, got)
	}
}

var rackNetwork = Network{
	ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/demo", Overlay: &Overlay{VNI: 5000, MTU: 1400},
}

// twoBoxes creates two boxes with one machine each.
func twoBoxes(t *testing.T, ipv6 bool) (r *rack, a, b *rackBox, onA, onB netns.NsHandle) {
	r = newRack(t, ipv6)
	a, b = r.add(), r.add()
	r.ensure(rackNetwork, a, b)
	onA = r.machine(a, rackNetwork, "m-a", "10.231.7.10", "fd00:7::10")
	onB = r.machine(b, rackNetwork, "m-b", "10.231.7.20", "fd00:7::20")
	r.peers(rackNetwork, Peers{Machines: []Peer{peer(a, "10.231.7.10", "fd00:7::10"), peer(b, "10.231.7.20", "fd00:7::20")}}, a, b)
	return r, a, b, onA, onB
}

// Machines of one cluster on two boxes are in one network.
func TestOverlay(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for _, underlay := range []string{"IPv4", "IPv6"} {
		t.Run(underlay, func(t *testing.T) {
			r, a, b, onA, onB := twoBoxes(t, underlay == "IPv6")
			r.unknownStaysLocal(a, onA)
			r.ensureKeepsTunnel(a, rackNetwork)
			r.serve(onA, ":80", "a")
			r.serve(onB, ":80", "b")
			r.reaches("IPv4", onA, "10.231.7.20:80", "b")
			r.reaches("IPv4, the other direction", onB, "10.231.7.10:80", "a")
			r.reaches("IPv6", onA, "[fd00:7::20]:80", "b")
			r.reaches("IPv6, the other direction", onB, "[fd00:7::10]:80", "a")

			r.must(in(onA, func() error {
				link, err := netlink.LinkByName(Interface)
				if err == nil && link.Attrs().MTU != rackNetwork.Overlay.MTU {
					t.Errorf("the machine has an MTU of %d, want %d", link.Attrs().MTU, rackNetwork.Overlay.MTU)
				}
				return err
			}))

			// A load balancer connects from its box.
			r.reaches("box to the machine of another box", a.ns, "10.231.7.20:80", "b")
			r.reaches("box to its own machine", a.ns, "10.231.7.10:80", "a")
			r.reaches("box to the machine of another box, the other direction", b.ns, "10.231.7.10:80", "a")

			// Pods have addresses behind their machine, to which other machines have a route.
			r.must(in(onB, func() error {
				return connect("lo", netip.MustParsePrefix("10.244.1.5/32"), netip.MustParsePrefix("10.244.1.0/24"), netip.Addr{})
			}))
			r.must(in(onA, func() error {
				return connect(Interface, netip.Prefix{}, netip.MustParsePrefix("10.244.1.0/24"), netip.MustParseAddr("10.231.7.20"))
			}))
			r.reaches("machine to a Pod", onA, "10.244.1.5:80", "b")

			r.gatewayIsLocal(a, b, onA, onB)
			r.otherClusterIsolated(a, b)
		})
	}
}

// Machines with IPv6 only on two boxes reach each other, also while the tunnel is IPv4. Load balancers reach both machines, and
// the machines reach the load balancer of their own box.
func TestOverlayIPv6Only(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for _, underlay := range []string{"IPv4", "IPv6"} {
		t.Run(underlay, func(t *testing.T) {
			r := newRack(t, underlay == "IPv6")
			a, b := r.add(), r.add()
			n := Network{ID: "n", CIDR: "fd00:7::/64", Cluster: "default/demo", Overlay: rackNetwork.Overlay}
			r.ensure(n, a, b)
			onA, onB := r.machine(a, n, "m-a", "fd00:7::10"), r.machine(b, n, "m-b", "fd00:7::20")
			r.peers(n, Peers{Machines: []Peer{peer(a, "fd00:7::10"), peer(b, "fd00:7::20")}}, a, b)
			r.serve(onA, ":80", "a")
			r.serve(onB, ":80", "b")
			r.reaches("machine to the machine of another box", onA, "[fd00:7::20]:80", "b")
			r.reaches("box to the machine of another box", a.ns, "[fd00:7::20]:80", "b")
			r.reaches("box to its own machine", a.ns, "[fd00:7::10]:80", "a")
			r.reaches("box to the machine of another box, the other direction", b.ns, "[fd00:7::10]:80", "a")

			r.serve(a.ns, ":6443", "gateway a")
			r.serve(b.ns, ":6443", "gateway b")
			r.reaches("gateway", onA, "[fd00:7::1]:6443", "gateway a")
			r.reaches("gateway", onB, "[fd00:7::1]:6443", "gateway b")
			for _, box := range []*rackBox{a, b} {
				r.must(in(box.ns, func() error {
					if whole, err := box.hasOverlay(box.network(n)); err != nil || !whole {
						t.Errorf("the tunnel of %s is incomplete: %v", box.HostID, err)
					}
					return nil
				}))
			}
		})
	}
}

// gatewayIsLocal: all boxes have the same gateway address. Each machine reaches the gateway on its own box.
func (r *rack) gatewayIsLocal(a, b *rackBox, onA, onB netns.NsHandle) {
	r.serve(a.ns, ":6443", "gateway a")
	r.serve(b.ns, ":6443", "gateway b")
	for _, gateway := range []string{"10.231.7.1:6443", "[fd00:7::1]:6443"} {
		r.reaches("gateway", onA, gateway, "gateway a")
		r.reaches("gateway", onB, gateway, "gateway b")
	}
	// Connections to an endpoint on another box go to the load balancer on the machine's box.
	endpoint := netip.AddrPortFrom(b.tunnel, 6443)
	r.reaches("endpoint without a redirection", a.ns, endpoint.String(), "gateway b")
	to := netip.MustParseAddrPort("10.231.7.1:6443")
	if r.ipv6 {
		to = netip.MustParseAddrPort("[fd00:7::1]:6443")
	}
	r.must(in(a.ns, func() error { return a.Redirect(r.Context(), "n", Redirect{Balancer: "n", Endpoint: endpoint, To: to}) }))
	r.reaches("endpoint", onA, endpoint.String(), "gateway a")
	r.reaches("endpoint from the box itself", a.ns, endpoint.String(), "gateway b")
	r.must(in(a.ns, func() error { return a.Redirect(r.Context(), "n", Redirect{Balancer: "n"}) }))
	r.reaches("endpoint after the redirection", onA, endpoint.String(), "gateway b")
}

// unknownStaysLocal: requests for unknown addresses, and multicast, do not enter the tunnel. No connection has used it yet.
func (r *rack) unknownStaysLocal(a *rackBox, onA netns.NsHandle) {
	var wire int
	r.must(in(a.ns, func() (err error) { wire, err = listenRaw(TunnelName("n")); return err }))
	defer func() { _ = unix.Close(wire) }()
	r.must(in(onA, func() error {
		for _, unknown := range []string{"10.231.7.99:9", "[fd00:7::99]:9", "224.0.0.251:9", "10.231.7.20:9"} { // The last address is known.
			conn, err := net.Dial("udp", unknown)
			if err != nil {
				return err
			}
			if _, err := conn.Write([]byte("x")); err != nil {
				return err
			}
			_ = conn.Close()
		}
		return nil
	}))
	known, machine := MAC("n", "10.231.7.20"), MAC("n", "10.231.7.10")
	for {
		frame := make([]byte, 2000)
		n, _, err := unix.Recvfrom(wire, frame, 0)
		if err == nil && !bytes.Equal(frame[6:12], machine) {
			continue // Multicast of the box itself, for which the VXLAN device has no entry.
		}
		if err != nil || !bytes.Equal(frame[:6], known) {
			r.Errorf("the first frame in the tunnel is %x, %v, want one for the known machine %s", frame[:max(0, n)], err, known)
		}
		return
	}
}

// ensureKeepsTunnel: connections of machines must not break when another machine of the network is created.
func (r *rack) ensureKeepsTunnel(a *rackBox, n Network) {
	r.Helper()
	r.must(in(a.ns, func() error {
		before, err := findTunnel("n")
		if err != nil {
			return err
		}
		if err := a.Ensure(r.Context(), a.network(n)); err != nil {
			return err
		}
		if whole, err := a.hasOverlay(a.encrypt(a.network(n))); err != nil || !whole {
			r.Errorf("Ensure left an incomplete tunnel: %v", err)
		}
		after, err := findTunnel("n")
		if after != before {
			r.Errorf("Ensure replaced the tunnel %v by %v", before, after)
		}
		return err
	}))
}

// listenRaw receives all frames of a device.
func listenRaw(device string) (int, error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return 0, err
	}
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		return 0, err
	}
	return fd, errors.Join(
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}),
	)
}

// otherClusterIsolated: another cluster on the same boxes does not reach the machines of this one.
func (r *rack) otherClusterIsolated(a, b *rackBox) {
	other := Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "other/demo", Overlay: &Overlay{VNI: 5001, MTU: 1400}}
	r.ensure(other, a, b)
	stranger := r.machine(a, other, "m-x", "10.231.8.10")
	far := r.machine(b, other, "m-y", "10.231.8.20")
	r.peers(other, Peers{Machines: []Peer{peer(a, "10.231.8.10"), peer(b, "10.231.8.20")}}, a, b)
	r.serve(far, ":80", "far")
	r.reaches("machines of the other cluster", stranger, "10.231.8.20:80", "far")
	r.blocked("machine of another cluster on the box", stranger, "10.231.7.10:80")
	r.blocked("machine of another cluster on another box", stranger, "10.231.7.20:80")
	duplicate := b.network(Network{ID: "third", CIDR: "10.231.9.0/24", Cluster: "other/third", Overlay: &Overlay{VNI: 5000, MTU: 1400}})
	if err := in(b.ns, func() error { return b.Ensure(r.Context(), duplicate) }); err == nil || !strings.Contains(err.Error(), "VNI 5000 belongs to another cluster") {
		r.Errorf("a network with the VNI of another one: %v", err)
	}
}

// frameSource is the MAC address of the sender in frame.
var frameSource = []byte{0x02, 0xca, 9, 9, 9, 9}

// frame returns a VXLAN packet with a UDP packet from one machine to another.
func frame(vni uint32, toMAC net.HardwareAddr, from, to netip.Addr, port uint16) []byte {
	udp := binary.BigEndian.AppendUint16(nil, 1)
	udp = binary.BigEndian.AppendUint16(udp, port)
	udp = append(binary.BigEndian.AppendUint16(udp, 8+1), 0, 0, 'x') // No checksum.
	ip := append([]byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice()...)
	ip = append(ip, to.AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	vxlan := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8)
	return slices.Concat(vxlan, toMAC, frameSource, []byte{8, 0}, ip, udp)
}

func checksum(header []byte) uint16 {
	var sum uint32
	for i := 0; i < len(header); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// Only the boxes of a network can send packets into it. Packets from other addresses and from machines are dropped, even with
// the address of a box.
func TestInjection(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, b, onA, onB := twoBoxes(t, false)
	c := r.add()
	local := Network{ID: "local", CIDR: "10.231.8.0/24", Cluster: "other/local"}
	r.ensure(local, b, c)
	onBox := r.machine(b, local, "m-x", "10.231.8.10")
	elsewhere := r.machine(c, local, "m-y", "10.231.8.10")

	var receiver net.PacketConn
	r.must(in(onB, func() (err error) { receiver, err = net.ListenPacket("udp", "10.231.7.20:9"); return err }))
	defer func() { _ = receiver.Close() }()
	packet := frame(5000, MAC("n", "10.231.7.20"), netip.MustParseAddr("10.231.7.66"), netip.MustParseAddr("10.231.7.20"), 9)
	received := func(within time.Duration) bool {
		r.must(receiver.SetReadDeadline(time.Now().Add(within)))
		_, _, err := receiver.ReadFrom(make([]byte, 10))
		return err == nil
	}
	send := func(ns netns.NsHandle, source netip.Addr) {
		r.must(in(ns, func() error { return sendFrom(source, b.tunnel, packet) }))
	}

	send(a.ns, a.tunnel)
	if !received(10 * time.Second) {
		t.Fatal("the packet of a box of the network was not accepted: this test proves nothing")
	}
	r.must(in(b.ns, func() error {
		tunnel, err := findTunnel("n")
		if err != nil {
			return err
		}
		have, err := tunnel.entries()
		if _, learned := have[entry{portTable, net.HardwareAddr(frameSource).String()}]; learned {
			t.Error("the bridge learned a MAC address from the tunnel: another box can take the address of a machine")
		}
		return err
	}))
	for what, from := range map[string]struct {
		ns     netns.NsHandle
		source netip.Addr
	}{
		"foreign box":             {c.ns, c.tunnel},
		"machine of the box":      {onBox, a.tunnel},
		"machine of another box":  {elsewhere, a.tunnel},
		"machine of the cluster":  {onA, a.tunnel},
		"machine on the same box": {onB, a.tunnel},
	} {
		send(from.ns, from.source)
		if received(500 * time.Millisecond) {
			t.Errorf("%s: its packet reached the machine", what)
		}
	}
}

// sendFrom sends a UDP packet to the port of tunnels, with any source address.
func sendFrom(source, to netip.Addr, payload []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	udp := binary.BigEndian.AppendUint16(nil, 12345)
	udp = binary.BigEndian.AppendUint16(udp, tunnelPort)
	udp = append(binary.BigEndian.AppendUint16(udp, uint16(8+len(payload))), 0, 0)
	ip := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, source.AsSlice()...)
	packet := slices.Concat(ip, to.AsSlice(), udp, payload)
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.As4()})
}

// A tunnel and its entries are restored after another program removed them. All of them are removed with the network.
func TestGuardOverlays(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, b, onA, onB := twoBoxes(t, false)
	r.serve(onB, ":80", "b")
	ctx, cancel := context.WithCancel(t.Context())
	mended, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		_ = in(a.ns, func() error { a.GuardLinks(ctx, slog.New(warningHandler{slog.DiscardHandler, mended})); return nil })
	}()
	r.reaches("before", onA, "10.231.7.20:80", "b")
	mac := MAC("n", "10.231.7.20")
	for name, harm := range map[string]func(t tunnel) error{
		"device":      func(tunnel) error { return deleteLink(TunnelName("n")) },
		"entry":       func(t tunnel) error { return t.remove(entry{tunnelTable, mac.String()}, b.tunnel.String()) },
		"port":        func(t tunnel) error { return t.remove(entry{portTable, mac.String()}, "") },
		"neighbour":   func(t tunnel) error { return t.remove(entry{neighbourTable, "10.231.7.20"}, mac.String()) },
		"down":        func(tunnel) error { return ip("link", "set", TunnelName("n"), "down") },
		"bridge down": func(tunnel) error { return ip("link", "set", BridgeName("n"), "down") },
		"gateway":     func(tunnel) error { return ip("addr", "del", "10.231.7.1/24", "dev", BridgeName("n")) },
		"own address": func(tunnel) error {
			return ip("addr", "del", rackNetwork.hostAddress(a.tunnel).String()+"/32", "dev", BridgeName("n"))
		},
	} {
		r.must(in(a.ns, func() error {
			t, err := findTunnel("n")
			if err != nil {
				return err
			}
			return harm(t)
		}))
		select {
		case <-mended:
		case <-time.After(time.Minute):
			t.Fatalf("%s: the tunnel was not restored", name)
		}
		r.reaches("after the removal of the "+name, onA, "10.231.7.20:80", "b")
	}
	cancel()
	<-ended

	r.must(in(a.ns, func() error { return a.Release(t.Context(), "n") }))
	r.must(in(a.ns, func() error {
		links, err := netlink.LinkList()
		for _, link := range links {
			if name := link.Attrs().Name; name == TunnelName("n") || name == BridgeName("n") {
				t.Errorf("%s still exists", name)
			}
		}
		if strings.Contains(nft(t, "list", "ruleset"), TableName("n")) {
			t.Error("the rules still exist")
		}
		return err
	}))
	if _, err := os.Stat(a.dir("n")); err == nil {
		t.Error("the record still exists")
	}
}

// A machine that moves to this box has its address at once, although the list of peers still names another box. After the
// machine leaves, the list applies again.
func TestMovedMachine(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, _, onA, onB := twoBoxes(t, false)
	r.serve(onB, ":80", "b")
	r.reaches("on the other box", onA, "10.231.7.20:80", "b")
	moved := r.machine(a, rackNetwork, "m-b2", "10.231.7.20", "fd00:7::20")
	r.serve(moved, ":80", "moved")
	r.reaches("on this box", onA, "10.231.7.20:80", "moved")
	r.must(in(a.ns, func() error {
		if err := a.Unplug("m-b2"); err != nil {
			return err
		}
		return a.Unlease("n", "m-b2")
	}))
	r.reaches("back on the other box", onA, "10.231.7.20:80", "b")
	r.peers(rackNetwork, Peers{Machines: []Peer{peer(a, "10.231.7.10", "fd00:7::10")}}, a)
	r.blocked("removed from the peers", onA, "10.231.7.20:80")
}
