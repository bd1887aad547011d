package network_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/network"
)

var pool = netip.MustParsePrefix("10.200.0.0/22")

func TestChoose(t *testing.T) {
	for name, tc := range map[string]struct {
		taken []string
		after string
		want  string
	}{
		"first":                        {want: "10.200.0.0/24"},
		"next to one that is taken":    {taken: []string{"10.200.0.0/24"}, want: "10.200.1.0/24"},
		"a gap":                        {taken: []string{"10.200.0.0/24", "10.200.2.0/24"}, want: "10.200.1.0/24"},
		"behind a larger one":          {taken: []string{"10.200.0.0/23"}, want: "10.200.2.0/24"},
		"besides a smaller one":        {taken: []string{"10.200.0.64/28"}, want: "10.200.1.0/24"},
		"others do not matter":         {taken: []string{"192.168.0.0/16", "fd00::/8"}, want: "10.200.0.0/24"},
		"behind a refused one":         {after: "10.200.1.0/24", want: "10.200.2.0/24"},
		"wraps around":                 {after: "10.200.3.0/24", want: "10.200.0.0/24"},
		"never the refused one again":  {after: "10.200.1.0/24", taken: []string{"10.200.0.0/24", "10.200.2.0/23"}},
		"none is left":                 {taken: []string{"10.200.0.0/16"}},
		"refused one outside the pool": {after: "172.16.0.0/24", want: "10.200.0.0/24"},
	} {
		t.Run(name, func(t *testing.T) {
			var after netip.Prefix
			if tc.after != "" {
				after = netip.MustParsePrefix(tc.after)
			}
			got, err := network.Choose(pool, 24, network.Parse(tc.taken...), after)
			if (err != nil) != (tc.want == "") || err == nil && got.String() != tc.want {
				t.Errorf("Choose: got %v, %v; want %q", got, err, tc.want)
			}
		})
	}
	if _, err := network.Choose(pool, 20, nil, netip.Prefix{}); err == nil {
		t.Error("a network larger than the pool was chosen")
	}
	last := netip.MustParsePrefix("255.255.255.0/24")
	if got, err := network.Choose(last, 25, nil, netip.MustParsePrefix("255.255.255.128/25")); err != nil || got.String() != "255.255.255.0/25" {
		t.Errorf("at the end of the address space: %v, %v", got, err)
	}
}

func TestChooseAddress(t *testing.T) {
	cidr := netip.MustParsePrefix("10.200.8.0/29") // .0 network, .1 gateway, .2 to .6, .7 broadcast
	for name, tc := range map[string]struct {
		taken []string
		after string
		want  string
	}{
		"first behind the gateway":     {want: "10.200.8.2"},
		"lowest gap":                   {taken: []string{"10.200.8.2", "10.200.8.4"}, want: "10.200.8.3"},
		"last one":                     {taken: []string{"10.200.8.2", "10.200.8.3", "10.200.8.4", "10.200.8.5"}, want: "10.200.8.6"},
		"none is left":                 {taken: []string{"10.200.8.2", "10.200.8.3", "10.200.8.4", "10.200.8.5", "10.200.8.6"}},
		"none is left, wherever":       {after: "10.200.8.4", taken: []string{"10.200.8.2", "10.200.8.3", "10.200.8.4", "10.200.8.5", "10.200.8.6"}},
		"behind the last choice":       {after: "10.200.8.3", want: "10.200.8.4"},
		"gaps before it wait":          {after: "10.200.8.4", taken: []string{"10.200.8.5"}, want: "10.200.8.6"},
		"wraps around":                 {after: "10.200.8.6", want: "10.200.8.2"},
		"the last choice again":        {after: "10.200.8.3", taken: []string{"10.200.8.2", "10.200.8.4", "10.200.8.5", "10.200.8.6"}, want: "10.200.8.3"},
		"last choice in other network": {after: "10.200.16.3", want: "10.200.8.2"},
	} {
		t.Run(name, func(t *testing.T) {
			var after netip.Addr
			if tc.after != "" {
				after = netip.MustParseAddr(tc.after)
			}
			got, free := network.ChooseAddress(cidr, after, 10, func(a netip.Addr) bool { return slices.Contains(tc.taken, a.String()) })
			if free != (tc.want != "") || free && got.String() != tc.want {
				t.Errorf("ChooseAddress: got %v, %v; want %q", got, free, tc.want)
			}
		})
	}
}

