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
	// CIDR is the machine network of the cluster.
	CIDR string
	// Addresses of the machine; empty if they are not known.
	Addresses []string
}

// LANOf returns the network of the user that the machines of a cluster are attached to, for a machine with these addresses.
func LANOf(c *infrav1.CapstanCluster, addresses []infrav1.InterfaceAddress) LAN {
	lan := LAN{Name: c.Spec.Network.LAN.Name, CIDR: c.Spec.Network.MachineCIDR}
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

// LANRefusal returns why a host does not attach a machine of a namespace to a LAN, with what to do, or "". It names no other
// network of the host, because these may belong to other tenants.
func (p Permissions) LANRefusal(namespace string, lan LAN) string {
	if lan.Name == "" {
		return ""
	}
	offer := p.Offer(lan)
	switch {
	case offer == nil:
		return fmt.Sprintf("does not offer the LAN %s to namespace %s: its administrator has to allow it in spec.lanNetworks", lan.Name, namespace)
	case offer.CIDR != lan.CIDR:
		return fmt.Sprintf("has the LAN %s with the network %s, and the cluster's machine network is %s: all hosts of a LAN need the same cidr in spec.lanNetworks; create the cluster without spec.network.machineCIDR", lan.Name, offer.CIDR, lan.CIDR)
	}
	for _, address := range lan.Addresses {
		if !slices.ContainsFunc(offer.Addresses, func(text string) bool { return contains(text, address) }) {
			return fmt.Sprintf("does not allow machines of namespace %s to have the address %s in the LAN %s: use a pool of its addresses in spec.lanNetworks", namespace, address, lan.Name)
		}
		if slices.ContainsFunc(p.Virtual, func(text string) bool { return contains(text, address) }) {
			return fmt.Sprintf("keeps the address %s for the endpoints of clusters (spec.virtualAddresses): exclude it from the pool", address)
		}
	}
	return ""
}

func contains(network, address string) bool {
	prefix, err := netip.ParsePrefix(network)
	addr, invalid := netip.ParseAddr(address)
	return err == nil && invalid == nil && prefix.Contains(addr)
}
