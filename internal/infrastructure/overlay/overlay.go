// Package overlay makes the request for the network of a cluster on a host, also on one host and in a LAN. It decides how the network spans
// several hosts: its MTU, the hosts that have a part of it, and the machines that each of them reaches on others. All functions are pure.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package overlay

import (
	"net/netip"

	"capstan.dev/capstan/internal/overhead"
)

// MTU of machines whose packets travel between tunnel addresses of this family, encrypted or not. links are the MTUs of interfaces
// that carry less than usual packets. Hosts whose interfaces are too small for the smallest MTU fragment.
func MTU(tunnel netip.Addr, encrypted bool, links []int32) int32 {
	path := int32(overhead.EthernetMTU)
	for _, mtu := range links {
		path = min(path, mtu)
	}
	return max(overhead.MinMTU, path-int32(overhead.Of(tunnel, encrypted)))
}
