// Package network chooses the networks of clusters, the identifiers of their overlays, the ports and virtual addresses of their endpoints,
// and the addresses of machines. All of it is pure.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package network

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cidr"
)

const (
	// DefaultPool is the network that contains the machine networks of clusters.
	DefaultPool = "10.200.0.0/13"
	// DefaultBits is the prefix length of a machine network: /21 holds 2045 machines.
	DefaultBits = 21
)

// Choose returns a network of the given prefix length from the pool that overlaps none of taken. The
// search starts behind after, a network that was refused, and wraps around; the zero Prefix
// starts at the beginning.
func Choose(pool netip.Prefix, bits int, taken []netip.Prefix, after netip.Prefix) (netip.Prefix, error) {
	if bits < pool.Bits() || bits > 29 {
		return netip.Prefix{}, fmt.Errorf("the pool %s holds no networks of /%d: choose a prefix length between %d and 29", pool, bits, pool.Bits())
	}
	start := netip.PrefixFrom(pool.Masked().Addr(), bits)
	if after.IsValid() && pool.Contains(after.Addr()) {
		start = next(pool, netip.PrefixFrom(after.Addr(), bits).Masked())
	}
	for n, first := start, true; first || n != start; n, first = next(pool, n), false {
		if n != after && !overlapsAny(n, taken) {
			return n, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("no network of /%d is free in the pool %s: delete clusters, or give the manager a larger --machine-network-pool, or set spec.network.machineCIDR", bits, pool)
}

// next returns the network behind n, or the pool's first one behind the last.
func next(pool, n netip.Prefix) netip.Prefix {
	addr := netipx.PrefixLastIP(n).Next()
	if !addr.IsValid() || !pool.Contains(addr) {
		addr = pool.Masked().Addr()
	}
	return netip.PrefixFrom(addr, n.Bits())
}

func overlapsAny(n netip.Prefix, taken []netip.Prefix) bool {
	for _, t := range taken {
		if n.Overlaps(t) {
			return true
		}
	}
	return false
}

// Gateway is the first address of a network.
func Gateway(cidr netip.Prefix) netip.Addr { return cidr.Masked().Addr().Next() }

// ChooseAddress returns the first address of the network behind after that is not taken; the search wraps
// around and ends with after itself, and the zero Addr starts at the beginning. The network's own
// address, the gateway and the broadcast address are never chosen. The search ends after a number of taken addresses, of which it returns
// the last: the next search continues there.
func ChooseAddress(cidr netip.Prefix, after netip.Addr, most int, taken func(netip.Addr) bool) (address netip.Addr, free bool) {
	first, last := Gateway(cidr).Next(), netipx.PrefixLastIP(cidr).Prev()
	if !after.IsValid() || after.Less(first) || last.Less(after) {
		after = last
	}
	for a := after; ; most-- {
		if a == last {
			a = first
		} else {
			a = a.Next()
		}
		if !taken(a) {
			return a, true
		}
		if a == after || most == 1 {
			return a, false
		}
	}
}

// IsFull reports whether a network has no more addresses than a number of taken ones, which are different.
func IsFull(cidr netip.Prefix, taken int) bool {
	bits := cidr.Addr().BitLen() - cidr.Bits()
	return bits < 62 && taken >= 1<<bits-3 // without those that are never chosen
}

// Besides returns the IPv6 address that goes with an IPv4 address: it has the same offset in six as addr has in four,
// so that both are unique or neither is.
func Besides(four netip.Prefix, addr netip.Addr, six netip.Prefix) (netip.Addr, error) {
	base, own := four.Masked().Addr().As4(), addr.As4()
	distance := binary.BigEndian.Uint32(own[:]) - binary.BigEndian.Uint32(base[:])
	out := six.Masked().Addr().As16()
	low := binary.BigEndian.Uint64(out[8:])
	binary.BigEndian.PutUint64(out[8:], low+uint64(distance))
	besides := netip.AddrFrom16(out)
	if !six.Contains(besides) || low+uint64(distance) < low {
		return besides, fmt.Errorf("the machines' IPv6 network %s has no place for the machine that is %s in %s: use a larger machineIPv6CIDR, for example a /64", six, addr, four)
	}
	return besides, nil
}

// IPv6Only reports whether the machines of a cluster have only IPv6 addresses. Machines with another network have an IPv4
// address first.
func IPv6Only(n infrav1.ClusterNetworkSpec) bool {
	cidr, err := netip.ParsePrefix(n.MachineCIDR)
	return err == nil && cidr.Addr().Is6()
}

// Machines returns the networks of a cluster's machines: one, or IPv4 and IPv6 if they are dual stack (IPAM-08).
func Machines(n infrav1.ClusterNetworkSpec) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, text := range []string{n.MachineCIDR, n.MachineIPv6CIDR} {
		if text == "" && len(out) > 0 {
			break // not dual stack
		}
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("the cluster's machine network: %w", err)
		}
		out = append(out, cidr)
	}
	return out, nil
}

