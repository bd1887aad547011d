// Package cidr says which networks machines can have at all. The infrastructure provider asks it at
// admission, and capstand once more: a host trusts nobody with its own loopback.
package cidr

import (
	"fmt"
	"net/netip"
)

// special networks, which no machine can be in, whatever the host routes.
var special = []struct {
	prefix netip.Prefix
	use    string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "this host"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local addresses"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved addresses"},
	{netip.MustParsePrefix("::/127"), "this host and loopback"},
	{netip.MustParsePrefix("fe80::/10"), "link-local addresses"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// Usable returns nil when machines can have addresses of the network, and says why not otherwise.
func Usable(network netip.Prefix) error {
	for _, s := range special {
		if s.prefix.Overlaps(network) {
			return fmt.Errorf("network %s overlaps %s, which is for %s: choose another one, for example 10.200.8.0/21", network, s.prefix, s.use)
		}
	}
	return nil
}
