package network

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParseCIDR(t *testing.T) {
	for cidr, want := range map[string]string{ // gateway, or a word of the error
		"10.200.8.0/21": "10.200.8.1",
		"10.0.0.0/30":   "10.0.0.1",
		"fd00:1::/64":   "fd00:1::1",
		"10.200.8.1/21": "expected 10.200.8.0/21",
		"10.200.8.0":    "not a CIDR",
		"10.0.0.0/31":   "too small",
		"10.0.0.1/32":   "too small",
		"":              "not a CIDR",
	} {
		_, gateway, err := ParseCIDR(cidr)
		if err != nil {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v, want %q", cidr, err, want)
			}
		} else if gateway.String() != want {
			t.Errorf("%q: gateway %s, want %s", cidr, gateway, want)
		}
	}
}

// IPAM-08: one family, or IPv4 and IPv6.
func TestSubnets(t *testing.T) {
	for name, test := range map[string]struct{ cidr, ipv6, want string }{
		"IPv4":       {"10.1.0.0/24", "", "10.1.0.0/24 by 10.1.0.1"},
		"dual stack": {"10.1.0.0/24", "fd00:1::/64", "10.1.0.0/24 by 10.1.0.1, fd00:1::/64 by fd00:1::1"},
		"IPv6 only":  {"fd00:1::/64", "", "fd00:1::/64 by fd00:1::1"},
		"swapped":    {"fd00:1::/64", "10.1.0.0/24", "error: network fd00:1::/64 is IPv6 and has 10.1.0.0/24 as its second network"},
		"two IPv6":   {"fd00:1::/64", "fd00:2::/64", "error: network fd00:1::/64 is IPv6 and has fd00:2::/64 as its second network"},
		"two IPv4":   {"10.1.0.0/24", "10.2.0.0/24", "error: the second network 10.2.0.0/24 is not IPv6"},
		"host bits":  {"10.1.0.0/24", "fd00:1::1/64", "error: network fd00:1::1/64 has host bits"},
	} {
		subnets, err := Subnets(test.cidr, test.ipv6)
		var all []string
		for _, s := range subnets {
			all = append(all, s.Prefix.String()+" by "+s.Gateway.String())
		}
		got := strings.Join(all, ", ")
		if err != nil {
			got = "error: " + err.Error()
		}
		if !strings.HasPrefix(got, test.want) || test.want == "" {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}

func TestCheckAddress(t *testing.T) {
	for _, test := range []struct {
		cidr, address string
		bits          int
		says          string
	}{
		{"10.1.0.0/23", "10.1.1.255", 23, "broadcast"},
		{"10.1.0.0/23", "10.1.0.255", 23, ""}, // in the middle of the range
		{"10.1.0.0/23", "10.1.0.1", 23, "gateway"},
		{"10.1.0.0/23", "10.1.2.1", 23, "not in"},
		{"10.1.0.0/23", "10.1.0.9", 24, "prefix"},
		{"10.1.0.0/23", "nine", 23, "not an IP"},
		{"fd00:1::/64", "fd00:1::9", 64, ""},
		{"fd00:1::/64", "fd00:1::ffff:ffff:ffff:ffff", 64, ""}, // IPv6 has no broadcast
		{"fd00:1::/64", "10.1.0.9", 64, "not in"},
	} {
		err := CheckAddress(netip.MustParsePrefix(test.cidr), test.address, test.bits)
		if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s in %s: got %v, want %q", test.address, test.cidr, err, test.says)
		}
	}
}

func TestOverlap(t *testing.T) {
	used := []UsedRange{
		{netip.MustParsePrefix("0.0.0.0/0"), "the default route"},
		{netip.MustParsePrefix("10.1.0.0/16"), "cluster default/demo"},
		{netip.MustParsePrefix("192.168.7.0/24"), "the host's route through eth0"},
	}
	for cidr, by := range map[string]string{
		"10.2.0.0/24":    "",
		"10.1.9.0/24":    "default/demo", // within
		"10.0.0.0/8":     "default/demo", // around
		"192.168.0.0/16": "eth0",
		"fd00::/64":      "",
	} {
		err := overlap(netip.MustParsePrefix(cidr), used)
		if (err == nil) != (by == "") || err != nil && !strings.Contains(err.Error(), by) {
			t.Errorf("%s: got %v, want %q", cidr, err, by)
		}
	}
}

// Names fit into the kernel's 15 characters and differ; the same address keeps its MAC.
func TestNames(t *testing.T) {
	long := strings.Repeat("x", 63)
	for _, name := range []string{BridgeName(long), VethName(long)} {
		if len(name) > 15 {
			t.Errorf("%s has %d characters", name, len(name))
		}
	}
	if BridgeName("a") == BridgeName("b") {
		t.Error("two networks, one bridge")
	}
	mac := MAC("n", "10.1.0.9")
	if mac.String() != MAC("n", "10.1.0.9").String() || mac.String() == MAC("n", "10.1.0.10").String() {
		t.Error("the MAC address does not follow from the address")
	}
	if mac[0]&3 != 2 {
		t.Errorf("MAC %s is not locally administered unicast", mac)
	}
}

// Served returns the address that the bridge needs for a load balancer (IPAM-07).
func TestServed(t *testing.T) {
	for listen, want := range map[string]string{
		"10.0.0.1:6443":                "", // the bridge has the gateway's address already
		"192.0.2.7:6443":               "", // an address of the host
		"[2001:db8::7]:6443":           "",
		"10.0.0.1:6443 10.0.0.9:6443":  "10.0.0.9",
		"10.0.0.9:6443 10.0.0.10:6443": "10.0.0.9 10.0.0.10",
		"10.0.0.0:6443":                "error",
		"10.0.0.255:6443":              "error",
		"10.0.0.9":                     "error",
	} {
		served, err := Served("10.0.0.0/24", strings.Fields(listen))
		got := strings.Join(served, " ")
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %q (%v), want %q", listen, got, err, want)
		}
	}
}
