package cluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// virtualAddress returns the part of a host in the endpoint's virtual address.
func (r *Reconciler) virtualAddress(s *scope, h *infrav1.CapstanHost, conn *connections.Host) *hostpb.VirtualAddress {
	// The last reports count also while their hosts are away.
	var reports []*hostpb.LoadBalancer
	for _, name := range hostselection.BalancerHosts(s.capstan) {
		reports = append(reports, lastBalancer(r.Pool.Get(name), s))
	}
	return loadbalancer.VirtualAddress(s.capstan, h, loadbalancer.Reports{
		Initialized: ptr.Deref(s.cluster.Status.Initialization.ControlPlaneInitialized, false),
		Current:     conn.LoadBalancer(s.capstan.Spec.ID), First: reports[0], Others: reports[1:],
	})
}

// lastBalancer returns the load balancer of the cluster as its host last reported it. It returns nil without a host or without a report.
func lastBalancer(conn *connections.Host, s *scope) *hostpb.LoadBalancer {
	if conn == nil {
		return nil
	}
	lb := conn.LoadBalancer(s.capstan.Spec.ID)
	if !owner.Same(lb, s.cluster) {
		return nil
	}
	return lb
}

// endpointHolder returns the connected host that has the endpoint's virtual address and serves it. It returns "" if no host does.
func (r *Reconciler) endpointHolder(s *scope) string {
	for _, name := range hostselection.BalancerHosts(s.capstan) {
		if lb := lastBalancer(r.Pool.Connected(name), s); lb.GetServing() && lb.GetVirtualAddress().GetHeld() {
			return name
		}
	}
	return ""
}

// chooseVirtual makes a virtual address of the load balancer's host the endpoint of a new cluster across hosts or in a LAN, unless
// the user decided otherwise. The address has the family of the machines' first address.
func (r *Reconciler) chooseVirtual(ctx context.Context, s *scope, h *infrav1.CapstanHost) error {
	lb := s.capstan.Spec.LoadBalancer
	networks := loadbalancer.Virtual(s.capstan, h.Spec.VirtualAddresses)
	if s.capstan.Spec.ControlPlaneEndpoint.Host != "" || !loadbalancer.Moves(s.capstan) || len(networks) == 0 ||
		lb.BindAddress != "" || lb.Address != "" || lb.AddressFromPool != nil {
		return nil
	}
	r.reserving.Lock()
	defer r.reserving.Unlock()
	taken, err := r.takenAddresses(ctx, s)
	if err != nil {
		return err
	}
	address, err := network.ChooseVirtualAddress(s.capstan.Spec.ID, networks, taken)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason, "%s", err)
		return err // there is no event when an address becomes free
	}
	before := s.capstan.DeepCopy()
	endpoint := &s.capstan.Spec.ControlPlaneEndpoint
	endpoint.Host, endpoint.Port = address, cmp.Or(endpoint.Port, loadbalancer.Port(s.capstan))
	return r.record(ctx, s, before)
}

// takenAddresses are those of all hosts, and those of endpoints that other clusters reserve.
func (r *Reconciler) takenAddresses(ctx context.Context, s *scope) (map[string]bool, error) {
	clusters, err := r.decided(ctx)
	if err != nil {
		return nil, err
	}
	hosts := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	reserving, err := r.reservingClusters(ctx, clusters, hosts.Items)
	if err != nil {
		return nil, err
	}
	taken := map[string]bool{}
	for i := range reserving {
		if reserving[i].UID != s.capstan.UID {
			taken[reserving[i].Spec.ControlPlaneEndpoint.Host] = true
		}
	}
	for i := range hosts.Items {
		taken[hosts.Items[i].Spec.TunnelAddress] = true
	}
	return taken, nil
}

// reservingClusters returns the clusters whose endpoint no other cluster can have; see loadbalancer.Reserves.
func (r *Reconciler) reservingClusters(ctx context.Context, clusters []infrav1.CapstanCluster, hosts []infrav1.CapstanHost) (out []infrav1.CapstanCluster, _ error) {
	byNamespace := hostselection.ByNamespace(ctx, r.Client, hosts)
	for i := range clusters {
		c := &clusters[i]
		if c.Spec.ControlPlaneEndpoint.Host == "" {
			continue
		}
		admitting, err := byNamespace(c.Namespace)
		if err != nil {
			return nil, err
		}
		if loadbalancer.Reserves(c, admitting, r.hasEndpoint(c, hosts)) {
			out = append(out, *c)
		}
	}
	return out, nil
}