// Validate returns the errors of a cluster's networks: each must be a CIDR, they must not overlap, and their families must
// match. An empty machine network is an IPv4 network that does not exist yet.
func Validate(machines infrav1.ClusterNetworkSpec, pods, services []string) error {
	var all uses
	for _, text := range []string{machines.MachineCIDR, machines.MachineIPv6CIDR} {
		if text == "" {
			continue
		}
		if err := all.add("machine network", text); err != nil {
			return err
		}
		if err := usable(all[len(all)-1].cidr, text == machines.MachineIPv6CIDR); err != nil {
			return err
		}
	}
	if err := all.add("pod network", pods...); err != nil {
		return err
	}
	if err := all.add("Service network", services...); err != nil {
		return err
	}
	return matchFamilies(machines, Parse(pods...), Parse(services...))
}

// uses are the networks of a cluster, each with its use.
type uses []usedNetwork

type usedNetwork struct {
	use  string
	cidr netip.Prefix
}

// add parses networks, and refuses those that overlap another one.
func (u *uses) add(use string, cidrs ...string) error {
	for _, s := range cidrs {
		parsed, err := netip.ParsePrefix(s)
		if err != nil {
			return fmt.Errorf("%s %q is not a network: write it like 10.200.8.0/21", use, s)
		}
		for _, o := range *u {
			if o.cidr.Overlaps(parsed) {
				return fmt.Errorf("%s %s overlaps %s %s: choose networks that do not share addresses", use, parsed, o.use, o.cidr)
			}
		}
		*u = append(*u, usedNetwork{use, parsed})
	}
	return nil
}

// matchFamilies returns the reason why pods, Services and machines do not reach each other. The API server requires that the first
// network of Services has the family of its own address. A pod needs an address of this family to reach them.
func matchFamilies(machines infrav1.ClusterNetworkSpec, pods, services []netip.Prefix) error {
	ipv6 := IPv6Only(machines)
	has, remedy := "IPv4 addresses first", "for a cluster with IPv6 only, set spec.network.machineCIDR of the CapstanCluster to an IPv6 network"
	if ipv6 {
		has, remedy = "IPv6 addresses only", "set an IPv6 network"
	}
	fits := func(p netip.Prefix) bool { return p.Addr().Is6() == ipv6 }
	switch {
	case ipv6 && machines.MachineIPv6CIDR != "":
		return fmt.Errorf("machine network %s is IPv6 and machineIPv6CIDR is %s: leave machineIPv6CIDR out for machines with IPv6 only, or set an IPv4 machineCIDR for dual stack",
			machines.MachineCIDR, machines.MachineIPv6CIDR)
	case len(pods) > 0 && !slices.ContainsFunc(pods, fits):
		return fmt.Errorf("pod network %s has another family than the machines, which have %s: change spec.clusterNetwork.pods of the Cluster, or %s", pods[0], has, remedy)
	case len(services) > 0 && !fits(services[0]):
		return fmt.Errorf("the first Service network %s has another family than the machines, which have %s: change spec.clusterNetwork.services of the Cluster, or %s",
			services[0], has, remedy)
	}
	return nil
}

// CheckEndpoint returns the reason why machines with IPv6 only cannot reach an endpoint or an address of the load balancer. The
// addresses can be names or empty.
func CheckEndpoint(machines infrav1.ClusterNetworkSpec, hosts ...string) error {
	for _, host := range hosts {
		if addr, err := netip.ParseAddr(host); err == nil && addr.Is4() && IPv6Only(machines) {
			return fmt.Errorf("the control plane endpoint %s is IPv4, and the machines in %s have IPv6 addresses only: set an IPv6 address, or none", host, machines.MachineCIDR)
		}
	}
	return nil
}

// usable returns the reason why machines cannot have the network.
func usable(n netip.Prefix, ipv6 bool) error {
	switch {
	case (ipv6 || n.Addr().Is6()) && (!n.Addr().Is6() || n.Bits() > 125 || n != n.Masked()):
		return fmt.Errorf("machine network %s must be an IPv6 network of /125 or larger, without host bits", n)
	case n.Addr().Is4() && (n.Bits() > 29 || n != n.Masked()):
		return fmt.Errorf("machine network %s must be an IPv4 network of /29 or larger, without host bits", n)
	}
	if err := cidr.Usable(n); err != nil {
		return fmt.Errorf("machine %w", err)
	}
	return nil
}

// Parse returns the networks among cidrs that can be parsed; Validate reports the others.
func Parse(cidrs ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range cidrs {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}
