package network

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/overhead"
)

func TestOverlayFits(t *testing.T) {
	for name, tc := range map[string]struct {
		tunnel    string
		encrypted bool
		mtu, link int
		most      string // what the error names; empty: it fits
	}{
		"default":              {"192.0.2.1", false, 1450, 1500, ""},
		"default, small link":  {"192.0.2.1", false, 1450, 1400, ""},
		"large":                {"192.0.2.1", false, 8950, 9000, ""},
		"too large":            {"192.0.2.1", false, 8951, 9000, "8950 at most"},
		"too large, IPv6":      {"2001:db8::1", false, 8931, 9000, "8930 at most"},
		"encrypted":            {"192.0.2.1", true, 8870, 9000, ""},
		"encrypted, too large": {"192.0.2.1", true, 8871, 9000, "8870 at most"},
		"encrypted, IPv6":      {"2001:db8::1", true, 8851, 9000, "8850 at most"},
		"usual link":           {"192.0.2.1", false, 1451, 1500, "1450 at most"},
	} {
		o := Overlay{Address: netip.MustParseAddr(tc.tunnel), MTU: tc.mtu}
		err := o.fits("eth1", tc.link, overhead.Of(o.Address, tc.encrypted))
		if (err == nil) != (tc.most == "") || err != nil && !strings.Contains(err.Error(), tc.most) {
			t.Errorf("%s: %v, want %q", name, err, tc.most)
		}
	}
}

// The loopback interface has its own size.
func TestFitsLink(t *testing.T) {
	o := Overlay{Address: netip.MustParseAddr("127.0.0.1"), MTU: 9000}
	if err := FitsLink(o, false); err != nil {
		t.Error(err)
	}
	o.MTU = 1 << 20
	if err := FitsLink(o, false); err == nil || !strings.Contains(err.Error(), "interface lo ") {
		t.Errorf("a packet of 1 MiB: %v", err)
	}
}

// Only small interfaces of the box itself count, with each of their addresses.
func TestLinkMTUs(t *testing.T) {
	r := &rack{T: t, bridgeNF: "0"}
	var found map[string]int32
	r.must(in(r.namespace(), func() error {
		for name, link := range map[string]struct {
			mtu       int
			addresses []string
		}{
			"vpn0":   {1400, []string{"192.0.2.1/24", "2001:db8::1/64"}},
			"eth0":   {1500, []string{"198.51.100.1/24"}},
			"jumbo0": {9000, []string{"203.0.113.1/24"}},
			"capnet": {1440, []string{"192.0.2.129/25"}}, // a bridge of the administrator

			BridgeName("one"): {1450, []string{"10.200.0.1/21"}},
		} {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.MTU = name, link.mtu
			bridge := &netlink.Bridge{LinkAttrs: attrs}
			if err := errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge)); err != nil {
				return err
			}
			for _, text := range link.addresses {
				address, err := netlink.ParseAddr(text)
				if err := errors.Join(err, netlink.AddrAdd(bridge, address)); err != nil {
					return err
				}
			}
		}
		var err error
		found, err = LinkMTUs()
		return err
	}))
	if want := map[string]int32{"192.0.2.1": 1400, "2001:db8::1": 1400, "192.0.2.129": 1440}; !maps.Equal(found, want) {
		t.Errorf("%v, want %v", found, want)
	}
}
