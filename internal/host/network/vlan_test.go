package network

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

const firstVLAN, secondVLAN = 100, 200

// filter makes the bridge of a namespace separate VLANs, or not. The request of package netlink also contains the name and other properties,
// which Linux 6.1 refuses for a bridge that is up.
func filter(bridge string, on byte) error {
	link, err := netlink.LinkByName(bridge)
	if err != nil {
		return err
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(link.Attrs().Index)
	request.AddData(header)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.IFLA_BR_VLAN_FILTERING, []byte{on})
	request.AddData(info)
	_, err = request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// trunk makes a port, or the bridge itself, carry VLANs with their tags.
func trunk(name string, self bool, vlans ...uint16) error {
	link, err := netlink.LinkByName(name)
	for _, vlan := range vlans {
		err = errors.Join(err, netlink.BridgeVlanAdd(link, vlan, false, false, self, !self))
	}
	return err
}

// inVLANs makes the switch of a LAN separate VLANs, and gives the router a port in the first one. It skips the test if the kernel cannot.
func (l *userLAN) inVLANs() {
	l.Helper()
	if err := in(l.wire, func() error { return filter("switch", 1) }); errors.Is(err, unix.EOPNOTSUPP) {
		l.Skip("this kernel has no CONFIG_BRIDGE_VLAN_FILTERING: run make test-vlan")
	} else if err != nil {
		l.Fatal(err)
	}
	l.must(in(l.wire, func() error { return joined("switch-router", firstVLAN) }))
}

func joined(port string, vlan uint16) error {
	link, err := netlink.LinkByName(port)
	if err == nil {
		_, err = joinVLAN(link, vlan)
	}
	return err
}

// trunkBox adds a box whose bridge has a port with both VLANs.
func (l *userLAN) trunkBox() *rackBox {
	l.Helper()
	b := l.box()
	l.must(in(l.wire, func() error { return trunk("switch-"+b.HostID, false, firstVLAN, secondVLAN) }))
	l.must(in(b.ns, func() error {
		return errors.Join(filter("br-lab", 1), trunk("lan", false, firstVLAN, secondVLAN))
	}))
	return b
}

func vlanNetwork(id string, vlan uint16) Network {
	n := userNetwork(id)
	n.LAN.VLAN = vlan
	return n
}

// Machines in one VLAN of a LAN reach each other and the router of the VLAN. Machines of another cluster in another VLAN of the same bridge
// neither reach them nor receive their frames, even with the same addresses.
func TestVLAN_ALL18(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newUserLAN(t)
	l.inVLANs()
	a, b := l.trunkBox(), l.trunkBox()
	first, second, plain := vlanNetwork("first", firstVLAN), vlanNetwork("second", secondVLAN), userNetwork("plain")
	l.ensure(first, a, b)
	l.ensure(second, a, b)
	l.ensure(plain, a)
	onA, onB := l.machine(a, first, "m-a", lanOwn, "2001:db8:7::10"), l.machine(b, first, "m-b", "198.18.7.20", "2001:db8:7::20")
	other, sameBox := l.machine(b, second, "o-b", "198.18.7.30", "2001:db8:7::30"), l.machine(a, second, "o-a", lanOwn)
	untagged := l.machine(a, plain, "p-a", "198.18.7.40")
	l.serve(onA, ":80", "a")
	l.serve(onB, ":80", "b")
	l.serve(sameBox, ":80", "same box")
	l.serve(l.router, ":80", "router")
	l.reaches("machine on the other box", onA, "198.18.7.20:80", "b")
	l.reaches("machine on the other box, IPv6", onA, "[2001:db8:7::20]:80", "b")
	l.reaches("router", onA, "198.18.7.1:80", "router")
	l.reaches("another cluster with the same address in its VLAN", other, lanOwn+":80", "same box")
	l.blocked("router of another VLAN", other, "198.18.7.1:80")
	l.blocked("machine of another VLAN", other, "198.18.7.20:80")
	l.blocked("machine of another VLAN from one without a VLAN", untagged, "198.18.7.20:80")
	l.silent(onA, map[string]netns.NsHandle{"another VLAN": other, "another VLAN of the box": sameBox, "no VLAN": untagged}, onB)
	l.tagsDropped(onA, first)
	l.vlanAddresses(a, first)
	l.stationOfBox(a, onA, sameBox)
	l.vlansGuarded(a, onA, untagged)
	l.must(in(a.ns, func() error {
		return errors.Join(a.Unplug("m-a"), a.UnleaseAll("m-a"), a.Release(t.Context(), first.ID))
	}))
	l.reaches("the VLAN after the removal", onB, "198.18.7.1:80", "router")
}

// silent: a broadcast of a machine arrives at the last station, and at none of the others.
func (l *userLAN) silent(from netns.NsHandle, others map[string]netns.NsHandle, last netns.NsHandle) {
	l.Helper()
	listen := func(ns netns.NsHandle) (fd int) {
		l.must(in(ns, func() (err error) { fd, err = listenRaw(Interface); return err }))
		return fd
	}
	wires, end := map[string]int{}, listen(last)
	defer func() {
		_ = unix.Close(end)
		for _, wire := range wires {
			_ = unix.Close(wire)
		}
	}()
	for name, ns := range others {
		wires[name] = listen(ns)
	}
	frame := append(lanFrame(broadcast, MAC("first", lanOwn), typeARP, lanARP(1, MAC("first", lanOwn), lanOwn)), "broadcast of the first VLAN"...)
	l.must(in(from, func() error { return sendRaw(frame) }))
	for got := make([]byte, 2000); ; {
		n, _, err := unix.Recvfrom(end, got, 0)
		if err != nil {
			l.Fatalf("the broadcast did not arrive in its own VLAN: %v", err)
		}
		if bytes.Contains(got[:n], []byte("broadcast of the first VLAN")) {
			break
		}
	}
	for name, wire := range wires {
		for got := make([]byte, 2000); ; {
			n, _, err := unix.Recvfrom(wire, got, unix.MSG_DONTWAIT)
			if err != nil {
				break
			}
			if bytes.Contains(got[:n], []byte("broadcast of the first VLAN")) {
				l.Errorf("%s: received the broadcast", name)
			}
		}
	}
}

// tagsDropped: a machine cannot send into another VLAN, or with a tag into its own one.
func (l *userLAN) tagsDropped(machine netns.NsHandle, n Network) {
	l.Helper()
	own, router := MAC(n.ID, lanOwn), net.HardwareAddr{2, 0, 0, 0, 0, 1}
	packet := lanUDP(lanOwn, "198.18.7.1", 7)
	good := lanFrame(router, own, etherIPv4, packet)
	for _, vlan := range []uint16{secondVLAN, firstVLAN} { // The router is in the first one at the end.
		l.must(in(l.wire, func() error { return joined("switch-router", vlan) }))
		for kind, tagged := range map[string][]byte{
			"one tag":          lanFrame(broadcast, own, etherVLAN, []byte{0, byte(vlan), 8, 0}, packet),
			"two tags":         lanFrame(broadcast, own, etherVLAN, []byte{0, firstVLAN, 0x81, 0, 0, byte(vlan), 8, 0}, packet),
			"a tag of 802.1ad": lanFrame(broadcast, own, etherQinQ, []byte{0, byte(vlan), 8, 0}, packet),
		} {
			if vlan == firstVLAN {
				if l.arrives(machine, tagged, good) {
					l.Errorf("%s for VLAN %d arrives", kind, vlan)
				}
				continue
			}
			// The good frame does not arrive in the other VLAN: a station there sends the one that ends it.
			if l.crosses(machine, tagged) {
				l.Errorf("%s for VLAN %d arrives", kind, vlan)
			}
		}
	}
}

// crosses reports whether a frame arrives at the router while its port is in the other VLAN. The frame passes the bridges before sendRaw
// returns, because namespaces deliver frames in the context of the sender; the wait covers a busy receiver.
func (l *userLAN) crosses(machine netns.NsHandle, frame []byte) bool {
	l.Helper()
	var wire int
	l.must(in(l.router, func() (err error) { wire, err = listenRaw("lan"); return err }))
	defer func() { _ = unix.Close(wire) }()
	wait := unix.NsecToTimeval(int64(300 * time.Millisecond))
	l.must(unix.SetsockoptTimeval(wire, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait))
	l.must(in(machine, func() error { return sendRaw(append(frame, "the frame in question"...)) }))
	for got := make([]byte, 2000); ; {
		n, _, err := unix.Recvfrom(wire, got, 0)
		if err != nil {
			return false
		}
		if bytes.Contains(got[:n], []byte("the frame in question")) {
			return true
		}
	}
}

// vlanAddresses: an address is in use if a station of the VLAN has it, and free if one of another VLAN has it. The box needs no address in
// the VLAN, and keeps nothing of the probe.
func (l *userLAN) vlanAddresses(a *rackBox, n Network) {
	l.Helper()
	l.must(in(a.ns, func() error {
		before := links(l.T)
		var inUse InUseError
		for _, address := range []string{"198.18.7.1", "198.18.7.20", lanOwn, "2001:db8:7::20", "2001:db8:7::10"} {
			if err := a.ProbeLAN(l.Context(), *n.LAN, netip.MustParseAddr(address)); !errors.As(err, &inUse) || !strings.Contains(err.Error(), "VLAN 100 of bridge br-lab") {
				l.Errorf("probe of %s: %v, want the station in the VLAN", address, err)
			}
		}
		for _, address := range []string{"198.18.7.30", "198.18.7.40", "198.18.7.50", "2001:db8:7::30", "2001:db8:7::50"} {
			if err := a.ProbeLAN(l.Context(), *n.LAN, netip.MustParseAddr(address)); err != nil {
				l.Errorf("probe of %s, which no station of the VLAN has: %v", address, err)
			}
		}
		if after := links(l.T); after != before {
			l.Errorf("the probes left links: %s, want %s", after, before)
		}
		var conflict ConflictError
		unknown, moved := vlanNetwork("x", 300), vlanNetwork(n.ID, secondVLAN)
		for why, refused := range map[string]Network{"no port of the bridge br-lab of this host carries VLAN 300": unknown, "is on VLAN 100 of bridge br-lab on this box and cannot move to VLAN 200": moved} {
			if err := a.Ensure(l.Context(), refused); !errors.As(err, &conflict) || !strings.Contains(err.Error(), why) {
				l.Errorf("got %v, want %q", err, why)
			}
		}
		if err := addBridge("br-flat"); err != nil {
			return err
		}
		unknown.LAN = &LAN{Bridge: "br-flat", VLAN: firstVLAN}
		if err := a.Ensure(l.Context(), unknown); !errors.As(err, &conflict) || !strings.Contains(err.Error(), "br-flat of this host does not separate VLANs") {
			l.Errorf("a bridge without VLANs: %v", err)
		}
		return deleteLink("br-flat")
	}))
}

// stationOfBox: a box with an address in a VLAN reaches the machines of this VLAN, and they reach the box.
func (l *userLAN) stationOfBox(a *rackBox, machine, other netns.NsHandle) {
	l.Helper()
	const name, address = "br-lab.100", "198.18.7.60"
	l.must(in(a.ns, func() error {
		bridge, err := netlink.LinkByName("br-lab")
		if err != nil {
			return err
		}
		station := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: bridge.Attrs().Index}, VlanId: firstVLAN}
		return errors.Join(
			trunk("br-lab", true, firstVLAN), netlink.LinkAdd(station),
			netlink.AddrAdd(station, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(address).To4(), Mask: net.CIDRMask(24, 32)}}), netlink.LinkSetUp(station),
		)
	}))
	l.serve(a.ns, address+":81", "box")
	l.reaches("machine of the VLAN from the box", a.ns, lanOwn+":80", "a")
	l.reaches("box from a machine of the VLAN", machine, address+":81", "box")
	l.blocked("box from a machine of another VLAN", other, address+":81")
	l.must(in(a.ns, func() error { return deleteLink(name) }))
}

