package machine

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// checkLANAddresses stops a machine without an address of a pool, or without a gateway, in a cluster in a LAN: the addresses of a
// LAN belong to the user.
func checkLANAddresses(s *scope, c *infrav1.CapstanCluster, addresses []infrav1.InterfaceAddress) error {
	lan := c.Spec.Network.LAN.Name
	if lan == "" {
		return nil
	}
	if len(addresses) == 0 {
		reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason,
			"The machines of the cluster are in the LAN %s, where Capstan chooses no addresses: set spec.network.addressesFromPools in the machine template", lan)
		return reconciling.ErrWaiting // The owner of the machine replaces it.
	}
	for _, a := range addresses {
		if a.Gateway == "" {
			reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason,
				"The address %s has no gateway, and the default route of a machine in the LAN %s leads to the router there: set the gateway of the pool", a.Address, lan)
			return reconciling.ErrWaiting // The owner of the machine replaces it.
		}
	}
	return nil
}

// network is the network of the machine on its host.
func (r *Reconciler) network(ctx context.Context, s *scope, c *infrav1.CapstanCluster, host *infrav1.CapstanHost) (*hostpb.Network, error) {
	n := overlay.Network(c, client.ObjectKeyFromObject(s.cluster), host.Spec.TunnelAddress)
	if c.Spec.Network.LAN.Name == "" {
		return n, nil
	}
	permissions, err := hostselection.Permissions(ctx, r.Client, s.capstan, c, []infrav1.CapstanHost{*host})
	if err != nil {
		return nil, err
	}
	allowed, lan := permissions[host.Name], placement.LANOf(c, s.capstan.Spec.Network.Addresses)
	why := allowed.LANRefusal(s.capstan.Namespace, lan)
	if why == "" && hostselection.IgnoresVLAN(r.Pool.Get(host.Name), lan.VLAN) {
		why = placement.OldForVLANs // A machine can name its host itself.
	}
	if why != "" {
		reconciling.SetCondition(s.capstan, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason, "CapstanHost %s %s", host.Name, why)
		return nil, reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	return overlay.WithLAN(n, allowed.Offer(lan), lan.VLAN, s.cluster.Spec.ClusterNetwork.Pods.CIDRBlocks), nil
}
