package network

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/net"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/overhead"
)

// DefaultPorts are the ports at which the load balancers of clusters that span several hosts listen.
const DefaultPorts = "20000-23999"

// ChooseVNI returns an identifier that none of the clusters has. The search starts at a hash of the cluster's id. Two management
// clusters that share hosts therefore seldom choose the same one, and tenants cannot predict it. If a host has refused the
// identifier after, the search starts behind it.
func ChooseVNI(id string, taken map[int32]bool, after int32) (int32, error) {
	const size = overhead.MaxVNI - overhead.MinVNI + 1
	start := start(id, size)
	if after != 0 {
		start = uint32(after-overhead.MinVNI+1) % size
	}
	for i := range uint32(size) {
		if vni := int32(overhead.MinVNI + (start+i)%size); !taken[vni] && vni != after {
			return vni, nil
		}
	}
	return 0, fmt.Errorf("no VXLAN network identifier between %d and %d is free: delete clusters", overhead.MinVNI, overhead.MaxVNI)
}

// ChoosePort returns a port of the range that is not taken; see ChooseVNI.
func ChoosePort(id string, ports net.PortRange, taken map[int32]bool, after int32) (int32, error) {
	start := start(id, uint32(ports.Size))
	if after != 0 {
		start = uint32(int(after)-ports.Base+1) % uint32(ports.Size)
	}
	for i := range uint32(ports.Size) {
		if port := int32(ports.Base + int((start+i)%uint32(ports.Size))); !taken[port] && port != after {
			return port, nil
		}
	}
	return 0, fmt.Errorf("no port of %s is free on the load balancer's host: set spec.loadBalancer.port, or give the manager a larger --endpoint-port-range", ports)
}

func start(id string, size uint32) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	return h.Sum32() % size
}

// Rival returns the cluster that has the same identifier and comes first, or nil. A cluster whose machines may boot comes
// before one whose machines wait: a namespace can write an identifier into an old CapstanCluster, but not into one whose machines may
// boot. Then the older one comes first.
func Rival(c *infrav1.CapstanCluster, all []infrav1.CapstanCluster) *infrav1.CapstanCluster {
	vni := c.Spec.Network.Overlay.VNI
	for i := range all {
		if o := &all[i]; vni != 0 && o.UID != c.UID && o.Spec.Network.Overlay.VNI == vni && before(o, c) {
			return o
		}
	}
	return nil
}

// RivalEndpoint returns a cluster that has the same virtual address as its endpoint and comes first, as Rival does, or nil.
func RivalEndpoint(c *infrav1.CapstanCluster, all []infrav1.CapstanCluster) *infrav1.CapstanCluster {
	host := c.Spec.ControlPlaneEndpoint.Host
	for i := range all {
		if o := &all[i]; host != "" && o.UID != c.UID && o.Spec.ControlPlaneEndpoint.Host == host && before(o, c) {
			return o
		}
	}
	return nil
}

// maxVirtualBits limits a network of virtual addresses to 65536 addresses, as the validation of CapstanHosts does.
const maxVirtualBits = 16

// OfFamily returns the networks of virtual addresses of one family.
func OfFamily(networks []string, ipv6 bool) (out []netip.Prefix) {
	for _, text := range networks {
		if p, err := netip.ParsePrefix(text); err == nil && p.Addr().Is6() == ipv6 && hostBits(p) <= maxVirtualBits {
			out = append(out, p.Masked())
		}
	}
	return out
}

func hostBits(p netip.Prefix) int { return p.Addr().BitLen() - p.Bits() }

// ChooseVirtualAddress returns an address of the networks that is not taken. The search starts at a place that depends on the id of the
// cluster, as in ChooseVNI. There is at least one network.
func ChooseVirtualAddress(id string, networks []netip.Prefix, taken map[string]bool) (string, error) {
	size := uint32(0)
	for _, p := range networks {
		size += 1 << hostBits(p)
	}
	for i, first := uint32(0), start(id, size); i < size; i++ {
		if a := at(networks, (first+i)%size).String(); !taken[a] {
			return a, nil
		}
	}
	return "", fmt.Errorf("no virtual address of %v is free on the load balancer's host: add some to its spec.virtualAddresses, or set controlPlaneEndpoint", networks)
}

// at returns an address by its place in the networks, which have more addresses than that.
func at(prefixes []netip.Prefix, place uint32) netip.Addr {
	for _, p := range prefixes {
		if size := uint32(1) << hostBits(p); place >= size {
			place -= size
			continue
		}
		raw := p.Addr().AsSlice()
		low := raw[len(raw)-4:]
		binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)+place)
		address, _ := netip.AddrFromSlice(raw)
		return address
	}
	return netip.Addr{}
}

func before(a, b *infrav1.CapstanCluster) bool {
	running := func(c *infrav1.CapstanCluster) int {
		if c.AllowsBoot() {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(running(a), running(b)),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare[types.UID](a.UID, b.UID)) < 0
}
