// Package cidr defines the networks that machines can have. The infrastructure provider checks them at admission, and
// capstand checks them again, because a host must protect its own loopback. It also defines the network that counts as one peer.
//
// Layer: library. Allowed imports: api.
package cidr

import (
	"fmt"
	"net/netip"
)

// DefaultPods is the pod network of Clusters that name none.
const DefaultPods = "10.244.0.0/16"

// The networks of addresses that capstand gives to hosts. They are not routed on other networks.
var (
	// Hosts contains the sources of connections from hosts to machines with IPv6 only.
	Hosts = netip.MustParsePrefix("4000::/16")
	// EncryptedLink contains the ends of encrypted tunnels.
	EncryptedLink = netip.MustParsePrefix("fdca:9574::/32")
)

// special networks, which no machine can use, regardless of the host's routes.
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
	{Hosts, "hosts"},
	{EncryptedLink, "encrypted tunnels between hosts"},
}

// metadata is the address at which clouds serve credentials of their machines over IPv6. 169.254.169.254 is link-local.
var metadata = netip.MustParseAddr("fd00:ec2::254")

// embedded are the networks whose addresses lead to the IPv4 address in their last 32 bits.
var embedded = []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("::/96")}

// Remote returns nil if an address can belong to another machine, and the reason otherwise. Connections to addresses
// that tenants configure are checked after the resolution of names: loopback and link-local addresses lead to services
// that trust all their clients.
func Remote(addr netip.Addr) error {
	addr = addr.WithZone("").Unmap()
	if addr == metadata {
		return fmt.Errorf("%s is the metadata service of a cloud", addr)
	}
	for _, s := range special {
		if s.prefix.Contains(addr) {
			return fmt.Errorf("%s is among %s, which is for %s", addr, s.prefix, s.use)
		}
	}
	for _, prefix := range embedded {
		if prefix.Contains(addr) {
			b := addr.As16()
			return Remote(netip.AddrFrom4([4]byte(b[12:])))
		}
	}
	return nil
}

// Usable returns nil if machines can have addresses of the network, and the reason otherwise.
func Usable(network netip.Prefix) error {
	for _, s := range special {
		if s.prefix.Overlaps(network) {
			return fmt.Errorf("network %s overlaps %s, which is for %s: choose another one, for example 10.200.8.0/21", network, s.prefix, s.use)
		}
	}
	return nil
}
