package machine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// claimAddresses claims one address from each of the machine's pools and waits for all of them (IPAM-07,
// IPAM-08). Without pools it returns nothing. All reads are live: a claim may name an address that
// the cache does not have yet.
func (r *Reconciler) claimAddresses(ctx context.Context, s *scope) ([]infrav1.InterfaceAddress, error) {
	pools := s.capstan.Spec.Network.AddressesFromPools
	if len(pools) == 0 {
		return nil, nil
	}
	made := make([]*capiipamv1.IPAddressClaim, len(pools))
	for i, pool := range pools {
		var err error
		made[i], err = addresses.EnsureClaim(ctx, r.LiveClient, s.capstan, s.cluster.Name,
			capiipamv1.IPPoolReference{APIGroup: pool.APIGroup, Kind: pool.Kind, Name: pool.Name}, addresses.Name(s.capstan.Name, i))
		if err != nil {
			reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason, "%s", err)
			return nil, err
		}
	}
	var out []infrav1.InterfaceAddress
	for _, claim := range made {
		address, waiting, err := addresses.FetchAddress(ctx, r.LiveClient, claim)
		if err != nil {
			return nil, err
		}
		if address == nil {
			reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason,
				"%s (from %s %s)", waiting, claim.Spec.PoolRef.Kind, claim.Spec.PoolRef.Name)
			return nil, reconciling.ErrWaiting // the claim is watched
		}
		out = append(out, infrav1.InterfaceAddress{Address: address.Spec.Address, Prefix: ptr.Deref(address.Spec.Prefix, 0), Gateway: address.Spec.Gateway})
	}
	// IPv4 first, however the pools are named: it becomes the Node's first address.
	slices.SortStableFunc(out, func(a, b infrav1.InterfaceAddress) int { return strings.Compare(family(a), family(b)) })
	return out, r.checkClaimed(ctx, s, out)
}

func family(a infrav1.InterfaceAddress) string {
	if addr, err := netip.ParseAddr(a.Address); err == nil && addr.Is6() {
		return "IPv6"
	}
	return "IPv4"
}

// checkClaimed returns an error for addresses that no host accepts or that do not work.
func (r *Reconciler) checkClaimed(ctx context.Context, s *scope, addresses []infrav1.InterfaceAddress) error {
	capstanCluster, err := r.capstanCluster(ctx, s)
	if err != nil {
		return err
	}
	cidrs, err := network.Machines(capstanCluster.Spec.Network)
	if err != nil {
		return err
	}
	if err := fit(cidrs, addresses); err != nil {
		reconciling.SetCondition(s.capstan, infrav1.AddressesAssignedCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason, "%s", err)
		return reconciling.ErrWaiting
	}
	return nil
}

// fit returns the reason why the addresses that pools gave, IPv4 first, do not fit the cluster's networks.
func fit(cidrs []netip.Prefix, addresses []infrav1.InterfaceAddress) error {
	if family(addresses[0]) == "IPv6" && cidrs[0].Addr().Is4() {
		return fmt.Errorf("the pools gave %s and no IPv4 address, but the first network of the cluster's machines is %s: use an IPv4 pool as well, or create the cluster with an IPv6 spec.network.machineCIDR",
			addresses[0].Address, cidrs[0])
	}
	for i, a := range addresses {
		if i == len(cidrs) {
			return fmt.Errorf("the pools provided %s in addition to %s, but the cluster's machines have one network, %s: use one pool, or create the cluster with a spec.network.machineIPv6CIDR that contains the second pool's addresses",
				a.Address, addresses[0].Address, cidrs[0])
		}
		cidr := cidrs[i]
		addr, err := netip.ParseAddr(a.Address)
		if err == nil && addr.Is4() != cidr.Addr().Is4() {
			return fmt.Errorf("the pool provided %s/%d, and the cluster's machines have addresses of %s there: in spec.network.addressesFromPools, name one pool for each family of spec.network of the CapstanCluster",
				a.Address, a.Prefix, cidr)
		}
		if err != nil || !cidr.Contains(addr) || int(a.Prefix) != cidr.Bits() || addr == network.Gateway(cidr) {
			return fmt.Errorf("the pool provided %s/%d, which is not a valid machine address in the cluster's network %s: correct the pool's range and prefix to match spec.network of the CapstanCluster",
				a.Address, a.Prefix, cidr)
		}
		if gateway, err := netip.ParseAddr(a.Gateway); a.Gateway != "" && (err != nil || !cidr.Contains(gateway)) {
			return fmt.Errorf("the pool provided gateway %s, which is outside the cluster's network %s: Capstan's gateway there is %s",
				a.Gateway, cidr, network.Gateway(cidr))
		}
	}
	return nil
}

// adoptClaims gives the machine's claims a lost or outdated owner reference back (ALL-11).
func (r *Reconciler) adoptClaims(ctx context.Context, s *scope) error {
	return addresses.Adopt(ctx, r.Client, r.LiveClient, s.capstan, s.cluster.Name, claimNames(s.capstan)...)
}

// claimsGone deletes the machine's claims and reports whether none remains. Claims are watched.
func (r *Reconciler) claimsGone(ctx context.Context, s *scope) (bool, error) {
	return addresses.ClaimsGone(ctx, r.LiveClient, s.capstan, s.capstan.Labels[clusterv1.ClusterNameLabel], claimNames(s.capstan)...)
}

// claimNames are the names of the claims that a machine may have, one for each of its pools.
func claimNames(m *infrav1.CapstanMachine) (names []string) {
	for i := range m.Spec.Network.AddressesFromPools {
		names = append(names, addresses.Name(m.Name, i))
	}
	return names
}
