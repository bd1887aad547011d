package network

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"capstan.dev/capstan/internal/cidr"
)

// The names of a network or machine on a box contain hashes, because an interface name has at most 15 characters. All
// capstands of the box use the same names.

// BridgeName returns the name of a network's bridge.
func BridgeName(networkID string) string { return "cap" + hash(networkID) }

// TableName returns the name of a network's nftables table.
func TableName(networkID string) string { return "capstan-" + hash(networkID) }

// VethName returns the name of the host's end of a machine's cable.
func VethName(machineID string) string { return "cpm" + hash(machineID) }

// sameNames reports whether two ids of networks, or of machines, have the same names on a box. Ids are text of tenants, and their hashes are
// short: a tenant can search for an id with the names of another tenant.
func sameNames(a, b string) bool { return hash(a) == hash(b) }

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return fmt.Sprintf("%x", sum[:5])
}

// MAC returns the MAC address for an IP address in a network. It is always the same, so the neighbour tables stay correct
// when a new machine gets the address of a deleted one.
func MAC(networkID, address string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(networkID + " " + address))
	return append(net.HardwareAddr{0x02, 0xca}, sum[:4]...)
}

// gatewayMAC returns the MAC address of the bridge, which is the same on all boxes.
func gatewayMAC(networkID string, subnets []Subnet) net.HardwareAddr {
	return MAC(networkID, subnets[0].Gateway.String())
}

// ParseCIDR checks a machine network and returns it with its gateway, the first address.
func ParseCIDR(text string) (netip.Prefix, netip.Addr, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, netip.Addr{}, fmt.Errorf("network %q is not a CIDR: expected for example 10.200.8.0/21", text)
	}
	if prefix != prefix.Masked() {
		return netip.Prefix{}, netip.Addr{}, fmt.Errorf("network %s has host bits set: expected %s", text, prefix.Masked())
	}
	if err := cidr.Usable(prefix); err != nil {
		return netip.Prefix{}, netip.Addr{}, err
	}
	if prefix.Addr().BitLen()-prefix.Bits() < 2 {
		return netip.Prefix{}, netip.Addr{}, fmt.Errorf("network %s is too small for machines: expected at least 4 addresses", text)
	}
	return prefix, prefix.Addr().Next(), nil
}

// Subnet is the part of a network for one address family.
type Subnet struct {
	Prefix  netip.Prefix
	Gateway netip.Addr
}

// hasIPv6 returns whether one of the subnets is IPv6.
func hasIPv6(subnets []Subnet) bool {
	return slices.ContainsFunc(subnets, func(s Subnet) bool { return s.Prefix.Addr().Is6() })
}

// Subnets checks a machine network: one of any family, or with a second one IPv4 first and then IPv6.
func Subnets(cidr, ipv6 string) ([]Subnet, error) {
	prefix, gateway, err := ParseCIDR(cidr)
	if err != nil {
		return nil, err
	}
	all := []Subnet{{prefix, gateway}}
	if ipv6 == "" {
		return all, nil
	}
	if !prefix.Addr().Is4() {
		return nil, fmt.Errorf("network %s is IPv6 and has %s as its second network: expected an IPv4 network first, or no second network", cidr, ipv6)
	}
	if prefix, gateway, err = ParseCIDR(ipv6); err != nil {
		return nil, err
	}
	if !prefix.Addr().Is6() {
		return nil, fmt.Errorf("the second network %s is not IPv6", ipv6)
	}
	return append(all, Subnet{prefix, gateway}), nil
}

// CheckAddress returns an error if a machine of the network cannot have the address.
func CheckAddress(cidr netip.Prefix, address string, prefixLength int) error {
	addr, err := netip.ParseAddr(address)
	switch {
	case err != nil:
		return fmt.Errorf("%q is not an IP address", address)
	case !cidr.Contains(addr):
		return fmt.Errorf("address %s is not in the machine network %s", address, cidr)
	case prefixLength != cidr.Bits():
		return fmt.Errorf("address %s/%d has another prefix length than the machine network %s", address, prefixLength, cidr)
	case addr == cidr.Addr().Next():
		return fmt.Errorf("address %s is the gateway of the machine network %s", address, cidr)
	case addr == cidr.Addr(), addr.Is4() && addr == lastAddress(cidr):
		return fmt.Errorf("address %s is the network or broadcast address of %s", address, cidr)
	}
	return nil
}

// Served returns the addresses among a load balancer's listen addresses (host:port) that the bridge must have: those in the
// network, except the gateway, which the bridge already has.
func Served(cidr string, listen []string) ([]string, error) {
	prefix, gateway, err := ParseCIDR(cidr)
	if err != nil {
		return nil, err
	}
	var served []string
	for _, l := range listen {
		host, _, err := net.SplitHostPort(l)
		if err != nil {
			return nil, err
		}
		addr, err := netip.ParseAddr(host)
		if err != nil || !prefix.Contains(addr) || addr == gateway {
			continue
		}
		if err := CheckAddress(prefix, host, prefix.Bits()); err != nil {
			return nil, err
		}
		served = append(served, addr.String())
	}
	return served, nil
}

func lastAddress(p netip.Prefix) netip.Addr {
	raw := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(raw)*8; bit++ {
		raw[bit/8] |= 1 << (7 - bit%8)
	}
	last, _ := netip.AddrFromSlice(raw)
	return last
}

// UsedRange is a range of addresses that is in use.
type UsedRange struct {
	Prefix netip.Prefix
	By     string
}

// Used returns the range of one address.
func Used(a netip.Addr, by string) UsedRange {
	a = a.Unmap().WithZone("")
	return UsedRange{netip.PrefixFrom(a, a.BitLen()), by}
}

// overlap returns an error if a CIDR overlaps a used range.
func overlap(cidr netip.Prefix, used []UsedRange) error {
	for _, u := range used {
		if u.Prefix.Bits() > 0 && u.Prefix.Overlaps(cidr) { // A default route overlaps every network.
			return fmt.Errorf("network %s overlaps %s of %s: choose another network for the machines", cidr, u.Prefix, u.By)
		}
	}
	return nil
}
