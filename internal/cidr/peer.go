package cidr

import (
	"net"
	"net/netip"
)

// OfPeer returns the network that counts as one peer, for example for a limit of its connections: an IPv4 address, or the 64 bits of an
// IPv6 address that a provider assigns. A machine can use all addresses in these bits.
func OfPeer(address net.Addr) netip.Prefix {
	found, err := netip.ParseAddrPort(address.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := found.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	peer, _ := ip.Prefix(bits) // The number of bits is valid.
	return peer
}
