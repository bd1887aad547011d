package network

import (
	"context"
	"errors"
	"fmt"
	"io"
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

// lan is a box with two machines, and a client in the network of its uplink.
type lan struct {
	*rack
	box      *rackBox
	client   netns.NsHandle
	machines []netns.NsHandle
}

var lanNetwork = Network{ID: "n", CIDR: "10.231.7.0/24", IPv6CIDR: "fd00:7::/64", Cluster: "default/demo"}

// stack contains the addresses of a LAN in one family: of a Service, of the client, and of the first machine.
type stack struct {
	service, client, client2, box string
	machines                      []string
	machineNetwork                string
}

var (
	ipv4 = stack{"203.0.113.100", "203.0.113.2", "203.0.113.3", "203.0.113.1", []string{"10.231.7.10", "10.231.7.11"}, "10.231.7.0/24"}
	ipv6 = stack{"2001:db8::a00", "2001:db8::2", "2001:db8::3", "2001:db8::1", []string{"fd00:7::10", "fd00:7::11"}, "fd00:7::/64"}
)

func newLAN(t *testing.T) *lan {
	r := newRack(t, false)
	l := &lan{rack: r, box: &rackBox{Box: box(t, t.TempDir(), "a"), ns: r.namespace()}, client: r.namespace()}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Namespace = "uplink", netlink.NsFd(int(l.box.ns))
	r.must(in(l.client, func() error { return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0"}) }))
	r.must(in(l.client, func() error {
		return up("eth0", ipv4.client+"/24", ipv4.client2+"/24", ipv6.client+"/64", ipv6.client2+"/64")
	}))
	r.must(in(l.box.ns, func() error { return up("uplink", ipv4.box+"/24", ipv6.box+"/64") }))
	r.must(in(l.box.ns, func() error { return l.box.Ensure(t.Context(), lanNetwork) }))
	for i, address := range ipv4.machines {
		machine := r.machine(l.box, lanNetwork, "m-"+address, address, ipv6.machines[i])
		l.machines = append(l.machines, machine)
		l.serveWho(machine, fmt.Sprint("machine-", i))
	}
	return l
}

func up(name string, addresses ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, a := range addresses {
		prefix := netip.MustParsePrefix(a)
		added := &netlink.Addr{IPNet: ipNet(prefix.Addr(), prefix.Bits())}
		if prefix.Addr().Is6() {
			added.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, added); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// nodePort of the servers for TCP and UDP.
const nodePort = 30080

// serveWho answers each connection and each datagram with the machine and the address of the client.
func (l *lan) serveWho(machine netns.NsHandle, name string) {
	l.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	l.must(in(machine, func() (err error) {
		if tcp, err = net.Listen("tcp", fmt.Sprint(":", nodePort)); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp", fmt.Sprint(":", nodePort))
		return err
	}))
	l.Cleanup(func() { _, _ = tcp.Close(), udp.Close() })
	who := func(from net.Addr) string {
		return name + " " + netip.MustParseAddrPort(from.String()).Addr().Unmap().String()
	}
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, who(conn.RemoteAddr()))
			_ = conn.Close()
		}
	}()
	go func() {
		buffer := make([]byte, 64)
		for {
			_, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo([]byte(who(from)), from)
		}
	}()
}

// ask connects from a namespace, and from one of its addresses if from is not empty.
func ask(ns netns.NsHandle, protocol, from, to string) (answer string, err error) {
	err = in(ns, func() error {
		dialer := net.Dialer{Timeout: 400 * time.Millisecond}
		if protocol == "udp" && from != "" {
			dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from))
		} else if from != "" {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))
		}
		conn, err := dialer.DialContext(context.Background(), protocol, to)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(400 * time.Millisecond))
		if protocol == "udp" {
			if _, err := conn.Write([]byte("who?")); err != nil {
				return err
			}
		}
		buffer := make([]byte, 64)
		n, err := conn.Read(buffer)
		answer = string(buffer[:n])
		return err
	})
	return answer, err
}

