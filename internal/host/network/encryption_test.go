package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/cidr"
	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// TestMain runs the process of a WireGuard device, as capstand does: Link starts its own program.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "wireguard" {
		flags := flag.NewFlagSet("wireguard", flag.ExitOnError)
		key, uid := flags.String("key", "", ""), flags.Int("uid", 0, "")
		_ = flags.Parse(os.Args[2:])
		if err := wireguard.Serve(*key, *uid, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
			panic(err)
		}
		return
	}
	os.Exit(m.Run())
}

// encrypted gives a box a key and a link.
func (r *rack) encrypted(b *rackBox) *rackBox {
	r.Helper()
	file := filepath.Join(b.HostRoot, "wireguard.key")
	private, err := wireguard.EnsureKey(file)
	r.must(err)
	b.Link = &wireguard.Link{KeyFile: file, Public: private.PublicKey(), Dir: filepath.Join(b.Dir, "wireguard"), UID: 65534}
	r.Cleanup(func() { r.must(in(b.ns, b.Link.Remove)) })
	return b
}

// keys are the keys of boxes.
func keys(boxes ...*rackBox) map[netip.Addr]string {
	all := map[netip.Addr]string{}
	for _, b := range boxes {
		all[b.tunnel] = b.Link.Public.String()
	}
	return all
}

// encryptedNetwork has the largest packets that fit into those of the cables, which have 1500 bytes.
func (r *rack) encryptedNetwork() Network {
	n := rackNetwork
	n.Overlay = &Overlay{VNI: 5000, MTU: 1370}
	if r.ipv6 {
		n.Overlay.MTU = 1350
	}
	return n
}

// encryptedBoxes creates two boxes with one machine each, and an encrypted overlay.
func encryptedBoxes(t *testing.T, ipv6 bool) (r *rack, a, b *rackBox, onA, onB netns.NsHandle) {
	r = newRack(t, ipv6)
	a, b = r.encrypted(r.add()), r.encrypted(r.add())
	n := r.encryptedNetwork()
	r.ensure(n, a, b)
	onA = r.machine(a, n, "m-a", "10.231.7.10", "fd00:7::10")
	onB = r.machine(b, n, "m-b", "10.231.7.20", "fd00:7::20")
	r.peers(n, Peers{Machines: []Peer{peer(a, "10.231.7.10", "fd00:7::10"), peer(b, "10.231.7.20", "fd00:7::20")}, Keys: keys(a, b)}, a, b)
	return r, a, b, onA, onB
}

// The link of a box belongs to the capstand that has encrypted networks. Another capstand of the box, with another key, leaves it alone.
func TestLinkOfAnotherCapstand(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, _, onA, onB := encryptedBoxes(t, false)
	file := filepath.Join(t.TempDir(), "wireguard.key")
	private, err := wireguard.EnsureKey(file)
	r.must(err)
	other := a.Box
	other.Link = &wireguard.Link{KeyFile: file, Public: private.PublicKey(), Dir: a.Link.Dir, UID: a.Link.UID}
	r.must(in(a.ns, other.syncLink))
	for key, link := range map[bool]*wireguard.Link{true: a.Link, false: other.Link} {
		r.must(in(a.ns, func() error {
			if whole, err := link.Whole(); err != nil || whole != key {
				return fmt.Errorf("expected the link to have the key of its capstand %v, found %v, %w", key, whole, err)
			}
			return nil
		}))
	}
	r.serve(onB, ":80", "greeting of b")
	r.reaches("the other box", onA, "10.231.7.20:80", "greeting of b")
}