// vlansGuarded: capstand moves the port of a machine back into its VLAN, and disables the port while the bridge does not separate VLANs.
func (l *userLAN) vlansGuarded(a *rackBox, machine, untagged netns.NsHandle) {
	l.Helper()
	log := slog.New(slog.DiscardHandler)
	cable := VethName("m-a")
	change := func(f func(port netlink.Link) error) {
		l.Helper()
		l.must(in(a.ns, func() error {
			port, err := netlink.LinkByName(cable)
			if err == nil {
				err = f(port)
			}
			return errors.Join(err, a.mendVLANs(log))
		}))
	}
	change(func(port netlink.Link) error {
		return netlink.BridgeVlanAdd(port, secondVLAN, false, true, false, true)
	})
	l.must(in(a.ns, func() error {
		vlans, err := netlink.BridgeVlanList()
		port, linkErr := netlink.LinkByName(cable)
		if err = errors.Join(err, linkErr); err == nil && len(vlans[int32(port.Attrs().Index)]) != 1 {
			l.Errorf("the port has the VLANs %v", vlans[int32(port.Attrs().Index)])
		}
		return err
	}))
	change(func(port netlink.Link) error { return netlink.BridgeVlanDel(port, firstVLAN, true, true, false, true) })
	l.reaches("the router after the return of the VLAN", machine, "198.18.7.1:80", "router")
	change(func(port netlink.Link) error { return netlink.BridgeVlanAdd(port, 1, true, true, false, true) })
	l.blocked("a machine without a VLAN after the repair", untagged, lanOwn+":80")
	change(func(netlink.Link) error { return filter("br-lab", 0) })
	l.blocked("a machine without a VLAN while the bridge does not separate VLANs", untagged, lanOwn+":80")
	change(func(netlink.Link) error { return filter("br-lab", 1) })
	l.reaches("the router after the bridge separates VLANs again", machine, "198.18.7.1:80", "router")
	l.must(in(a.ns, func() error {
		before, err := netlink.BridgeVlanList()
		if err != nil {
			return err
		}
		if cut, mended, err := a.mendVLAN(vlanNetwork("first", firstVLAN)); cut || mended || err != nil {
			l.Errorf("no VLAN was wrong: cut %v, mended %v, %v", cut, mended, err)
		}
		after, err := netlink.BridgeVlanList()
		if len(before) != len(after) {
			l.Errorf("the repair changed %v to %v", before, after)
		}
		return err
	}))
}