// hasEndpoint reports whether a host has the endpoint of a cluster as its virtual address, or takes part in the election of the host that
// has it. The last report counts also while the host is away. Root on a host can report any address, so the report counts only if the host
// lists the address, or for a cluster whose machines may boot: such a cluster keeps its endpoint when the list changes. A move loses this
// state with the rest of status, so the list decides alone until the machines of the moved cluster may boot.
func (r *Reconciler) hasEndpoint(c *infrav1.CapstanCluster, hosts []infrav1.CapstanHost) bool {
	for i := range hosts {
		conn := r.Pool.Get(hosts[i].Name)
		if conn == nil || c.Spec.ID == "" || !c.AllowsBoot() && !loadbalancer.IsVirtual(c, hosts[i].Spec.VirtualAddresses) {
			continue
		}
		lb := conn.LoadBalancer(c.Spec.ID)
		if lb.GetNamespace() == c.Namespace && lb.GetVirtualAddress() != nil && lb.GetVirtualAddress().GetAddress() == c.Spec.ControlPlaneEndpoint.Host {
			return true
		}
	}
	return false
}

// unoffered reports whether no host offers a new cluster its endpoint as a virtual address.
func (r *Reconciler) unoffered(ctx context.Context, s *scope, hosts []infrav1.CapstanHost) (bool, error) {
	if s.capstan.AllowsBoot() {
		return false, nil // It keeps the endpoint that it has, and reserves nothing.
	}
	admitting, err := hostselection.Admitting(ctx, r.Client, s.capstan.Namespace, hosts)
	return err == nil && !loadbalancer.Reserves(s.capstan, admitting, r.hasEndpoint(s.capstan, hosts)), err
}

// refuseRivalEndpoint stops a cluster whose virtual address is the endpoint of another one, or an address of a host: a namespace
// can write any address.
func (r *Reconciler) refuseRivalEndpoint(ctx context.Context, s *scope) error {
	hosts := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	virtual := slices.ContainsFunc(hosts.Items, func(h infrav1.CapstanHost) bool { return loadbalancer.IsVirtual(s.capstan, h.Spec.VirtualAddresses) })
	if !virtual {
		return nil
	}
	why, err := r.endpointUnusable(ctx, s, hosts.Items)
	if err != nil || why == "" {
		return err
	}
	address := s.capstan.Spec.ControlPlaneEndpoint.Host
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason,
		"The virtual address %s of spec.controlPlaneEndpoint %s: delete this object, and create it without controlPlaneEndpoint", address, why)
	return fmt.Errorf("the virtual address %s %s", address, why) // There is no event when the address becomes free.
}

// endpointUnusable returns the reason why the cluster cannot have its virtual address; "" when it can.
func (r *Reconciler) endpointUnusable(ctx context.Context, s *scope, hosts []infrav1.CapstanHost) (string, error) {
	clusters, err := r.decidedUntil(ctx, s.capstan)
	if err != nil {
		return "", err
	}
	// Only the clusters with this endpoint: the question whether one reserves it asks all hosts.
	var rivals []infrav1.CapstanCluster
	for i := range clusters {
		if clusters[i].Spec.ControlPlaneEndpoint.Host == s.capstan.Spec.ControlPlaneEndpoint.Host {
			rivals = append(rivals, clusters[i])
		}
	}
	reserving, err := r.reservingClusters(ctx, rivals, hosts)
	if err != nil {
		return "", err
	}
	unoffered, err := r.unoffered(ctx, s, hosts)
	if err != nil {
		return "", err
	}
	isTunnel := func(h infrav1.CapstanHost) bool {
		return h.Spec.TunnelAddress == s.capstan.Spec.ControlPlaneEndpoint.Host
	}
	switch {
	case unoffered:
		return "is one of CapstanHosts that do not admit the namespace", nil
	case network.RivalEndpoint(s.capstan, reserving) != nil:
		return "belongs to another CapstanCluster", nil // It may belong to another tenant: its name is not shown.
	case slices.ContainsFunc(hosts, isTunnel):
		return "is the tunnel address of a CapstanHost", nil
	}
	return "", nil
}
