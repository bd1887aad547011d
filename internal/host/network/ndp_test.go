package network

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// IC-10: an IPv6 virtual address is unique, moves to this box in the neighbour tables of other stations, leads to the load balancer
// of this box, and expires without a renewal.
func TestVirtualAddressIPv6_IC10(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run(t, `for at in all default; do echo 0 > /proc/sys/net/ipv6/conf/$at/accept_dad; done
		ip link set lo up
		ip link add lan type veth peer name client
		ip addr add 2001:db8:5::1/64 dev lan
		ip addr add 2001:db8:6::1/128 dev lan
		ip link set lan up`)
	mac := strings.Fields(run(t, "ip -brief link show client"))[2]
	in := station(t, "client")
	run(t, in+"ip addr add 2001:db8:5::50/64 dev client nodad; "+in+"ip link set client up")
	untilContains(t, "ip -6 addr show dev lan scope link", "fe80:") // The kernel adds it a moment after the link has a carrier.
	endpoint := netip.MustParseAddrPort("[2001:db8:5::100]:6443")
	address := endpoint.Addr()
	link, err := VirtualLink(address)
	if err != nil || link.Attrs().Name != "lan" {
		t.Fatalf("%v, %v", link, err)
	}
	for _, bad := range []string{"2001:db8:5::1", "2001:db8:6::1", "2001:db8:6::2", "203.0.113.9"} {
		if _, err := VirtualLink(netip.MustParseAddr(bad)); err == nil {
			t.Errorf("%s is an address of the host, or of no network, and was accepted", bad)
		}
	}
	if err := ProbeVirtual(t.Context(), link, address); err != nil {
		t.Errorf("a free address: %v", err)
	}
	if err := ProbeVirtual(t.Context(), link, netip.MustParseAddr("2001:db8:5::50")); err == nil || !strings.Contains(err.Error(), mac) {
		t.Errorf("the address of the station %s: %v", mac, err)
	}

	b := box(t, t.TempDir(), "a")
	if err := b.Ensure(t.Context(), Network{ID: "n", CIDR: "fd00:7::/64", Cluster: "default/n"}); err != nil {
		t.Fatal(err)
	}
	redirect := Redirect{Balancer: "n", Endpoint: endpoint, To: netip.MustParseAddrPort("[fd00:7::1]:7443"), Virtual: true}
	if err := b.Redirect(t.Context(), "n", redirect); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", redirect.To.String())
	if err != nil {
		t.Fatal(err)
	}
	go greet(listener)
	const connect = `timeout 2 bash -c 'exec 3<>/dev/tcp/2001:db8:5::100/6443; head -c 8 <&3'`
	if got := run(t, connect); got != "balancer" {
		t.Errorf("from the box: %q", got)
	}
	if out, err := exec.Command("/bin/sh", "-c", in+connect).Output(); err == nil {
		t.Errorf("a client reaches a box that does not have the address: %q", out)
	}
	if err := HoldVirtual(link, address, virtualLife); err != nil {
		t.Fatal(err)
	}
	run(t, in+"ip neigh replace 2001:db8:5::100 lladdr 02:00:00:00:00:99 dev client nud reachable")
	if err := AnnounceVirtual(link, address); err != nil {
		t.Fatal(err)
	}
	own := link.Attrs().HardwareAddr.String()
	untilContains(t, in+"ip neigh show 2001:db8:5::100", own)
	if got := run(t, in+connect); got != "balancer" {
		t.Errorf("a client: %q", got)
	}
	conn, err := net.Dial("udp", "[2001:db8:5::50]:9")
	if err != nil {
		t.Fatal(err)
	}
	if from := conn.LocalAddr().String(); !strings.HasPrefix(from, "[2001:db8:5::1]:") {
		t.Errorf("the host uses %s for its own connections", from)
	}

	has := func() bool { return strings.Contains(run(t, "ip -6 addr"), "2001:db8:5::100/128") }
	if err := HoldVirtual(link, address, 2*time.Second); err != nil || !has() {
		t.Fatalf("the host does not have the address: %v", err)
	}
	checkEnd(t, link, address, has)
}

// The kernel accepts packets for a new IPv6 address when the box announces it. Without a wait, some addresses are early.
func TestAnnouncedIPv6AddressIsLocal(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	run(t, "ip link add lan type veth peer name client; ip addr add 2001:db8:5::1/64 dev lan nodad; ip link set lan up; ip link set client up")
	link, err := netlink.LinkByName("lan")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		address := netip.MustParseAddr(fmt.Sprintf("2001:db8:5::1:%x", i))
		if err := HoldVirtual(link, address, virtualLife); err != nil {
			t.Fatal(err)
		}
		if err := AnnounceVirtual(link, address); err != nil {
			t.Fatal(err)
		}
		routes, err := netlink.RouteGet(address.AsSlice())
		if err != nil || len(routes) != 1 || routes[0].Type != unix.RTN_LOCAL {
			t.Fatalf("the kernel does not accept packets for %s: %v, %v", address, routes, err)
		}
	}
}

// untilContains repeats a command until its output contains a text.
func untilContains(t *testing.T, command, want string) {
	t.Helper()
	expect.Eventually(t, command, func() error {
		if out := run(t, command); !strings.Contains(out, want) {
			return fmt.Errorf("expected %q, found %s", want, out)
		}
		return nil
	})
}

// A message that is short, of another kind or about another address names no station.
func TestAdvertised(t *testing.T) {
	address, mac := netip.MustParseAddr("2001:db8::5"), MAC("n", "x")
	good := ndp(ndpAdvertisement, ndpOverride, address, ndpTarget, mac)
	for name, test := range map[string]struct {
		message []byte
		want    string
	}{
		"good":            {good, mac.String()},
		"empty":           {nil, ""},
		"short":           {good[:ndpLength-1], ""},
		"solicitation":    {ndp(ndpSolicitation, 0, address, ndpSource, mac), ""},
		"another address": {ndp(ndpAdvertisement, 0, address.Next(), ndpTarget, mac), ""},
		"another option":  {ndp(ndpAdvertisement, 0, address, ndpSource, mac), ""},
	} {
		if got := advertised(test.message, address).String(); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
	if got := solicitedNode(netip.MustParseAddr("2001:db8::12:3456")); got.String() != "ff02::1:ff12:3456" {
		t.Errorf("solicited-node address %s", got)
	}
}