// Machines of one cluster on two boxes reach each other, and the cable between the boxes carries WireGuard only.
func TestEncryptedOverlay(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for _, underlay := range []string{"IPv4", "IPv6"} {
		t.Run(underlay, func(t *testing.T) {
			r, a, b, onA, onB := encryptedBoxes(t, underlay == "IPv6")
			var wire int
			r.must(in(r.router, func() (err error) { wire, err = listenRaw("port1"); return err }))
			defer func() { _ = unix.Close(wire) }()
			r.serve(onA, ":80", "greeting of a")
			r.serve(onB, ":80", "greeting of b")
			r.reaches("IPv4", onA, "10.231.7.20:80", "greeting of b")
			r.reaches("IPv4, the other direction", onB, "10.231.7.10:80", "greeting of a")
			r.reaches("IPv6", onA, "[fd00:7::20]:80", "greeting of b")
			r.reaches("box to the machine of another box", a.ns, "10.231.7.20:80", "greeting of b")
			r.must(in(onB, func() error {
				return connect("lo", netip.MustParsePrefix("10.244.1.5/32"), netip.MustParsePrefix("10.244.1.0/24"), netip.Addr{})
			}))
			r.must(in(onA, func() error {
				return connect(Interface, netip.Prefix{}, netip.MustParsePrefix("10.244.1.0/24"), netip.MustParseAddr("10.231.7.20"))
			}))
			r.reaches("machine to a Pod", onA, "10.244.1.5:80", "greeting of b")
			r.onlyWireGuard(wire)
			r.ensureKeepsTunnel(a, r.encryptedNetwork())
			r.linkFits(a)
			r.linkIsClosed(a, b, onA)
			r.otherClusterEncrypted(a, b)
		})
	}
}

// onlyWireGuard: all UDP and TCP packets on a cable are those of WireGuard.
func (r *rack) onlyWireGuard(wire int) {
	r.Helper()
	var sealed int
	for frame := make([]byte, 1<<16); ; {
		n, _, err := unix.Recvfrom(wire, frame, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		r.must(err)
		protocol, payload := transport(frame[:n])
		switch {
		case bytes.Contains(frame[:n], []byte("greeting")):
			r.Errorf("the text of a machine is readable on the cable: %x", frame[:n])
		case protocol == unix.IPPROTO_UDP && binary.BigEndian.Uint16(payload[2:]) == wireguard.Port:
			sealed++
		case protocol == unix.IPPROTO_UDP, protocol == unix.IPPROTO_TCP:
			r.Errorf("a packet on the cable is not WireGuard: %x", frame[:n])
		}
	}
	if sealed < 10 {
		r.Errorf("only %d packets of WireGuard on the cable", sealed)
	}
}

// transport returns the protocol and the UDP or TCP packet of a frame.
func transport(frame []byte) (protocol byte, payload []byte) {
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
		return frame[14+9], frame[14+20:]
	case unix.ETH_P_IPV6:
		return frame[14+6], frame[14+40:]
	}
	return 0, nil
}

// linkIsClosed: the link carries VXLAN only, and a machine cannot send into it.
func (r *rack) linkIsClosed(a, b *rackBox, onA netns.NsHandle) {
	r.Helper()
	inside := netip.AddrPortFrom(wireguard.Address(b.Link.Public), 7777)
	r.serve(b.ns, inside.String(), "box b")
	r.reaches("the box itself", b.ns, inside.String(), "box b")
	r.blocked("another box through the link", a.ns, inside.String())
	var link int
	r.must(in(a.ns, func() (err error) { link, err = listenRaw(wireguard.Device); return err }))
	defer func() { _ = unix.Close(link) }()
	r.blocked("a machine through the link", onA, inside.String())
	for packet := make([]byte, 1<<16); ; { // A packet of the device has no Ethernet header.
		n, _, err := unix.Recvfrom(link, packet, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		r.must(err)
		if packet[6] == unix.IPPROTO_TCP {
			r.Errorf("a packet of a machine entered the link: %x", packet[:n])
		}
	}
}

// linkFits: a packet of a machine fits into the link, and the packet of the link into one of the cable.
func (r *rack) linkFits(b *rackBox) {
	r.Helper()
	want := 1440
	if r.ipv6 {
		want = 1420
	}
	r.must(in(b.ns, func() error {
		link, err := netlink.LinkByName(wireguard.Device)
		if err == nil && link.Attrs().MTU != want {
			r.Errorf("the link has an MTU of %d, want %d", link.Attrs().MTU, want)
		}
		return err
	}))
}

// otherClusterEncrypted: a second cluster uses the same link, and is isolated.
func (r *rack) otherClusterEncrypted(a, b *rackBox) {
	other := Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "other/demo", Overlay: &Overlay{VNI: 5001, MTU: 1300}}
	r.ensure(other, a, b)
	stranger := r.machine(a, other, "m-x", "10.231.8.10")
	far := r.machine(b, other, "m-y", "10.231.8.20")
	r.peers(other, Peers{Machines: []Peer{peer(a, "10.231.8.10"), peer(b, "10.231.8.20")}, Keys: keys(a, b)}, a, b)
	r.serve(far, ":80", "far")
	r.reaches("machines of the other cluster", stranger, "10.231.8.20:80", "far")
	r.blocked("machine of another cluster on another box", stranger, "10.231.7.20:80")
	for _, box := range []*rackBox{a, b} {
		r.must(in(box.ns, func() error { return box.Release(r.Context(), "other") }))
	}
}

