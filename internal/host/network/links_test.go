package network

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// spines creates a box with the uplinks up0, up1 and so on, which have these MTUs.
func spines(t *testing.T, mtus ...int) *rackBox {
	r := newRack(t, false)
	b := &rackBox{Box: box(t, t.TempDir(), "a"), ns: r.namespace()}
	for i, mtu := range mtus {
		name := "up" + string(rune('0'+i))
		r.must(testnetns.Cable(testnetns.End{NS: b.ns, Name: name}, testnetns.End{NS: r.router, Name: name}))
		r.must(in(r.router, func() error { return setMTU(name, mtu) }))
		r.must(in(b.ns, func() error { return setMTU(name, mtu) }))
	}
	return b
}

func setMTU(name string, mtu int) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetMTU(link, mtu); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

// A network through several links belongs to the rack as much as one through one link.
func TestRouteThroughSeveralLinks(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, b := &rack{T: t}, spines(t, 1500, 1500)
	r.must(in(b.ns, func() error {
		var paths []*netlink.NexthopInfo
		for _, name := range []string{"up0", "up1"} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			paths = append(paths, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index})
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParseAddr("10.231.0.0"), 16), MultiPath: paths}); err != nil {
			return err
		}
		for _, c := range []struct {
			except []string
			want   string
		}{{nil, "up0"}, {[]string{"up0"}, "up1"}, {[]string{"up0", "up1"}, ""}} {
			used, err := hostRoutes(c.except)
			if err != nil {
				return err
			}
			got := ""
			for _, u := range used {
				if u.Prefix == netip.MustParsePrefix("10.231.0.0/16") {
					got = u.By
				}
			}
			if want := "the host's route through " + c.want; got != want && (c.want != "" || got != "") {
				t.Errorf("without %v: %q, want %q", c.except, got, c.want)
			}
		}
		var conflict ConflictError
		if err := b.FitsRoutes(Network{ID: "n", CIDR: "10.231.7.0/24"}); !errors.As(err, &conflict) || conflict.Subject != "10.231.7.0/24" {
			t.Errorf("a cluster gets a network of the rack: %v", err)
		}
		if err := b.FitsRoutes(Network{ID: "n", CIDR: "10.232.7.0/24"}); err != nil {
			t.Errorf("a network without a route: %v", err)
		}
		return nil
	}))
}

// A network does not contain addresses that the box needs and reaches by its default route, for which it has no other route.
func TestNetworkWithNeededAddresses(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, b := &rack{T: t}, spines(t, 1500)
	other := Network{ID: "other", CIDR: "10.230.0.0/24", Cluster: "default/other", Overlay: &Overlay{VNI: 5000, MTU: 1400, Address: netip.MustParseAddr("192.0.2.1")}}
	r.must(in(b.ns, func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		for _, gateway := range []string{"10.231.7.254", "fd00:7::fe"} {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(gateway), Flags: int(netlink.FLAG_ONLINK)}); err != nil {
				return err
			}
		}
		if err := b.Ensure(t.Context(), other); err != nil {
			return err
		}
		return b.SetPeers(t.Context(), other.ID, Peers{Hosts: []netip.Addr{netip.MustParseAddr("10.231.9.2")}})
	}))
	server := Used(netip.MustParseAddr("::ffff:10.231.8.53"), "the host's name server")
	tunnels, err := b.Tunnels()
	expect.NoError(t, err)
	for cidr, want := range map[string]string{
		"10.231.7.0/24": "10.231.7.254/32 of the host's gateway through up0", "fd00:7::/64": "fd00:7::fe/128 of the host's gateway through up0",
		"10.231.8.0/24": "10.231.8.53/32 of the host's name server", "10.231.9.0/24": "10.231.9.2/32 of a tunnel to another host", "10.231.10.0/24": "",
	} {
		r.must(in(b.ns, func() error {
			err := b.FitsRoutes(Network{ID: "n", CIDR: cidr}, append(tunnels, server)...)
			var conflict ConflictError
			if errors.As(err, &conflict) != (want != "") || want != "" && (conflict.Subject != cidr || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %v, want %q", cidr, err, want)
			}
			return nil
		}))
	}
}

// A bridge has the MTU of the network after its last machine left, and gets it again if it was lost. The next machine has the same one.
func TestBridgeKeepsMTU(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	r, b := &rack{T: t}, spines(t, 1400)
	n := Network{ID: "n", CIDR: "10.231.7.0/24", Cluster: "default/n"}
	r.must(in(b.ns, func() error {
		return connect("up0", netip.Prefix{}, netip.MustParsePrefix("0.0.0.0/0"), netip.Addr{})
	}))
	mtu := func(when string, ns netns.NsHandle, link string) {
		t.Helper()
		r.must(in(ns, func() error {
			link, err := netlink.LinkByName(link)
			if err == nil && link.Attrs().MTU != 1400 {
				t.Errorf("%s, %s has an MTU of %d, want 1400", when, link.Attrs().Name, link.Attrs().MTU)
			}
			return err
		}))
	}
	r.ensure(n, b)
	mtu("without machines", b.ns, BridgeName(n.ID))
	mtu("with its first machine", r.machine(b, n, "m-1", "10.231.7.10"), Interface)
	r.must(in(b.ns, func() error { return b.Unplug("m-1") }))
	mtu("after its last machine", b.ns, BridgeName(n.ID))
	r.must(in(b.ns, func() error { return setMTU(BridgeName(n.ID), 1500) }))
	r.ensure(n, b)
	mtu("after a repair", r.machine(b, n, "m-2", "10.231.7.11"), Interface)
}

// The default routes of both families can have different interfaces. A network fits those of its own families.
func TestUplinkMTU(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	v4, v6 := Subnet{Prefix: netip.MustParsePrefix("10.0.0.0/24")}, Subnet{Prefix: netip.MustParsePrefix("fd00::/64")}
	both := []Subnet{v4, v6}
	for name, c := range map[string]struct {
		ipv4, ipv6 string // interface of the default route
		subnets    []Subnet
		want       int
	}{
		"none": {"", "", both, 1500}, "IPv4": {"up0", "", both, 1400}, "IPv6": {"", "up0", both, 1400},
		"IPv6 smaller": {"up0", "up1", both, 1300}, "IPv4 smaller": {"up1", "up0", both, 1300}, "large": {"up2", "up2", both, 1500},
		"a network with IPv4": {"up0", "up1", []Subnet{v4}, 1400}, "a network with IPv6": {"up1", "up0", []Subnet{v6}, 1400},
	} {
		t.Run(name, func(t *testing.T) {
			r, b := &rack{T: t}, spines(t, 1400, 1300, 9000)
			r.must(in(b.ns, func() error {
				for everything, link := range map[string]string{"0.0.0.0/0": c.ipv4, "::/0": c.ipv6} {
					if link == "" {
						continue
					}
					if err := connect(link, netip.Prefix{}, netip.MustParsePrefix(everything), netip.Addr{}); err != nil {
						return err
					}
				}
				if got := uplinkMTU(c.subnets); got != c.want {
					t.Errorf("%d, want %d", got, c.want)
				}
				return nil
			}))
		})
	}
}
