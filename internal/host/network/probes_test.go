package network

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A box gets the probes of other boxes, and none that machines, or neighbours of the box, send with the address of another box.
func TestForgedProbes(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for _, underlay := range []string{"IPv4", "IPv6"} {
		for name, cidr := range map[string]string{"IPv4": rackNetwork.CIDR, "IPv6": rackNetwork.IPv6CIDR} {
			t.Run("underlay "+underlay+", machines "+name, func(t *testing.T) { forgeProbes(t, underlay == "IPv6", cidr) })
		}
	}
}

// patience is the time in which a packet arrives.
const patience = 5 * time.Second

func forgeProbes(t *testing.T, ipv6 bool, cidr string) {
	r := newRack(t, ipv6)
	a, b, lost := r.add(), r.add(), r.add()
	n := Network{ID: "n", CIDR: cidr, Cluster: "default/demo", Overlay: rackNetwork.Overlay}
	prefix := netip.MustParsePrefix(cidr).Addr()
	first, second := prefix.Next().Next(), prefix.Next().Next().Next()
	r.ensure(n, a, b)
	onA, onB := r.machine(a, n, "m-a", first.String()), r.machine(b, n, "m-b", second.String())
	r.peers(n, Peers{Machines: []Peer{peer(a, first.String()), peer(b, second.String())}, Hosts: []netip.Addr{lost.tunnel}}, a, b)
	to, from, forged := n.hostAddress(a.tunnel), n.hostAddress(b.tunnel), n.hostAddress(lost.tunnel)
	probes, others := r.receiver(a.ns, to, fencing.Port), r.receiver(a.ns, to, fencing.Port+1000)

	forge := func(sender string, ns netns.NsHandle) {
		r.send(ns, forged, netip.AddrPortFrom(to, fencing.Port))
		r.send(ns, forged, netip.AddrPortFrom(to, fencing.Port+1000)) // It takes the same path, and no rule drops it.
		if got := others(patience); got != forged {
			t.Errorf("%s: another packet comes from %s, want %s", sender, got, forged)
		}
		if got := probes(time.Millisecond); got.IsValid() {
			t.Errorf("%s: the box has a forged probe of %s", sender, got)
		}
	}
	forge("a machine of the box", onA)
	forge("a machine of another box", onB)
	r.send(b.ns, from, netip.AddrPortFrom(to, fencing.Port))
	if got := probes(patience); got != from {
		t.Errorf("the probe of the other box comes from %s, want %s", got, from)
	}
	if ipv6 != to.Is6() {
		return // The neighbour has no address of this family.
	}
	r.must(in(r.router, func() error {
		port, err := netlink.LinkByName("port1")
		if err != nil {
			return err
		}
		subnets, err := Subnets(n.CIDR, "")
		return errors.Join(err, netlink.LinkSetHardwareAddr(port, gatewayMAC(n.ID, subnets)),
			connect("port1", netip.Prefix{}, netip.PrefixFrom(to, to.BitLen()), a.tunnel))
	}))
	forge("a neighbour of the box with the MAC address of the bridges", r.router)
}

// receiver returns a function that returns the sender of the next packet, or the zero address if none comes in time.
func (r *rack) receiver(ns netns.NsHandle, at netip.Addr, port int) func(time.Duration) netip.Addr {
	r.Helper()
	var conn *net.UDPConn
	r.must(in(ns, func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, uint16(port))))
		return err
	}))
	r.Cleanup(func() { _ = conn.Close() })
	return func(within time.Duration) netip.Addr {
		r.must(conn.SetReadDeadline(time.Now().Add(within)))
		_, from, _ := conn.ReadFromUDPAddrPort(make([]byte, 1))
		return from.Addr().Unmap()
	}
}

// send sends a packet with a source address, which the namespace gets for this.
func (r *rack) send(ns netns.NsHandle, from netip.Addr, to netip.AddrPort) {
	r.Helper()
	r.must(in(ns, func() error {
		lo, err := testnetns.LoopbackUp()
		if held, _ := HasAddress(from); err == nil && !held {
			err = netlink.AddrReplace(lo, &netlink.Addr{IPNet: ipNet(from, from.BitLen()), Flags: unix.IFA_F_NODAD})
		}
		if err != nil {
			return err
		}
		conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		_, err = conn.Write([]byte("x"))
		return err
	}))
}
