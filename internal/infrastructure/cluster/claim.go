package cluster

import (
	"context"
	"fmt"
	"net/netip"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/services"
)

// claimName is the name of the claim for the load balancer's address.
func claimName(c *infrav1.CapstanCluster) string { return c.Name + "-endpoint" }

// claimAddress takes the load balancer's address from its pool, if it names one, and writes it to spec
// before anything listens on it (IPAM-07). All reads are live: a claim may name an address that the
// cache does not have yet.
func (r *Reconciler) claimAddress(ctx context.Context, s *scope, _ []infrav1.CapstanHost) error {
	lb := &s.capstan.Spec.LoadBalancer
	if lb.AddressFromPool == nil {
		return nil
	}
	if lb.Address != "" { // ALL-11
		return addresses.Adopt(ctx, r.Client, r.LiveClient, s.capstan, s.cluster.Name, claimName(s.capstan))
	}
	pool := capiipamv1.IPPoolReference{APIGroup: lb.AddressFromPool.APIGroup, Kind: lb.AddressFromPool.Kind, Name: lb.AddressFromPool.Name}
	claim, err := addresses.EnsureClaim(ctx, r.LiveClient, s.capstan, s.cluster.Name, pool, claimName(s.capstan))
	if err != nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason, "%s", err)
		return err
	}
	address, waiting, err := addresses.FetchAddress(ctx, r.LiveClient, claim)
	if err != nil {
		return err
	}
	if address == nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason,
			"%s (from %s %s)", waiting, pool.Kind, pool.Name)
		return errWaiting // the claim is watched
	}
	if err := checkClaimed(s.capstan.Spec.Network.MachineCIDR, address.Spec.Address); err != nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason,
			"%s %s gave %s", pool.Kind, pool.Name, err)
		return errWaiting
	}
	before := s.capstan.DeepCopy()
	lb.Address = address.Spec.Address
	return r.record(ctx, s, before)
}

// checkClaimed returns the reason why no host would accept an address for the load balancer.
func checkClaimed(machineCIDR, address string) error {
	cidr, err := netip.ParsePrefix(machineCIDR)
	if err != nil {
		return err
	}
	addr, err := netip.ParseAddr(address)
	switch {
	case err != nil || !cidr.Contains(addr):
		return fmt.Errorf("%s, which is outside the cluster's network %s: set spec.network.machineCIDR to a network that holds the pool's addresses", address, cidr)
	case addr == network.Gateway(cidr), addr == cidr.Masked().Addr(), addr == netipx.PrefixLastIP(cidr):
		return fmt.Errorf("%s, which is the network, gateway or broadcast address of the cluster's network %s: exclude it from the pool", address, cidr)
	}
	return nil
}

// claimGone deletes the claim and those of Services, and reports whether they no longer exist. Claims are watched.
func (r *Reconciler) claimGone(ctx context.Context, s *scope) (bool, error) {
	if gone, err := services.ClaimsGone(ctx, r.LiveClient, s.capstan, s.clusterName()); err != nil || !gone {
		return false, err
	}
	return addresses.ClaimsGone(ctx, r.LiveClient, s.capstan, s.clusterName(), claimName(s.capstan))
}
