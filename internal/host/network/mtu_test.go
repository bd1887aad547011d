package network

import (
	"net/netip"
	"strings"
	"testing"

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