// While the folder of an encrypted network is damaged, its machines keep the link and their other boxes.
func TestDamagedFolderKeepsLink(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, _, onA, onB := encryptedBoxes(t, false)
	r.serve(onB, ":80", "b")
	hosts := filepath.Join(a.dir("n"), "hosts")
	r.must(errors.Join(os.WriteFile(filepath.Join(a.dir("n"), "network.json"), nil, 0o600), os.RemoveAll(hosts), os.WriteFile(hosts, nil, 0o600)))
	r.ensure(Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "other/demo", Overlay: &Overlay{VNI: 5001, MTU: 1300}}, a)
	r.reaches("after another network came", onA, "10.231.7.20:80", "b")
	r.must(in(a.ns, func() error { return a.Release(t.Context(), "other") }))
	r.reaches("after the other network went", onA, "10.231.7.20:80", "b")
}

// With encryption, only boxes with a key of the network can send packets into it, whatever the source address.
func TestEncryptedInjection(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, b, _, onB := encryptedBoxes(t, false)
	c := r.add()
	var receiver net.PacketConn
	r.must(in(onB, func() (err error) { receiver, err = net.ListenPacket("udp", "10.231.7.20:9"); return err }))
	defer func() { _ = receiver.Close() }()
	received := func(within time.Duration) bool {
		r.must(receiver.SetReadDeadline(time.Now().Add(within)))
		_, _, err := receiver.ReadFrom(make([]byte, 10))
		return err == nil
	}
	packet := frame(5000, MAC("n", "10.231.7.20"), netip.MustParseAddr("10.231.7.66"), netip.MustParseAddr("10.231.7.20"), 9)
	fromA, toB := wireguard.Address(a.Link.Public), wireguard.Address(b.Link.Public)

	r.must(in(a.ns, func() error { return sendUDP(fromA, netip.AddrPortFrom(toB, tunnelPort), packet) }))
	if !received(10 * time.Second) {
		t.Fatal("the packet of a box of the network was not accepted through the link: this test proves nothing")
	}
	if err := in(a.ns, func() error { return sendFrom(a.tunnel, b.tunnel, packet) }); !errors.Is(err, unix.EPERM) {
		t.Errorf("a packet of the network beside the link: %v, want the refusal of the firewall", err)
	}
	for what, send := range map[string]func() error{
		"a foreign box": func() error {
			return in(c.ns, func() error { return sendFrom(c.tunnel, b.tunnel, packet) })
		},
		"a foreign box with the address of a box": func() error {
			return in(c.ns, func() error { return sendFrom(a.tunnel, b.tunnel, packet) })
		},
		"a neighbour with the address in the link of a box": func() error {
			return in(r.router, func() error { return sendFrame("port2", b, fromA, toB, packet) })
		},
	} {
		r.must(send())
		if received(500 * time.Millisecond) {
			t.Errorf("%s: its packet reached the machine", what)
		}
	}
}

