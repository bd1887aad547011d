package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// balancerCandidates are the hosts on which the load balancer can be: in a LAN those that offer it and that can have the endpoint.
func (r *Reconciler) balancerCandidates(ctx context.Context, s *scope) ([]infrav1.CapstanHost, error) {
	if !loadbalancer.InLAN(s.capstan) {
		return s.usable, nil
	}
	adoptEndpoint(s)
	serving, err := r.serving(ctx, s, s.usable)
	if err != nil || len(serving) > 0 {
		return serving, err
	}
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerNoHostReason,
		"No CapstanHost that offers the LAN %s to namespace %s can have the endpoint %sin the network %s: its administrator has to add addresses of the LAN to spec.virtualAddresses; or set loadBalancer.mode to External and use a load balancer of your own",
		s.capstan.Spec.Network.LAN.Name, s.capstan.Namespace, spaced(s.capstan.Spec.ControlPlaneEndpoint.Host), s.capstan.Spec.Network.MachineCIDR)
	return nil, reconciling.ErrWaiting // A change of a CapstanHost is the event.
}

func spaced(word string) string {
	if word == "" {
		return ""
	}
	return word + " "
}

// serving are those of the hosts that offer the LAN of the cluster, and that can have its endpoint.
func (r *Reconciler) serving(ctx context.Context, s *scope, hosts []infrav1.CapstanHost) (out []infrav1.CapstanHost, err error) {
	offering, _, _, err := hostselection.Offering(ctx, r.Client, s.capstan, hosts)
	for i := range offering {
		if loadbalancer.Serves(s.capstan, &offering[i]) {
			out = append(out, offering[i])
		}
	}
	return out, err
}

// notServing is the reason why a host cannot have the endpoint of a cluster in a LAN.
func notServing(c *infrav1.CapstanCluster, h *infrav1.CapstanHost) string {
	return fmt.Sprintf("CapstanHost %s cannot have the endpoint %sof a cluster in the LAN with the network %s: add addresses of the LAN to its spec.virtualAddresses, or create the cluster with an endpoint that they contain",
		h.Name, spaced(c.Spec.ControlPlaneEndpoint.Host), c.Spec.Network.MachineCIDR)
}

// networkOn is the part of the cluster's network that a host has, or why it cannot have it.
func (r *Reconciler) networkOn(ctx context.Context, s *scope, h *infrav1.CapstanHost) (n *hostpb.Network, why string, err error) {
	n = overlay.Network(s.capstan, s.key(), h.Spec.TunnelAddress)
	if s.capstan.Spec.Network.LAN.Name == "" {
		return n, "", nil
	}
	offer, why, err := hostselection.Offer(ctx, r.Client, s.capstan, h)
	if err != nil || why != "" {
		return nil, why, err
	}
	vlan := s.capstan.Spec.Network.LAN.VLAN
	if hostselection.IgnoresVLAN(r.Pool.Connected(h.Name), vlan) {
		return nil, placement.OldForVLANs, nil
	}
	return overlay.WithLAN(n, offer, vlan, s.cluster.Spec.ClusterNetwork.Pods.CIDRBlocks), "", nil
}

// reconcileLAN keeps the load balancer of a cluster in a LAN on every host that can have the endpoint: that of the load balancer, and those
// with machines. A host without virtual addresses has machines only.
func (r *Reconciler) reconcileLAN(ctx context.Context, s *scope) error {
	if !loadbalancer.InLAN(s.capstan) || !begun(s.capstan) || s.capstan.Spec.ControlPlaneEndpoint.Host == "" {
		return nil
	}
	machines, err := r.machinesOf(ctx, s)
	if err != nil {
		return err
	}
	hosts, err := r.overlayHosts(ctx)
	if err != nil {
		return err
	}
	serving, err := r.serving(ctx, s, s.usable)
	if err != nil {
		return err
	}
	mayHave := func(name string) bool {
		return hostselection.Find(serving, name) != nil || hasBalancer(r.Pool.Get(name), s)
	}
	members, trouble := r.members(s, machines, hosts, mayHave)
	if err := r.recordMembers(ctx, s, members); err != nil {
		return err
	}
	backends, err := loadbalancer.ListBackends(ctx, r.Client, s.cluster, s.capstan.Spec.Network, "")
	if err != nil {
		return err
	}
	balancers := balancersOf(s, members)
	others := slices.DeleteFunc(members, func(m member) bool { return m.Name == s.capstan.Spec.LoadBalancer.HostName })
	return updateMembers(s, others, trouble, func(m member) error { return r.ensureLANBalancer(ctx, s, m, balancers[m.Name], backends) })
}

// ensureLANBalancer keeps the load balancer of a host that spec.loadBalancer does not name. Its network comes first: the host may have no
// machine yet.
func (r *Reconciler) ensureLANBalancer(ctx context.Context, s *scope, m member, wanted bool, backends []*hostpb.Backend) error {
	h, err := r.capstanHost(ctx, m.Name)
	if err != nil {
		return err
	}
	if wanted && !hasBalancer(m.conn, s) && r.virtualAddress(s, h, m.conn) != nil {
		n, why, err := r.networkOn(ctx, s, h)
		if err != nil || why != "" {
			return errors.Join(err, waitingFor(why))
		}
		if _, err := m.conn.EnsureNetwork(ctx, n); err != nil {
			return err
		}
	}
	return r.ensureBalancer(ctx, s, m, wanted, backends)
}

// waitingFor is an error that a change of a CapstanHost ends.
func waitingFor(why string) error {
	if why == "" {
		return nil
	}
	return fmt.Errorf("%w: %s", reconciling.ErrWaiting, why)
}

// withdraw removes the load balancer from a host that must not have the endpoint any more.
func (r *Reconciler) withdraw(ctx context.Context, s *scope, host *connections.Host) error {
	if !hasBalancer(host, s) {
		return nil
	}
	_, err := host.DeleteLoadBalancer(ctx, deletionOf(s))
	return err
}