// A search continues behind the last address of the one before, and finds the only free address. A full network has none.
func TestChooseAddressInParts(t *testing.T) {
	for name, tc := range map[string]struct {
		cidr, free string
		most       int
		want       []string
	}{
		"the last one":   {"10.200.8.0/29", "10.200.8.6", 2, []string{"10.200.8.3", "10.200.8.5", "10.200.8.6"}},
		"none":           {"10.200.8.0/29", "", 2, []string{"10.200.8.3", "10.200.8.5", "10.200.8.2"}},
		"one at a time":  {"10.200.8.0/29", "10.200.8.3", 1, []string{"10.200.8.2", "10.200.8.3"}},
		"a huge network": {"fd00::/64", "fd00::5", 2, []string{"fd00::3", "fd00::5"}},
	} {
		cidr, after, taken, got, found := netip.MustParsePrefix(tc.cidr), netip.Addr{}, 0, []string{}, false
		for !found && len(got) < len(tc.want) {
			after, found = network.ChooseAddress(cidr, after, tc.most, func(a netip.Addr) bool {
				if a.String() == tc.free {
					return false
				}
				taken++
				return true
			})
			got = append(got, after.String())
			if !found && network.IsFull(cidr, taken) != (tc.free == "" && len(got) == len(tc.want)) {
				t.Errorf("%s: after %d taken addresses, full: %v", name, taken, network.IsFull(cidr, taken))
			}
		}
		if !slices.Equal(got, tc.want) || found != (tc.free != "") {
			t.Errorf("%s: %v, found: %v", name, got, found)
		}
	}
}

// IPAM-08: without pools, the IPv6 address follows from the IPv4 address.
func TestBesides(t *testing.T) {
	for name, tc := range map[string]struct{ four, addr, six, want string }{
		"the first":         {"10.200.8.0/21", "10.200.8.2", "fd00:1::/64", "fd00:1::2"},
		"far behind":        {"10.200.8.0/21", "10.200.15.254", "fd00:1::/64", "fd00:1::7fe"},
		"an odd base":       {"10.200.8.0/21", "10.200.8.2", "fd00:1::ff00/120", "fd00:1::ff02"},
		"as far as it goes": {"10.200.8.0/21", "10.200.8.255", "fd00:1::ff00/120", "fd00:1::ffff"},
		"no place":          {"10.200.8.0/21", "10.200.9.0", "fd00:1::ff00/120", ""},
		"at the very end":   {"10.200.8.0/21", "10.200.9.0", "fd00:1::ffff:ffff:ffff:ff00/120", ""},
	} {
		got, err := network.Besides(netip.MustParsePrefix(tc.four), netip.MustParseAddr(tc.addr), netip.MustParsePrefix(tc.six))
		if (err != nil) != (tc.want == "") || err == nil && got.String() != tc.want {
			t.Errorf("%s: %v, %v, want %q", name, got, err, tc.want)
		}
	}
}

