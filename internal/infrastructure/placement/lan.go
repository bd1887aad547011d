package placement

import (
	"fmt"
	"net/netip"
	"slices"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// LAN is the network of the user that the machines of a cluster are attached to.
type LAN struct {
	// Name of the entry of spec.lanNetworks; empty for a cluster with a network of its own.
	Name string
	// VLAN of the LAN; 0 for none.
	VLAN int32
	// CIDR is the machine network of the cluster, and IPv6CIDR its second one if it is dual stack.
	CIDR, IPv6CIDR string
	// Addresses of the machine; empty if they are not known.
	Addresses []string
}

// oldForIPv6 says why a host has no part of a network with IPv6 in a LAN.
const oldForIPv6 = "cannot attach machines with IPv6 addresses to a LAN: upgrade its capstand, or start the host with IPv6"

// OldForVLANs says why a host has no part of a network in a VLAN: its capstand would ignore the VLAN.
const OldForVLANs = "cannot attach machines to a VLAN of a LAN: upgrade its capstand"

// LANOf returns the network of the user that the machines of a cluster are attached to, for a machine with these addresses.
func LANOf(c *infrav1.CapstanCluster, addresses []infrav1.InterfaceAddress) LAN {
	lan := LAN{Name: c.Spec.Network.LAN.Name, VLAN: c.Spec.Network.LAN.VLAN, CIDR: c.Spec.Network.MachineCIDR, IPv6CIDR: c.Spec.Network.MachineIPv6CIDR}
	for _, a := range addresses {
		lan.Addresses = append(lan.Addresses, a.Address)
	}
	return lan
}

// Offer returns the entry of a LAN that a host allows for the namespace, or nil.
func (p Permissions) Offer(lan LAN) *infrav1.LANNetwork {
	i := slices.IndexFunc(p.LANs, func(n infrav1.LANNetwork) bool { return n.Name == lan.Name })
	if i < 0 {
		return nil
	}
	return &p.LANs[i]
}

// LANRefusal returns why a host does not attach a machine of a namespace to a LAN, with the remedy, or "". It names no other
// network of the host, because these may belong to other tenants.
func (p Permissions) LANRefusal(namespace string, lan LAN) string {
	if lan.Name == "" {
		return ""
	}
	offer := p.Offer(lan)
	switch {
	case offer == nil:
		return fmt.Sprintf("does not offer the LAN %s to namespace %s: its administrator has to allow it in spec.lanNetworks", lan.Name, namespace)
	case !offersVLAN(offer, lan.VLAN):
		return vlanRefusal(offer, namespace, lan)
	case offer.CIDR != lan.CIDR && (offer.IPv6CIDR != lan.CIDR || lan.CIDR == ""):
		return fmt.Sprintf("has the LAN %s with the network %s, and the cluster's machine network is %s: all hosts of a LAN need the same cidr in spec.lanNetworks; create the cluster without spec.network.machineCIDR", lan.Name, networks(offer), lan.CIDR)
	case lan.IPv6CIDR != "" && offer.IPv6CIDR == "":
		return fmt.Sprintf("has the LAN %s with the network %s, and the cluster's spec.network.machineIPv6CIDR is %s: its administrator has to set ipv6CIDR in spec.lanNetworks; or create the cluster without machineIPv6CIDR", lan.Name, offer.CIDR, lan.IPv6CIDR)
	case lan.IPv6CIDR != "" && offer.IPv6CIDR != lan.IPv6CIDR:
		return fmt.Sprintf("has the LAN %s with the IPv6 network %s, and the cluster's spec.network.machineIPv6CIDR is %s: all hosts of a LAN need the same ipv6CIDR in spec.lanNetworks; create the cluster with it", lan.Name, offer.IPv6CIDR, lan.IPv6CIDR)
	}
	for _, address := range lan.Addresses {
		if !slices.ContainsFunc(offer.Addresses, func(text string) bool { return contains(text, address) }) {
			return fmt.Sprintf("does not allow machines of namespace %s to have the address %s in the LAN %s: use a pool of its addresses in spec.lanNetworks", namespace, address, lan.Name)
		}
		if slices.ContainsFunc(p.Virtual, func(text string) bool { return contains(text, address) }) {
			return fmt.Sprintf("keeps the address %s for the endpoints of clusters (spec.virtualAddresses of a host in the LAN %s): exclude it from the pool", address, lan.Name)
		}
	}
	return ""
}

// hasIPv6 reports whether the machines of a cluster have IPv6 addresses in the LAN.
func (l LAN) hasIPv6() bool {
	first, err := netip.ParsePrefix(l.CIDR)
	return l.Name != "" && (l.IPv6CIDR != "" || err == nil && first.Addr().Is6())
}

func networks(offer *infrav1.LANNetwork) string {
	if offer.IPv6CIDR == "" {
		return offer.CIDR
	}
	return offer.CIDR + " or " + offer.IPv6CIDR
}

// offersVLAN reports whether an entry admits machines in a VLAN, or without one if vlan is 0.
func offersVLAN(offer *infrav1.LANNetwork, vlan int32) bool {
	if vlan == 0 {
		return len(offer.VLANs) == 0
	}
	return slices.Contains(offer.VLANs, vlan)
}

func vlanRefusal(offer *infrav1.LANNetwork, namespace string, lan LAN) string {
	switch {
	case len(offer.VLANs) == 0:
		return fmt.Sprintf("offers the LAN %s without VLANs, and the cluster is in VLAN %d: create the cluster without spec.network.lan.vlan, or its administrator has to add the VLAN to vlans of spec.lanNetworks", lan.Name, lan.VLAN)
	case lan.VLAN == 0:
		return fmt.Sprintf("offers the LAN %s in the VLANs %v only, and the cluster has none: create the cluster with one of them in spec.network.lan.vlan", lan.Name, offer.VLANs)
	}
	return fmt.Sprintf("does not offer VLAN %d of the LAN %s to namespace %s, only %v: create the cluster with one of them, or its administrator has to add the VLAN to vlans of spec.lanNetworks", lan.VLAN, lan.Name, namespace, offer.VLANs)
}

func contains(network, address string) bool {
	prefix, err := netip.ParsePrefix(network)
	addr, invalid := netip.ParseAddr(address)
	return err == nil && invalid == nil && prefix.Contains(addr)
}
