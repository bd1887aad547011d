package cidr

import (
	"net"
	"net/netip"
	"testing"
)

func TestOfPeer(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1:4000": "192.0.2.1/32", "[::ffff:192.0.2.1]:4000": "192.0.2.1/32",
		"[2001:db8:0:1:2:3:4:5]:4000": "2001:db8:0:1::/64", "[fe80::1%eth0]:4000": "fe80::/64",
	} {
		if got := OfPeer(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))).String(); got != want {
			t.Errorf("%s: found %s, want %s", address, got, want)
		}
	}
}
