package network

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

func hostPorts(address string, change func(*Service)) Service {
	return service(address, func(s *Service) {
		s.HostPorts = true
		if change != nil {
			change(s)
		}
	})
}

// Clients reach exactly the published ports of the box, and programs of the box keep all others.
func TestHostPorts(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for name, of := range map[string]stack{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			l := newLAN(t)
			l.serveWho(l.box.ns, "box") // at the node port
			l.answers("before", l.client, "tcp", "", port(of.box, 80), "")
			before := port(of.client, 4001) // The kernel tracks what a client sends from one port as one connection.
			l.answers("before, by UDP", l.client, "udp", before, port(of.box, 53), "")
			if refused := l.publish(hostPorts(of.box, nil)); len(refused) > 0 {
				t.Fatal(refused)
			}
			l.answers("a published port", l.client, "tcp", port(of.client, 0), port(of.box, 80), " "+of.client)
			l.answers("a published UDP port", l.client, "udp", port(of.client, 0), port(of.box, 53), " "+of.client)
			l.answers("a client that sent before", l.client, "udp", before, port(of.box, 53), " "+of.client)
			l.answers("the UDP port by TCP", l.client, "tcp", "", port(of.box, 53), "")
			l.answers("the TCP port by UDP", l.client, "udp", "", port(of.box, 80), "")
			l.answers("a program of the box", l.client, "tcp", "", port(of.box, nodePort), "box ")
			l.answers("the box itself", l.box.ns, "tcp", "", port(of.box, 80), "machine-")
			l.answers("a machine", l.machines[0], "tcp", "", port(of.box, 80), "machine-")
			l.answers("the other machine, or itself", l.machines[1], "udp", "", port(of.box, 53), "machine-")
			l.closesPorts(of)
		})
	}
}

// closesPorts ends the Service while a client sends from one port, which the kernel tracks as one connection.
func (l *lan) closesPorts(of stack) {
	l.Helper()
	from, to := port(of.client, 4000), port(of.box, 53)
	l.publish(hostPorts(of.box, func(s *Service) { s.Sources = only(of.client2) }))
	l.answers("another source", l.client, "tcp", port(of.client, 0), port(of.box, 80), "")
	l.answers("the allowed source", l.client, "tcp", port(of.client2, 0), port(of.box, 80), " "+of.client2)

	l.publish(hostPorts(of.box, func(s *Service) { s.Machines = nil }))
	var late net.Listener
	l.must(in(l.box.ns, func() (err error) { late, err = net.Listen("tcp", port(of.box, 80)); return err }))
	if _, err := ask(l.client, "tcp", "", port(of.box, 80)); err == nil || !strings.Contains(err.Error(), "dial") {
		l.Errorf("a program of the box that came later is reached: %v", err)
	}
	l.must(late.Close())

	l.publish(hostPorts(of.box, nil))
	l.answers("before the end", l.client, "udp", from, to, "machine-")
	l.publish()
	l.answers("the flow after the end", l.client, "udp", from, to, "")
	l.answers("after the end", l.client, "tcp", "", port(of.box, 80), "")
	if out := l.inBox("nft list ruleset"); strings.Contains(out, "dport 80") || strings.Contains(out, "proto-dst") {
		l.Errorf("rules remain: %s", out)
	}
	if own, err := l.hasAddress(of.box); err != nil || !own {
		l.Errorf("the box lost its own address %s: %v", of.box, err)
	}
}

func (l *lan) hasAddress(address string) (own bool, err error) {
	err = in(l.box.ns, func() error { own, err = HasAddress(netip.MustParseAddr(address)); return err })
	return own, err
}

// The end of a Service ends connections to its ports, and none to programs of the box or to the ports of other Services there.
func TestFlowsOfHostPorts(t *testing.T) {
	box := netip.MustParseAddr(ipv4.box)
	of := func(port uint16) Service {
		return Service{Name: "x", Address: box, HostPorts: true, Ports: []ServicePort{{"tcp", port, nodePort}}}
	}
	ended := unwantedFlows{have: []Service{of(80), of(443)}, want: []Service{of(443)}}
	for _, test := range []struct {
		port, translated uint16
		want             bool
	}{
		{80, nodePort, true}, {443, nodePort, false}, {22, 22, false},
		{443, 31000, true}, // to the Service that had the port before
		{443, 443, true},   // from before the Service
	} {
		flow := &netlink.ConntrackFlow{
			Forward: netlink.IPTuple{Protocol: unix.IPPROTO_TCP, DstIP: box.AsSlice(), DstPort: test.port, SrcIP: net.ParseIP(ipv4.client)},
			Reverse: netlink.IPTuple{SrcIP: net.ParseIP(ipv4.machines[0]), SrcPort: test.translated},
		}
		if got := ended.MatchConntrackFlow(flow); got != test.want {
			t.Errorf("a connection to port %d, at port %d of a machine, ends: %v", test.port, test.translated, got)
		}
	}
}