// answers expects an answer that contains a text, or no answer if the text is empty. An expected answer has more time: links
// have to find their IPv6 addresses first, and the box may be busy.
func (l *lan) answers(what string, ns netns.NsHandle, protocol, from, to, want string) {
	l.Helper()
	got, err := ask(ns, protocol, from, to)
	for end := time.Now().Add(15 * time.Second); want != "" && !strings.Contains(got, want) && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
		got, err = ask(ns, protocol, from, to)
	}
	switch {
	case want == "" && err == nil:
		l.Errorf("%s: %s %s answered %q", what, protocol, to, got)
	case want != "" && (err != nil || !strings.Contains(got, want)):
		l.Errorf("%s: %s %s answered %q (%v), want %q", what, protocol, to, got, err, want)
	}
}

func (l *lan) publish(services ...Service) Refused {
	l.Helper()
	var refused Refused
	l.must(in(l.box.ns, func() (err error) { refused, err = l.box.SetServices(l.Context(), "n", services); return err }))
	return refused
}

func service(address string, change func(*Service)) Service {
	s := Service{Name: "default/web", Address: netip.MustParseAddr(address), Ports: []ServicePort{{"tcp", 80, nodePort}, {"udp", 53, nodePort}}}
	of := ipv4
	if s.Address.Is6() {
		of = ipv6
	}
	for _, m := range of.machines {
		s.Machines = append(s.Machines, netip.MustParseAddr(m))
	}
	if change != nil {
		change(&s)
	}
	return s
}

func port(address string, port int) string { return net.JoinHostPort(address, fmt.Sprint(port)) }

// Clients of the LAN reach exactly the published ports, the machines see their address, and nothing remains afterwards.
func TestServices(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for name, of := range map[string]stack{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			l := newLAN(t)
			l.answers("before", l.client, "tcp", "", port(of.service, 80), "")
			if refused := l.publish(service(of.service, nil)); len(refused) > 0 {
				t.Fatal(refused)
			}
			l.onlyPublishedPorts(of)
			l.bothMachines(of.service)
			l.sourceRanges(of)
			l.establishedFlowEnds(of)

			l.publish()
			l.answers("after", l.client, "tcp", "", port(of.service, 80), "")
			if out := l.inBox("ip -o addr show dev uplink"); strings.Contains(out, of.service+"/") {
				t.Errorf("the address remains: %s", out)
			}
			if out := l.inBox("nft list ruleset"); strings.Contains(out, of.service) {
				t.Errorf("rules remain: %s", out)
			}
		})
	}
}

// A Service with both families is published at two addresses, and the box uses neither for its own connections.
func TestDualStackService(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	l.publish(service(ipv4.service, nil), service(ipv6.service, nil))
	l.answers("IPv4", l.client, "tcp", port(ipv4.client, 0), port(ipv4.service, 80), " "+ipv4.client)
	l.answers("IPv6", l.client, "tcp", port(ipv6.client2, 0), port(ipv6.service, 80), " "+ipv6.client2)
	l.serveWho(l.client, "client")
	l.answers("a connection of the box", l.box.ns, "tcp", "", port(ipv6.client, nodePort), " "+ipv6.box)
	l.publish(service(ipv6.service, nil))
	l.answers("IPv4 after its end", l.client, "tcp", "", port(ipv4.service, 80), "")
	l.answers("IPv6 without IPv4", l.client, "tcp", "", port(ipv6.service, 80), "machine-")
}

func (l *lan) inBox(script string) (out string) {
	l.Helper()
	l.must(in(l.box.ns, func() error { out = run(l.T, script); return nil }))
	return out
}

