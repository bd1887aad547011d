// Package overhead states by how much the packets between hosts are larger than the packets of machines in them, and the limits of an
// overlay. A manager chooses the MTU and the VXLAN network identifier of a cluster with it. A host checks both, and compares the MTU with
// its interfaces.
//
// Layer: contract. Allowed imports: api, library.
package overhead

import "net/netip"

// EthernetMTU is the largest IP packet of a link that nobody has configured, in bytes.
const EthernetMTU = 1500

// MinMTU is the smallest MTU of machines, in bytes: IPv6 needs it.
const MinMTU = 1280

const (
	// MinVNI is the first VXLAN network identifier of clusters. Those below are left to the administrators.
	MinVNI = 4096
	// MaxVNI is the last one.
	MaxVNI = 1<<24 - 1
)

// VXLANIPv6 are the bytes of VXLAN over IPv6: inner Ethernet, VXLAN, UDP and outer IP header. Encrypted packets have them inside of
// WireGuard.
const VXLANIPv6 = 70

const (
	// vxlanIPv4 are the bytes of VXLAN over IPv4.
	vxlanIPv4 = 50
	// wireGuardIPv4 and wireGuardIPv6 are the bytes of WireGuard: WireGuard, UDP and outer IP header.
	wireGuardIPv4, wireGuardIPv6 = 60, 80
)

// Of returns the bytes that packets between tunnel addresses of this family have beside the packet of a machine.
func Of(tunnel netip.Addr, encrypted bool) int {
	ipv4 := tunnel.Unmap().Is4()
	switch {
	case encrypted && ipv4:
		return wireGuardIPv4 + VXLANIPv6
	case encrypted:
		return wireGuardIPv6 + VXLANIPv6
	case ipv4:
		return vxlanIPv4
	}
	return VXLANIPv6
}
