package cidr

import (
	"net/netip"
	"strings"
	"testing"
)

func TestUsable(t *testing.T) {
	for network, want := range map[string]string{
		"10.200.8.0/21":  "",
		"192.168.0.0/24": "",
		"100.64.0.0/10":  "",
		"fd00:1::/64":    "",
		"127.0.0.0/8":    "loopback",
		"126.0.0.0/7":    "loopback",
		"0.0.0.0/0":      "this host",
		"169.254.7.0/24": "link-local",
		"224.0.0.0/24":   "multicast",
		"250.1.0.0/16":   "reserved",
		"::/64":          "loopback",
		"fe80::/64":      "link-local",
		"ff02::/64":      "multicast",
		"4000:1::/64":    "for hosts",
		"fdca::/16":      "encrypted tunnels",
	} {
		err := Usable(netip.MustParsePrefix(network))
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", network, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: want a word about %s, got %v", network, want, err)
		}
	}
}

// TestRemote: a tenant's address is that of another machine, however it is written.
func TestRemote(t *testing.T) {
	for _, good := range []string{"192.0.2.1", "10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "fd00::1"} {
		if err := Remote(netip.MustParseAddr(good)); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{
		"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.0.1", "169.254.169.254", "224.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1",
		"::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "4000::1", "fdca:9574::1",
	} {
		if err := Remote(netip.MustParseAddr(bad)); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}
