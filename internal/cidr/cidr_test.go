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