// The endpoint of a cluster in a VLAN is an address of the interface of this VLAN.
func TestStation(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	if err := addBridge("br-lab"); err != nil {
		t.Fatal(err)
	}
	bridge, err := netlink.LinkByName("br-lab")
	if err != nil {
		t.Fatal(err)
	}
	vlan := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "br-lab.100", ParentIndex: bridge.Attrs().Index}, VlanId: firstVLAN}
	elsewhere := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "eth0.100", ParentIndex: bridge.Attrs().Index + 1}, VlanId: firstVLAN}
	for name, tc := range map[string]struct {
		lan  LAN
		link netlink.Link
		want bool
	}{
		"bridge":                  {LAN{Bridge: "br-lab"}, bridge, true},
		"another bridge":          {LAN{Bridge: "br-x"}, bridge, false},
		"VLAN":                    {LAN{Bridge: "br-lab", VLAN: firstVLAN}, vlan, true},
		"another VLAN":            {LAN{Bridge: "br-lab", VLAN: secondVLAN}, vlan, false},
		"VLAN of another link":    {LAN{Bridge: "br-lab", VLAN: firstVLAN}, elsewhere, false},
		"the bridge, with a VLAN": {LAN{Bridge: "br-lab", VLAN: firstVLAN}, bridge, false},
		"the VLAN, without one":   {LAN{Bridge: "br-lab"}, vlan, false},
	} {
		if got := tc.lan.HasStation(tc.link); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