func (l *lan) onlyPublishedPorts(of stack) {
	var host net.Listener
	l.must(in(l.box.ns, func() (err error) { host, err = net.Listen("tcp", ":22"); return err }))
	defer host.Close()
	l.answers("a published port", l.client, "tcp", port(of.client, 0), port(of.service, 80), " "+of.client)
	l.answers("a published UDP port", l.client, "udp", port(of.client, 0), port(of.service, 53), " "+of.client)
	l.answers("the UDP port by TCP", l.client, "tcp", "", port(of.service, 53), "")
	l.answers("the TCP port by UDP", l.client, "udp", "", port(of.service, 80), "")
	l.answers("the node port at the address", l.client, "tcp", "", port(of.service, nodePort), "")
	l.must(in(l.client, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		to := netip.MustParsePrefix(of.machineNetwork)
		return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to.Addr(), to.Bits()), Gw: net.ParseIP(of.box)})
	}))
	l.answers("the node port of a machine", l.client, "tcp", "", port(of.machines[0], nodePort), "")
	if _, err := ask(l.client, "tcp", "", port(of.service, 22)); err == nil || !strings.Contains(err.Error(), "i/o timeout") || strings.Contains(err.Error(), "read") {
		l.Errorf("a client reaches a program of the host at the address: %v", err)
	}
	l.answers("the box itself", l.box.ns, "tcp", "", port(of.service, 80), "machine-")
}

func (l *lan) bothMachines(address string) {
	seen := map[string]bool{}
	for range 100 {
		if got, err := ask(l.client, "tcp", "", port(address, 80)); err == nil {
			seen[strings.Fields(got)[0]] = true
		}
	}
	if len(seen) != 2 {
		l.Errorf("of two machines, %v answered", seen)
	}
	l.publish(service(address, func(s *Service) { s.Machines = s.Machines[1:] }))
	for range 10 {
		l.answers("a machine that left", l.client, "tcp", "", port(address, 80), "machine-1 ")
	}
	l.publish(service(address, func(s *Service) { s.Machines = nil }))
	l.answers("no machine", l.client, "tcp", "", port(address, 80), "")
}

// only returns a Service for one client.
func only(client string) []netip.Prefix {
	address := netip.MustParseAddr(client)
	return []netip.Prefix{netip.PrefixFrom(address, address.BitLen())}
}

func (l *lan) sourceRanges(of stack) {
	l.publish(service(of.service, func(s *Service) { s.Sources = only(of.client2) }))
	l.answers("another source", l.client, "tcp", port(of.client, 0), port(of.service, 80), "")
	l.answers("the allowed source", l.client, "tcp", port(of.client2, 0), port(of.service, 80), " "+of.client2)
}

// establishedFlowEnds sends from one port: the kernel tracks this as one connection, which the rules alone do not end.
func (l *lan) establishedFlowEnds(of stack) {
	from, to := port(of.client, 4000), port(of.service, 53)
	l.publish(service(of.service, func(s *Service) { s.Machines = s.Machines[:1] }))
	l.answers("the first machine", l.client, "udp", from, to, "machine-0 ")
	l.publish(service(of.service, func(s *Service) { s.Machines = s.Machines[1:] }))
	l.answers("the flow after its machine left", l.client, "udp", from, to, "machine-1 ")
	l.publish(service(of.service, func(s *Service) { s.Sources = only(of.client2) }))
	l.answers("the flow of a source that is not allowed any more", l.client, "udp", from, to, "")
}

// A withdrawal whose rules were not written is not done: neither its error nor a crash of capstand at this point leaves rules and connections
// behind, also if it was the last Service.
func TestWithdrawalAfterError(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	from, to := port(ipv4.client, 4000), port(ipv4.service, 53)
	l.publish(service(ipv4.service, nil))
	l.answers("the published Service", l.client, "udp", from, to, "machine-")
	cancelled, cancel := context.WithCancel(t.Context())
	cancel() // nft does not run
	err := in(l.box.ns, func() error { return l.box.publish(cancelled, "n", nil, nil, Refused{}) })
	if err == nil {
		t.Error("no error without nft")
	}
	l.answers("the Service whose rules remain", l.client, "udp", from, to, "machine-")
	done := func() (whole bool) {
		l.must(in(l.box.ns, func() (err error) { whole, err = l.box.HoldsServices("n", nil); return err }))
		return whole
	}
	if done() {
		t.Error("capstand would not try the withdrawal again")
	}
	l.publish()
	if !done() {
		t.Error("capstand would repeat the withdrawal without end")
	}
	if out := l.inBox("nft list ruleset"); strings.Contains(out, ipv4.service) {
		t.Errorf("rules remain: %s", out)
	}
	l.answers("the connection of the withdrawn Service", l.client, "udp", from, to, "")
	if left, err := l.box.ownServices("n"); err != nil || len(left) > 0 {
		t.Errorf("recorded: %v, %v", left, err)
	}
}