// Ports of programs of the box and of other clusters are refused, with what to do, and other Services are published.
func TestRefusedHostPorts(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	var web net.Listener
	var dns net.PacketConn
	l.must(in(l.box.ns, func() (err error) {
		if web, err = net.Listen("tcp", ":80"); err != nil {
			return err
		}
		if dns, err = net.ListenPacket("udp", port(ipv4.box, 53)); err != nil {
			return err
		}
		if err := l.box.Ensure(t.Context(), Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "default/other"}); err != nil {
			return err
		}
		_, err = l.box.SetServices(t.Context(), "other", []Service{{Name: "x/theirs", HostPorts: true, Address: netip.MustParseAddr(ipv4.box), Ports: []ServicePort{{"tcp", 443, 30443}}}})
		return err
	}))
	defer web.Close()
	defer func() { _ = dns.Close() }()
	at := func(name, address, protocol string, number uint16) Service {
		return Service{Name: name, HostPorts: true, Address: netip.MustParseAddr(address), Ports: []ServicePort{{protocol, number, nodePort}}, Machines: []netip.Addr{netip.MustParseAddr(ipv4.machines[0])}}
	}
	want := []Service{
		at("a/web", ipv4.box, "tcp", 80), at("a/dns", ipv4.box, "udp", 53), at("a/theirs", ipv4.box, "tcp", 443), at("a/tunnel", ipv4.box, "udp", tunnelPort),
		at("a/foreign", "203.0.113.99", "tcp", 81), at("a/bridge", "10.231.7.1", "tcp", 81), at("a/good", ipv4.box, "tcp", 8080), at("a/pool", "203.0.113.100", "tcp", 80),
	}
	want[7].HostPorts = false
	refused := l.publish(want...)
	for i, says := range []string{"a program of the host uses TCP port 80", "a program of the host uses UDP port 53", "another cluster", "tunnels", "is not an address of the host", "is not an address of the host", "", ""} {
		if got := refused[want[i].place()]; !strings.Contains(got, says) || (got == "") != (says == "") {
			t.Errorf("%s: %q, want %q", want[i].Name, got, says)
		}
	}
	l.answers("the accepted one", l.client, "tcp", "", port(ipv4.box, 8080), "machine-0")
	l.answers("the address from a pool", l.client, "tcp", "", "203.0.113.100:80", "machine-0")
	l.returns(want[0], web)
}

// returns publishes a Service as soon as the program that had its port has ended, and again after the rules were removed.
func (l *lan) returns(s Service, program net.Listener) {
	l.Helper()
	holds := func() (whole bool) {
		l.must(in(l.box.ns, func() (err error) { whole, err = l.box.HoldsServices("n", []Service{s}); return err }))
		return whole
	}
	if holds() {
		l.Error("a refused port counts as published")
	}
	l.must(program.Close())
	if refused := l.publish(s); len(refused) > 0 || !holds() {
		l.Errorf("after the end of the program: %v", refused)
	}
	l.answers("the port of a program that has ended", l.client, "tcp", "", port(ipv4.box, 80), "machine-0")
	var published bool
	for to, want := range map[string]bool{"203.0.113.1:80": true, "0.0.0.0:80": true, "203.0.113.1:81": false, "10.231.7.1:80": false} {
		l.must(in(l.box.ns, func() (err error) { published, err = l.box.PortPublished(netip.MustParseAddrPort(to)); return err }))
		if published != want {
			l.Errorf("%s is published: %v", to, published)
		}
	}
	l.must(in(l.box.ns, func() error {
		link, err := netlink.LinkByName("uplink")
		if err != nil {
			return err
		}
		prefix := netip.MustParsePrefix(ipv4.box + "/24")
		return netlink.AddrDel(link, &netlink.Addr{IPNet: ipNet(prefix.Addr(), prefix.Bits())})
	}))
	if holds() {
		l.Error("ports of an address that the box has lost count as published")
	}
}

// The Services of other networks are read once for all Services of a network, because the box is locked meanwhile.
func TestServicesAreReadOnce(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	other := Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "default/other"}
	at := func(name string, port uint16) Service {
		return Service{Name: name, HostPorts: true, Address: netip.MustParseAddr(ipv4.box), Ports: []ServicePort{{"tcp", port, nodePort}}, Machines: []netip.Addr{netip.MustParseAddr(ipv4.machines[0])}}
	}
	l.must(in(l.box.ns, func() error {
		if err := l.box.Ensure(t.Context(), other); err != nil {
			return err
		}
		_, err := l.box.SetServices(t.Context(), other.ID, []Service{at("x/theirs", 443)})
		return err
	}))
	var many []Service
	for i := range 10 {
		many = append(many, at(fmt.Sprint("a/", i), uint16(8000+i)), service(fmt.Sprintf("203.0.113.%d", 100+i), func(s *Service) { s.Name = fmt.Sprint("b/", i) }))
	}
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	l.must(err)
	defer func() { _ = unix.Close(watch) }()
	_, err = unix.InotifyAddWatch(watch, l.box.servicesFile(other.ID), unix.IN_OPEN|unix.IN_CLOSE) // Equal events in a row would be one.
	l.must(err)
	opened := func() int {
		n, err := unix.Read(watch, make([]byte, 64<<10))
		if err == unix.EAGAIN {
			return 0
		}
		l.must(err)
		return n / unix.SizeofInotifyEvent / 2
	}
	reads := func(what string, most int, f func() error) {
		t.Helper()
		l.must(in(l.box.ns, f))
		if n := opened(); n == 0 || n > most {
			t.Errorf("%s: the Services of another network were read %d times", what, n)
		}
	}
	reads("publication", 4, func() error { _, err := l.box.SetServices(t.Context(), "n", many); return err })
	reads("a look at them", 1, func() error {
		whole, err := l.box.HoldsServices("n", many)
		if !whole {
			t.Error("they are not published")
		}
		return err
	})
	reads("announcement", 1, func() error { return l.box.AnnounceServices("n", many) })
}