// sendUDP sends a packet from an address of the box.
func sendUDP(from netip.Addr, to netip.AddrPort, payload []byte) error {
	conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(to))
	if err != nil {
		return err
	}
	_, err = conn.Write(payload)
	return errors.Join(err, conn.Close())
}

// sendFrame sends an IPv6 packet to the uplink of a box, with any addresses.
func sendFrame(port string, b *rackBox, from, to netip.Addr, payload []byte) error {
	link, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	var uplink netlink.Link
	if err := in(b.ns, func() (err error) { uplink, err = netlink.LinkByName("uplink"); return err }); err != nil {
		return err
	}
	udp := binary.BigEndian.AppendUint16(nil, 12345)
	udp = binary.BigEndian.AppendUint16(udp, tunnelPort)
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(payload)))
	udp = slices.Concat(udp, []byte{0, 0}, payload)
	pseudo := slices.Concat(from.AsSlice(), to.AsSlice(), []byte{0, 0, 0, byte(len(udp)), 0, 0, 0, unix.IPPROTO_UDP}, udp)
	if len(pseudo)%2 == 1 {
		pseudo = append(pseudo, 0)
	}
	binary.BigEndian.PutUint16(udp[6:], checksum(pseudo))
	ip := slices.Concat([]byte{0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64}, from.AsSlice(), to.AsSlice(), udp)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ethernet := slices.Concat(uplink.Attrs().HardwareAddr, link.Attrs().HardwareAddr, []byte{0x86, 0xdd}, ip)
	return unix.Sendto(fd, ethernet, 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index, Halen: 6})
}

// A box with another key than the recorded one is no member of the network.
func TestWrongKey(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r := newRack(t, false)
	a, b, other := r.encrypted(r.add()), r.encrypted(r.add()), r.encrypted(r.add())
	n := r.encryptedNetwork()
	r.ensure(n, a, b)
	onA, onB := r.machine(a, n, "m-a", "10.231.7.10"), r.machine(b, n, "m-b", "10.231.7.20")
	r.serve(onB, ":80", "b")
	all := Peers{Machines: []Peer{peer(a, "10.231.7.10"), peer(b, "10.231.7.20")}, Keys: keys(a, b)}
	r.peers(n, all, a)
	all.Keys[a.tunnel] = other.Link.Public.String()
	r.peers(n, all, b)
	r.blocked("a box with another key", onA, "10.231.7.20:80")
	all.Keys = keys(a, b)
	r.peers(n, all, b)
	r.reaches("a box with its key", onA, "10.231.7.20:80", "b")
}