// A Service stays recorded as withdrawn if its address, or one of its ports of an address of the host, goes.
func TestWithdrawn(t *testing.T) {
	ports := func(numbers ...uint16) Service {
		return hostPorts(ipv4.box, func(s *Service) {
			s.Ports = nil
			for _, n := range numbers {
				s.Ports = append(s.Ports, ServicePort{"tcp", n, nodePort})
			}
		})
	}
	at := func(numbers ...uint16) Service {
		s := ports(numbers...)
		s.HostPorts = false
		return s
	}
	for name, test := range map[string]struct {
		have, want []Service
		former     int
	}{
		"new":                       {nil, []Service{at(80)}, 0},
		"the same":                  {[]Service{at(80), ports(80)}, []Service{at(80), ports(80)}, 0},
		"withdrawn":                 {[]Service{at(80), ports(80)}, nil, 2},
		"another port of its own":   {[]Service{at(80)}, []Service{at(443)}, 0},
		"another port of the host":  {[]Service{ports(80)}, []Service{ports(443)}, 1},
		"one more port of the host": {[]Service{ports(80)}, []Service{ports(80, 443)}, 0},
		"one port less":             {[]Service{ports(80, 443)}, []Service{ports(80)}, 1},
	} {
		former := withdrawn(test.have, test.want)
		if len(former) != test.former || slices.ContainsFunc(former, func(s Service) bool { return !s.Withdrawn }) {
			t.Errorf("%s: %v, want %d", name, former, test.former)
		}
	}
}

