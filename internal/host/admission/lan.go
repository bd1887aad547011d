package admission

import (
	"errors"
	"fmt"
	"net/netip"

	"capstan.dev/capstan/internal/cidr"
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
	subnets, err := subnetsOf(n)
	switch {
	case err != nil:
		return err
	case n.Lan.Vlan > network.MaxVLAN:
		return fmt.Errorf("VLAN %d is not valid: expected 1 to %d, or 0 for none", n.Lan.Vlan, network.MaxVLAN)
	case n.Overlay != nil:
		return errors.New("a network in a LAN cannot have an overlay")
	case len(n.Lan.Pods) > maxLANPods:
		return fmt.Errorf("it has %d pod networks: expected at most %d in a LAN", len(n.Lan.Pods), maxLANPods)
	}
	for _, text := range n.Lan.Pods {
		if err := checkLANPods(text, subnets); err != nil {
			return err
		}
	}
	return nil
}

// checkLANPods returns an error unless a pod network is outside of the LAN and of a family that the LAN has: cluster-scoped addresses, so
// that no rule for pods opens the way to link-local or multicast addresses.
func checkLANPods(text string, subnets []network.Subnet) error {
	pods, err := netip.ParsePrefix(text)
	if err == nil {
		err = cidr.Usable(pods)
	}
	if err != nil || pods != pods.Masked() {
		return fmt.Errorf("pod network %q is not valid in a LAN: expected a network without host bits, of unicast addresses", text)
	}
	family := false
	for _, s := range subnets {
		if pods.Overlaps(s.Prefix) {
			return fmt.Errorf("pod network %q is not valid in the LAN %s: expected a network outside of it", text, s.Prefix)
		}
		family = family || pods.Addr().Is4() == s.Prefix.Addr().Is4()
	}
	if !family {
		return fmt.Errorf("pod network %q is not valid in the LAN %s: expected a network of its address family", text, subnets[0].Prefix)
	}
	return nil
}
