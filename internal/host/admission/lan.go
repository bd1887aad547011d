package admission

import (
	"errors"
	"fmt"
	"net/netip"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

// maxLANPods is the largest number of pod networks of a cluster in a LAN.
const maxLANPods = 8

// checkLAN returns an error for a network in a LAN that no host can have.
func checkLAN(n *hostpb.Network) error {
	if n.Lan == nil {
		return nil
	}
	if err := network.CheckLANBridge(n.Lan.Bridge); err != nil {
		return err
	}
	cidr, err := netip.ParsePrefix(n.Cidr)
	switch {
	case err != nil:
		return err
	case n.Lan.Vlan > network.MaxVLAN:
		return fmt.Errorf("VLAN %d is not valid: expected 1 to %d, or 0 for none", n.Lan.Vlan, network.MaxVLAN)
	case n.Overlay != nil:
		return errors.New("a network in a LAN cannot have an overlay")
	case !cidr.Addr().Is4() || n.Ipv6Cidr != "":
		return fmt.Errorf("the networks %s %s are in a LAN: expected one IPv4 network", n.Cidr, n.Ipv6Cidr)
	case len(n.Lan.Pods) > maxLANPods:
		return fmt.Errorf("it has %d pod networks: expected at most %d in a LAN", len(n.Lan.Pods), maxLANPods)
	}
	for _, text := range n.Lan.Pods {
		pods, err := netip.ParsePrefix(text)
		if err != nil || pods != pods.Masked() || !pods.Addr().Is4() || pods.Overlaps(cidr) {
			return fmt.Errorf("pod network %q is not valid in the LAN %s: expected an IPv4 network outside of it", text, cidr)
		}
	}
	return nil
}