// Addresses that belong to others are refused, and the other Services are published.
func TestRefusedServices(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	l.must(in(l.client, func() error { return up("eth0", "203.0.113.50/32", "2001:db8::50/128") }))
	other := Network{ID: "other", CIDR: "10.231.8.0/24", Cluster: "default/other"}
	l.must(in(l.box.ns, func() error {
		if err := l.box.Ensure(t.Context(), other); err != nil {
			return err
		}
		_, err := l.box.SetServices(t.Context(), "other", []Service{service("203.0.113.60", nil)})
		return err
	}))
	refused := l.publish(service("203.0.113.100", nil), service("203.0.113.50", nil), service("203.0.113.1", nil), service("203.0.113.255", nil),
		service("198.51.100.7", nil), service("10.231.7.40", nil), service("203.0.113.60", nil),
		service("2001:db8::a00", nil), service("2001:db8::50", nil), service("2001:db8::1", nil), service("2001:db8::", nil), service("2001:db9::1", nil),
		service("fd00:7::40", nil))
	for address, want := range map[string]string{
		"203.0.113.50": "belongs to the station", "203.0.113.1": "of the host itself", "203.0.113.255": "broadcast", "198.51.100.7": "no interface",
		"10.231.7.40": "machine network", "203.0.113.60": "another Service",
		"2001:db8::50": "belongs to the station", "2001:db8::1": "of the host itself", "2001:db8::": "network or broadcast", "2001:db9::1": "no interface",
		"fd00:7::40": "machine network",
	} {
		if got := refused[Place{Address: netip.MustParseAddr(address)}]; !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
	if len(refused) != 11 {
		t.Errorf("refused: %v", refused)
	}
	l.answers("the accepted one, IPv6", l.client, "tcp", "", "[2001:db8::a00]:80", "machine-")
	l.answers("the accepted one", l.client, "tcp", "", "203.0.113.100:80", "machine-")

	l.must(in(l.box.ns, func() error { return l.box.Release(t.Context(), "other") }))
	if refused := l.publish(service("203.0.113.60", nil)); len(refused) > 0 {
		t.Errorf("an address that was released: %v", refused)
	}
}

// The addresses of a capstand whose state folder was removed go with the network.
func TestForsakenServices(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	forsaken := box(t, l.box.Dir, "b")
	l.must(in(l.box.ns, func() error {
		if err := forsaken.Ensure(t.Context(), lanNetwork); err != nil {
			return err
		}
		_, err := forsaken.SetServices(t.Context(), "n", []Service{service("203.0.113.100", nil)})
		return err
	}))
	l.answers("through the second capstand", l.client, "tcp", "", "203.0.113.100:80", "machine-")
	l.publish(service("203.0.113.101", nil))
	l.answers("beside another capstand", l.client, "tcp", "", "203.0.113.100:80", "machine-")
	l.must(os.RemoveAll(forsaken.HostRoot))
	l.must(in(l.box.ns, func() error { return l.box.Release(t.Context(), "n") }))
	if out := l.inBox("ip -4 -o addr show dev uplink"); strings.Contains(out, "203.0.113.10") {
		t.Errorf("addresses remain: %s", out)
	}
}

// A box gives up the addresses that another station has too, and takes them again when they are free. Other addresses stay.
func TestServicesYield(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	all := []Service{service("203.0.113.100", nil), service("2001:db8::a00", nil), service("203.0.113.101", nil)}
	l.publish(all...)
	yields := func(want ...string) {
		t.Helper()
		var kept []Service
		var lost Refused
		l.must(in(l.box.ns, func() (err error) { kept, lost, err = l.box.YieldServices(t.Context(), "n", all); return err }))
		if len(lost) != len(want) || len(kept) != len(all)-len(want) {
			t.Errorf("kept %v, lost %v, want %v", kept, lost, want)
		}
		for _, address := range want {
			if why := lost[Place{Address: netip.MustParseAddr(address)}]; !strings.Contains(why, "belongs to the station") {
				t.Errorf("%s: %q", address, why)
			}
			if out := l.inBox("ip -o addr show dev uplink"); strings.Contains(out, address+"/") {
				t.Errorf("the box has %s: %s", address, out)
			}
		}
	}
	yields()
	l.must(in(l.client, func() error { return up("eth0", "203.0.113.100/32", "2001:db8::a00/128") }))
	yields("203.0.113.100", "2001:db8::a00")
	l.answers("the address that only the box has", l.client, "tcp", "", "203.0.113.101:80", "machine-")
	if refused := l.publish(all...); len(refused) != 2 {
		t.Errorf("refused: %v", refused)
	}
	l.must(in(l.client, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, text := range []string{"203.0.113.100/32", "2001:db8::a00/128"} {
			a, _ := netlink.ParseAddr(text)
			err = errors.Join(err, netlink.AddrDel(link, a))
		}
		return err
	}))
	if refused := l.publish(all...); len(refused) > 0 {
		t.Errorf("refused after the station left: %v", refused)
	}
	yields()
}

// A capstand that starts again keeps the addresses. After a reboot, and when another program removed an address, they return.
func TestServicesReturn(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	l := newLAN(t)
	s := service("203.0.113.100", nil)
	whole := func() (whole bool) {
		l.must(in(l.box.ns, func() (err error) { whole, err = l.box.HoldsServices("n", []Service{s}); return err }))
		return whole
	}
	if whole() {
		t.Error("an address that was never published is held")
	}
	l.publish(s)
	l.publish(s)
	if !whole() {
		t.Error("the published address is not held")
	}
	l.inBox("ip addr del 203.0.113.100/32 dev uplink; nft flush ruleset")
	if whole() {
		t.Error("a removed address is held")
	}
	l.publish(s)
	l.answers("after the removal by another program", l.client, "tcp", "", "203.0.113.100:80", "machine-")
	l.must(in(l.box.ns, func() error { return l.box.Release(t.Context(), "n") }))
	if out := l.inBox("ip -4 -o addr show dev uplink"); strings.Contains(out, "203.0.113.100") {
		t.Errorf("the network was released, and the address remains: %s", out)
	}
}
