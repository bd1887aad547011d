package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/services"
	"capstan.dev/capstan/internal/reconciling"
)

// claimName is the name of the claim for the load balancer's address.
func claimName(c *infrav1.CapstanCluster) string { return c.Name + "-endpoint" }

// claimAddress takes the load balancer's address from its pool, if it names one, and writes it to spec
// before anything listens on it (IPAM-07). All reads are live: a claim may name an address that the
// cache does not have yet.
func (r *Reconciler) claimAddress(ctx context.Context, s *scope) error {
	lb := &s.capstan.Spec.LoadBalancer
	if lb.AddressFromPool == nil {
		return nil
	}
	if lb.Address != "" { // ALL-11
		return addresses.Adopt(ctx, r.Client, r.LiveClient, s.capstan, s.cluster.Name, claimName(s.capstan))
	}
	pool := capiipamv1.IPPoolReference{APIGroup: lb.AddressFromPool.APIGroup, Kind: lb.AddressFromPool.Kind, Name: lb.AddressFromPool.Name}
	claim, err := addresses.EnsureClaim(ctx, r.LiveClient, s.capstan, s.cluster.Name, pool, claimName(s.capstan))
	if errors.Is(err, addresses.ErrOtherPool) {
		return r.dropFormerClaim(ctx, s)
	}
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason, "%s", err)
		return err
	}
	address, waiting, err := addresses.FetchAddress(ctx, r.LiveClient, claim)
	if err != nil {
		return err
	}
	if address == nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason,
			"%s (from %s %s)", waiting, pool.Kind, pool.Name)
		return reconciling.ErrWaiting // the claim is watched
	}
	return r.recordClaimed(ctx, s, pool, address.Spec.Address)
}

// dropFormerClaim deletes a claim from a pool that the load balancer does not name any more, before it has an address. The new claim follows
// the end of this one, which is an event.
func (r *Reconciler) dropFormerClaim(ctx context.Context, s *scope) error {
	live := &infrav1.CapstanCluster{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.capstan), live); err != nil {
		return err
	}
	have, want := live.Spec.LoadBalancer, s.capstan.Spec.LoadBalancer
	if have.Address != "" || have.AddressFromPool == nil || *have.AddressFromPool != *want.AddressFromPool {
		return reconciling.ErrWaiting // The cache is older than the claim. The change of spec is an event.
	}
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForIPAddressReason,
		"IPAddressClaim %s is from the former pool: it is created again after its deletion", claimName(s.capstan))
	_, err := addresses.ClaimsGone(ctx, r.LiveClient, s.capstan, s.cluster.Name, claimName(s.capstan))
	return cmp.Or(err, reconciling.ErrWaiting)
}

// recordClaimed writes an address of a pool to spec. An address outside of the machine network, or in a LAN, is a virtual address of the
// hosts. It becomes the endpoint at once, so that no other cluster chooses it.
func (r *Reconciler) recordClaimed(ctx context.Context, s *scope, pool capiipamv1.IPPoolReference, address string) error {
	cidr, err := netip.ParsePrefix(s.capstan.Spec.Network.MachineCIDR)
	if err != nil {
		return err
	}
	before := s.capstan.DeepCopy()
	if addr, err := netip.ParseAddr(address); err == nil && cidr.Contains(addr) && !loadbalancer.InLAN(s.capstan) {
		if why := checkOwn(cidr, addr); why != "" {
			return refuseClaimed(s, pool, why)
		}
		s.capstan.Spec.LoadBalancer.Address = address
		return r.record(ctx, s, before)
	}
	h, err := r.capstanHost(ctx, s.capstan.Spec.LoadBalancer.HostName)
	if err != nil {
		return err
	}
	adoptEndpoint(s)
	if why := checkVirtual(s.capstan, h, address); why != "" {
		return refuseClaimed(s, pool, why)
	}
	r.reserving.Lock()
	defer r.reserving.Unlock()
	taken, err := r.takenAddresses(ctx, s)
	if err != nil {
		return err
	}
	if taken[address] {
		// The other cluster may belong to another tenant: its name is not shown. There is no event when the address becomes free.
		why := fmt.Sprintf("%s, which a CapstanHost or the endpoint of another cluster has: exclude it from the pool, and delete IPAddressClaim %s", address, claimName(s.capstan))
		_ = refuseClaimed(s, pool, why)
		return errors.New("the address " + why)
	}
	s.capstan.Spec.LoadBalancer.Address = address
	s.capstan.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: address, Port: loadbalancer.Port(s.capstan)}
	return r.record(ctx, s, before)
}

// refuseClaimed reports why an address of a pool cannot be used. Claims and hosts are watched.
func refuseClaimed(s *scope, pool capiipamv1.IPPoolReference, why string) error {
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.AddressInvalidReason, "%s %s gave %s", pool.Kind, pool.Name, why)
	return reconciling.ErrWaiting
}

// checkOwn returns the reason why an address of the machine network cannot be that of the load balancer.
func checkOwn(cidr netip.Prefix, addr netip.Addr) string {
	if addr == network.Gateway(cidr) || addr == cidr.Masked().Addr() || addr == netipx.PrefixLastIP(cidr) {
		return fmt.Sprintf("%s, which is the network, gateway or broadcast address of the cluster's network %s: exclude it from the pool", addr, cidr)
	}
	return ""
}

// checkVirtual returns the reason why an address outside of the machine network, or in a LAN, cannot be the virtual address of the
// endpoint.
func checkVirtual(c *infrav1.CapstanCluster, h *infrav1.CapstanHost, address string) string {
	outside := fmt.Sprintf("%s, which is outside the cluster's network %s", address, c.Spec.Network.MachineCIDR)
	if loadbalancer.InLAN(c) {
		outside = fmt.Sprintf("%s for the LAN with the network %s", address, c.Spec.Network.MachineCIDR)
	}
	if host := c.Spec.ControlPlaneEndpoint.Host; host != "" && host != address {
		return fmt.Sprintf("%s, and the cluster has the endpoint %s: leave out controlPlaneEndpoint, or addressFromPool", outside, host)
	}
	if !loadbalancer.Moves(c) {
		return fmt.Sprintf("%s, and the network is on one host only: set spec.network.machineCIDR to a network that holds the pool's addresses, "+
			"or set spec.tunnelAddress of CapstanHost %s before you create the cluster, for a virtual address", outside, h.Name)
	}
	tried := c.DeepCopy()
	tried.Spec.LoadBalancer.Address, tried.Spec.ControlPlaneEndpoint.Host = address, address
	if !loadbalancer.IsVirtual(tried, h.Spec.VirtualAddresses) {
		return fmt.Sprintf("%s and is no virtual address of CapstanHost %s, of the IP family of the machines: use another pool, or add the pool's range to spec.virtualAddresses of the hosts",
			outside, h.Name)
	}
	return ""
}

// claimGone deletes the claim and those of Services, and reports whether they no longer exist. Claims are watched.
func (r *Reconciler) claimGone(ctx context.Context, s *scope) (bool, error) {
	if gone, err := services.ClaimsGone(ctx, r.LiveClient, s.capstan, s.clusterName()); err != nil || !gone {
		return false, err
	}
	return addresses.ClaimsGone(ctx, r.LiveClient, s.capstan, s.clusterName(), claimName(s.capstan))
}