// A capstand that starts again keeps the device and its sessions: a connection continues.
func TestRestartKeepsLink(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, b, onA, onB := encryptedBoxes(t, false)
	var listener net.Listener
	r.must(in(onB, func() (err error) { listener, err = net.Listen("tcp", ":80"); return err }))
	defer func() { _ = listener.Close() }()
	go func() {
		if conn, err := listener.Accept(); err == nil {
			_, _ = io.Copy(conn, conn)
		}
	}()
	var conn net.Conn
	r.must(in(onA, func() (err error) { conn, err = net.Dial("tcp", "10.231.7.20:80"); return err }))
	defer func() { _ = conn.Close() }()
	echo := func() {
		r.must(conn.SetDeadline(time.Now().Add(5 * time.Second)))
		_, err := conn.Write([]byte("x"))
		r.must(err)
		_, err = io.ReadFull(conn, make([]byte, 1))
		r.must(err)
	}
	echo()
	before, _ := os.ReadFile(filepath.Join(a.Link.Dir, "process.json"))
	var wire int
	r.must(in(r.router, func() (err error) { wire, err = listenRaw("port1"); return err }))
	defer func() { _ = unix.Close(wire) }()

	link := *a.Link
	a.Link = &link // What a new capstand knows.
	r.ensure(r.encryptedNetwork(), a)
	r.peers(r.encryptedNetwork(), Peers{Machines: []Peer{peer(a, "10.231.7.10", "fd00:7::10"), peer(b, "10.231.7.20", "fd00:7::20")}, Keys: keys(a, b)}, a)
	echo()
	if after, _ := os.ReadFile(filepath.Join(a.Link.Dir, "process.json")); !bytes.Equal(after, before) {
		t.Errorf("the process %s became %s", before, after)
	}
	for frame := make([]byte, 1<<16); ; {
		n, _, err := unix.Recvfrom(wire, frame, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		r.must(err)
		const handshake = 1 // the first byte of a message that begins a handshake
		if protocol, payload := transport(frame[:n]); protocol == unix.IPPROTO_UDP && payload[8] == handshake {
			t.Error("the restart began another session")
		}
	}
}

// The device of a process that ends, or that another program removes, is replaced. Without the link, nothing leaves in plain.
func TestGuardLink(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, a, _, onA, onB := encryptedBoxes(t, false)
	r.serve(onB, ":80", "b")
	r.reaches("before", onA, "10.231.7.20:80", "b")
	var before proc.Ref
	if err := atomicfile.ReadJSON(filepath.Join(a.Link.Dir, "process.json"), &before); errors.Is(err, os.ErrNotExist) {
		t.Log("this kernel has WireGuard: no process to kill")
	} else {
		r.must(err)
		r.must(syscall.Kill(before.PID, syscall.SIGKILL))
	}
	r.must(in(a.ns, func() error { return removed(wireguard.Device) }))
	var wire int
	r.must(in(r.router, func() (err error) { wire, err = listenRaw("port1"); return err }))
	defer func() { _ = unix.Close(wire) }()
	r.must(in(a.ns, func() error { // As on a host with IPv6.
		return connect("uplink", netip.Prefix{}, cidr.EncryptedLink, netip.Addr{})
	}))
	r.blocked("without the link", onA, "10.231.7.20:80")
	r.silent(wire)

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	start := time.Now()
	go func() {
		defer close(ended)
		_ = in(a.ns, func() error { a.GuardLinks(ctx, slog.New(slog.DiscardHandler)); return nil })
	}()
	r.reaches("after the repair", onA, "10.231.7.20:80", "b")
	t.Logf("reached again %s after the guard noticed", time.Since(start).Round(time.Millisecond))
	r.must(in(a.ns, func() error {
		link, err := netlink.LinkByName(wireguard.Device)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		return err
	}))
	r.reaches("after a removal", onA, "10.231.7.20:80", "b")
	cancel()
	<-ended

	var after proc.Ref
	if err := atomicfile.ReadJSON(filepath.Join(a.Link.Dir, "process.json"), &after); err == nil && !appends(t, after.PID) {
		t.Error("the process does not append to its log: the log keeps its size when capstand truncates it")
	}
	r.must(in(a.ns, func() error { return a.Release(t.Context(), "n") }))
	r.must(in(a.ns, func() error { return removed(wireguard.Device) }))
	if after.Alive() {
		t.Error("the process of the device outlives the last network")
	}
}

// removed waits until a device is gone.
func removed(name string) error {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		_, err := netlink.LinkByName(name)
		if isNoLink(err) {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(err, errors.New(name+" still exists"))
		}
	}
}

// silent: a cable has carried no VXLAN packet.
func (r *rack) silent(wire int) {
	r.Helper()
	for frame := make([]byte, 1<<16); ; {
		n, _, err := unix.Recvfrom(wire, frame, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		r.must(err)
		if protocol, payload := transport(frame[:n]); protocol == unix.IPPROTO_UDP && binary.BigEndian.Uint16(payload[2:]) == tunnelPort {
			r.Fatalf("a VXLAN packet left the box in plain: %x", frame[:n])
		}
	}
}

// appends returns whether a process appends to its standard error.
func appends(t *testing.T, pid int) bool {
	t.Helper()
	info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/2", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(info), "flags:")
	flags, err := strconv.ParseInt(strings.Fields(after)[0], 8, 64)
	return err == nil && flags&unix.O_APPEND != 0
}