func TestCheckEndpoint(t *testing.T) {
	four, six := infrav1.ClusterNetworkSpec{MachineCIDR: "10.200.8.0/21"}, infrav1.ClusterNetworkSpec{MachineCIDR: "fd00::/64"}
	for name, tc := range map[string]struct {
		machines infrav1.ClusterNetworkSpec
		hosts    []string
		refused  bool
	}{
		"none":                 {six, []string{"", ""}, false},
		"IPv6":                 {six, []string{"2001:db8::1"}, false},
		"a name":               {six, []string{"api.example.com"}, false},
		"IPv4":                 {six, []string{"", "192.0.2.1"}, true},
		"IPv4 for IPv4":        {four, []string{"192.0.2.1"}, false},
		"IPv6 besides IPv4":    {four, []string{"2001:db8::1"}, false},
		"IPv4, no network yet": {infrav1.ClusterNetworkSpec{}, []string{"192.0.2.1"}, false},
	} {
		if err := network.CheckEndpoint(tc.machines, tc.hosts...); (err != nil) != tc.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValidate(t *testing.T) {
	for name, tc := range map[string]struct {
		machine, ipv6  string
		pods, services []string
		why            string
	}{
		"all right":              {machine: "10.200.8.0/21", pods: []string{"192.168.0.0/16", "fd00:1::/48"}, services: []string{"10.96.0.0/16", "fd00:2::/112"}},
		"nothing given":          {},
		"not a network":          {machine: "10.200.8.0", why: `machine network "10.200.8.0" is not a network`},
		"host bits":              {machine: "10.200.8.1/21", why: "without host bits"},
		"IPv6 alone":             {machine: "fd00::/64", pods: []string{"fd00:1::/56"}, services: []string{"fd00:2::/112"}},
		"IPv6, too small":        {machine: "fd00::/126", why: "IPv6 network of /125 or larger"},
		"IPv6, link-local":       {machine: "fe80::/64", why: "link-local"},
		"IPv6 twice":             {machine: "fd00::/64", ipv6: "fd00:1::/64", why: "is IPv6 and machineIPv6CIDR is fd00:1::/64"},
		"IPv4 pods, IPv6":        {machine: "fd00::/64", pods: []string{"10.244.0.0/16"}, why: "pod network 10.244.0.0/16 has another family than the machines, which have IPv6 addresses only"},
		"IPv4 Services, IPv6":    {machine: "fd00::/64", pods: []string{"fd00:1::/56"}, services: []string{"10.96.0.0/16"}, why: "first Service network 10.96.0.0/16"},
		"IPv6 pods, IPv4":        {machine: "10.200.8.0/21", pods: []string{"fd00:1::/56"}, why: "pod network fd00:1::/56 has another family than the machines, which have IPv4 addresses first"},
		"IPv6 pods, open":        {pods: []string{"fd00:1::/56"}, why: "set spec.network.machineCIDR of the CapstanCluster to an IPv6 network"},
		"IPv6 Services first":    {machine: "10.200.8.0/21", ipv6: "fd00::/64", services: []string{"fd00:2::/112", "10.96.0.0/16"}, why: "first Service network fd00:2::/112"},
		"IPv6 pods first":        {machine: "10.200.8.0/21", ipv6: "fd00::/64", pods: []string{"fd00:1::/56", "10.244.0.0/16"}},
		"dual stack":             {machine: "10.200.8.0/21", ipv6: "fd00:200:8::/64", pods: []string{"192.168.0.0/16", "fd00:1::/56"}},
		"dual stack, IPv4 open":  {ipv6: "fd00:200:8::/64"},
		"IPv4 as IPv6":           {machine: "10.200.8.0/21", ipv6: "10.1.0.0/24", why: "must be an IPv6 network"},
		"IPv6 too small":         {ipv6: "fd00::/126", why: "/125 or larger"},
		"IPv6 host bits":         {ipv6: "fd00::1/64", why: "without host bits"},
		"IPv6 link-local":        {ipv6: "fe80::/64", why: "link-local"},
		"pods in IPv6 machines":  {ipv6: "fd00:1::/64", pods: []string{"fd00::/16"}, why: "overlaps machine network fd00:1::/64"},
		"too small":              {machine: "10.200.8.0/30", why: "/29 or larger"},
		"pods in the machines":   {machine: "10.200.8.0/21", pods: []string{"10.200.0.0/16"}, why: "pod network 10.200.0.0/16 overlaps machine network 10.200.8.0/21"},
		"Services in the pods":   {pods: []string{"10.0.0.0/8"}, services: []string{"10.96.0.0/16"}, why: "Service network 10.96.0.0/16 overlaps pod network 10.0.0.0/8"},
		"malformed pod network":  {pods: []string{"x"}, why: `pod network "x" is not a network`},
		"malformed Service CIDR": {services: []string{"10.96.0.0/33"}, why: "Service network"},
	} {
		t.Run(name, func(t *testing.T) {
			err := network.Validate(infrav1.ClusterNetworkSpec{MachineCIDR: tc.machine, MachineIPv6CIDR: tc.ipv6}, tc.pods, tc.services)
			if (err != nil) != (tc.why != "") || err != nil && !strings.Contains(err.Error(), tc.why) {
				t.Errorf("Validate: got %v, want %q", err, tc.why)
			}
		})
	}
}
