package network

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"
)

var (
	hostB, hostC = netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	remote       = netip.MustParseAddr("10.1.0.20")
	remote6      = netip.MustParseAddr("fd00:1::20")
)

func TestWantedEntries(t *testing.T) {
	n := Network{ID: "n", CIDR: "10.1.0.0/24", IPv6CIDR: "fd00:1::/64"}
	machine := MAC("n", "10.1.0.20").String()
	ofMachine := entries{
		{tunnelTable, machine}: "192.0.2.2", {portTable, machine}: "", {neighbourTable, "10.1.0.20"}: machine, {neighbourTable, "fd00:1::20"}: machine,
	}
	ofHost := func(host netip.Addr) entries {
		mac, address := MAC("n", host.String()).String(), n.hostAddress(host).String()
		return entries{{tunnelTable, mac}: host.String(), {portTable, mac}: "", {neighbourTable, address}: mac, {routeTable, address}: ""}
	}
	join := func(all ...entries) entries {
		joined := entries{}
		for _, one := range all {
			maps.Copy(joined, one)
		}
		return joined
	}
	for name, test := range map[string]struct {
		peers Peers
		local []string
		want  entries
	}{
		"none":                   {Peers{}, nil, entries{}},
		"a machine":              {Peers{Machines: []Peer{{[]netip.Addr{remote, remote6}, hostB}}}, nil, join(ofMachine, ofHost(hostB))},
		"its host is also named": {Peers{Machines: []Peer{{[]netip.Addr{remote, remote6}, hostB}}, Hosts: []netip.Addr{hostB}}, nil, join(ofMachine, ofHost(hostB))},
		"a host without any":     {Peers{Hosts: []netip.Addr{hostC}}, nil, ofHost(hostC)},
		"the machine is here":    {Peers{Machines: []Peer{{[]netip.Addr{remote, remote6}, hostB}}}, []string{"10.1.0.20"}, ofHost(hostB)},
		"its IPv6 is here":       {Peers{Machines: []Peer{{[]netip.Addr{remote, remote6}, hostB}}}, []string{"fd00:1::20"}, ofHost(hostB)},
		"another one is here":    {Peers{Machines: []Peer{{[]netip.Addr{remote, remote6}, hostB}}}, []string{"10.1.0.21"}, join(ofMachine, ofHost(hostB))},
	} {
		t.Run(name, func(t *testing.T) {
			if got := n.wantedEntries(test.peers, test.local); !maps.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestDifference(t *testing.T) {
	a, b, c := entry{tunnelTable, "a"}, entry{portTable, "b"}, entry{neighbourTable, "c"}
	for name, test := range map[string]struct{ want, have, write, remove entries }{
		"equal":   {entries{a: "1", b: ""}, entries{a: "1", b: ""}, entries{}, entries{}},
		"missing": {entries{a: "1", b: ""}, entries{}, entries{a: "1", b: ""}, entries{}},
		"changed": {entries{a: "2"}, entries{a: "1"}, entries{a: "2"}, entries{}},
		"stale":   {entries{a: "1"}, entries{a: "1", c: "x"}, entries{}, entries{c: "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			write, remove := difference(test.want, test.have)
			if !maps.Equal(write, test.write) || !maps.Equal(remove, test.remove) {
				t.Errorf("write %v and remove %v, want %v and %v", write, remove, test.write, test.remove)
			}
		})
	}
	if got := (entries{c: "", a: "", b: ""}).inOrder(); !slices.Equal(got, []entry{a, b, c}) {
		t.Errorf("in order: %v", got)
	}
}

// The machines of two networks can be on the same boxes, so a box needs an address for each network. Machines with IPv6 only
// answer only to IPv6.
func TestHostAddress(t *testing.T) {
	seen := map[netip.Addr]bool{}
	for _, network := range []Network{{ID: "n", CIDR: "10.1.0.0/24", IPv6CIDR: "fd00:1::/64"}, {ID: "m", CIDR: "10.1.0.0/24"}, {ID: "six", CIDR: "fd00:1::/64"}} {
		for _, host := range []netip.Addr{hostB, hostC, netip.MustParseAddr("fd00::1")} {
			address := network.hostAddress(host)
			if !isHostAddress(address) || seen[address] || address.Is6() != (network.ID == "six") {
				t.Errorf("network %s, host %s: %s", network.ID, host, address)
			}
			seen[address] = true
		}
	}
}

func TestChooseRedirect(t *testing.T) {
	subnets, err := Subnets("10.1.0.0/24", "fd00:1::/64")
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		endpoint string
		listen   []string
		to       string // empty if the endpoint is refused, or without an endpoint
	}{
		"no endpoint":       {"", []string{"10.1.0.1:6443"}, ""},
		"IPv4":              {"192.0.2.1:20000", []string{"198.51.100.1:443", "10.1.0.1:6443"}, "10.1.0.1:6443"},
		"IPv6":              {"[fd00::1]:20000", []string{"10.1.0.1:6443", "[fd00:1::1]:6443"}, "[fd00:1::1]:6443"},
		"no such family":    {"[fd00::1]:20000", []string{"10.1.0.1:6443"}, ""},
		"none in the range": {"192.0.2.1:20000", []string{"198.51.100.1:443"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ChooseRedirect("n", test.endpoint, test.listen, subnets)
			if test.to == "" {
				if (err == nil) != (test.endpoint == "") || got.To.IsValid() {
					t.Errorf("got %v, %v", got, err)
				}
			} else if err != nil || got.To.String() != test.to || got.Endpoint.String() != test.endpoint {
				t.Errorf("got %v, %v, want %s", got, err, test.to)
			}
		})
	}
}

// From the subject of a conflict, the manager sees if another capstand of the box uses another tunnel address for the network.
func TestSubjectOfOverlays(t *testing.T) {
	with := func(address string, mtu int) *Overlay {
		return &Overlay{VNI: 5000, Address: netip.MustParseAddr(address), MTU: mtu}
	}
	for name, tc := range map[string]struct {
		wanted, recorded *Overlay
		subject          string
	}{
		"another tunnel address": {with("192.0.2.1", 1450), with("192.0.2.9", 1450), "192.0.2.9"},
		"another MTU":            {with("192.0.2.1", 1450), with("192.0.2.1", 1400), "10.1.0.0/16"},
		"recorded without one":   {with("192.0.2.1", 1450), nil, "10.1.0.0/16"},
		"wanted without one":     {nil, with("192.0.2.9", 1450), "10.1.0.0/16"},
	} {
		wanted, recorded := Network{ID: "n", CIDR: "10.1.0.0/16", Overlay: tc.wanted}, Network{ID: "n", CIDR: "10.1.0.0/16", Overlay: tc.recorded}
		var conflict ConflictError
		if err := admitOverlay(wanted, recorded); !errors.As(err, &conflict) || conflict.Subject != tc.subject {
			t.Errorf("%s: %v about %q, want %q", name, err, conflict.Subject, tc.subject)
		}
	}
}
