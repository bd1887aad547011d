package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/reconciling"
)

// spans reports whether the cluster's network spans several hosts.
func spans(c *infrav1.CapstanCluster) bool { return c.Spec.Network.Overlay.VNI != 0 }

// begun reports whether something of the cluster may be on a host. Clusters from before there was a record of hosts
// have the id of one, or let machines boot.
func begun(c *infrav1.CapstanCluster) bool {
	return len(c.Spec.LoadBalancerHosts) > 0 || c.Spec.LoadBalancer.HostID != "" || c.AllowsBoot()
}

// chooseOverlay makes the network span hosts if the load balancer's host has a tunnel address, before anything is made on
// a host. The caller holds r.reserving.
func (r *Reconciler) chooseOverlay(ctx context.Context, s *scope, host *infrav1.CapstanHost) error {
	if spans(s.capstan) || begun(s.capstan) || loadbalancer.InLAN(s.capstan) {
		return nil
	}
	tunnel, err := netip.ParseAddr(host.Spec.TunnelAddress)
	if err != nil {
		return refuseMTU(s.capstan, host.Name)
	}
	if err := r.chooseVNI(ctx, s, 0); err != nil {
		return err
	}
	mtu := s.capstan.Spec.Network.MTU
	if mtu == 0 {
		links, err := r.smallLinks(ctx, s, tunnel)
		if err != nil {
			return err
		}
		mtu = overlay.MTU(tunnel, hostselection.OverlayKey(host, r.Pool) != "", links)
	}
	s.capstan.Spec.Network.Overlay.MTU = mtu
	return nil
}

// smallLinks returns the MTUs of the interfaces below 1500 bytes with a tunnel address of the family, of all hosts that the
// cluster's namespace may use. A host that is not connected counts as usual.
func (r *Reconciler) smallLinks(ctx context.Context, s *scope, tunnel netip.Addr) (mtus []int32, err error) {
	hosts, err := hostselection.Usable(ctx, r.Client, s.capstan.Namespace)
	for i := range hosts {
		address, invalid := netip.ParseAddr(hosts[i].Spec.TunnelAddress)
		host := r.Pool.Get(hosts[i].Name)
		if invalid != nil || address.Is4() != tunnel.Is4() || host == nil {
			continue
		}
		if mtu := host.Info().GetLinkMtus()[address.Unmap().String()]; mtu > 0 {
			mtus = append(mtus, mtu)
		}
	}
	return mtus, err
}

// refuseMTU stops a cluster that would stay on one box, where its MTU has no effect.
func refuseMTU(c *infrav1.CapstanCluster, host string) error {
	if c.Spec.Network.MTU == 0 {
		return nil
	}
	reconciling.SetCondition(c, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason,
		"spec.network.mtu is for clusters across hosts, and CapstanHost %s of the load balancer has no spec.tunnelAddress: set it, or name another host in spec.loadBalancer.hostName, or remove mtu", host)
	return reconciling.ErrWaiting // A change of the host or of the cluster is the event.
}

// chooseVNI puts a VXLAN network identifier into spec that no CapstanCluster of any namespace has.
func (r *Reconciler) chooseVNI(ctx context.Context, s *scope, refused int32) error {
	clusters, err := r.decided(ctx)
	if err != nil {
		return err
	}
	taken := map[int32]bool{}
	for i := range clusters {
		taken[clusters[i].Spec.Network.Overlay.VNI] = true
	}
	vni, err := network.ChooseVNI(s.capstan.Spec.ID, taken, refused)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NoFreeNetworkReason, "%s", err)
		return err // there is no event when an identifier of another plane becomes free
	}
	s.capstan.Spec.Network.Overlay.VNI = vni
	return nil
}

// refuseRival stops a cluster whose VXLAN network identifier belongs to another one: a namespace can write any identifier,
// and could send packets into the network of the other cluster.
func (r *Reconciler) refuseRival(ctx context.Context, s *scope) error {
	if !spans(s.capstan) {
		return nil
	}
	clusters, err := r.rivalsOf(ctx, s.capstan)
	if err != nil || network.Rival(s.capstan, clusters) == nil {
		return err
	}
	// The other cluster may belong to another tenant: its name is not shown.
	reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason,
		"spec.network.overlay.vni %d belongs to another CapstanCluster: delete this object, and create it without spec.network.overlay", s.capstan.Spec.Network.Overlay.VNI)
	return reconciling.ErrWaiting // A change of the other cluster is the event.
}

// rivalsOf returns at least the clusters that have the VXLAN network identifier of c.
func (r *Reconciler) rivalsOf(ctx context.Context, c *infrav1.CapstanCluster) ([]infrav1.CapstanCluster, error) {
	if r.WatchNamespace != "" || !conditions.IsTrue(c, infrav1.NetworkReadyCondition) {
		return r.decidedUntil(ctx, c)
	}
	clusters := &infrav1.CapstanClusterList{}
	err := r.Client.List(ctx, clusters, client.MatchingFields{vniIndex: vniOf(c)}, client.UnsafeDisableDeepCopy)
	return clusters.Items, err
}

// choosePort puts a port for the load balancer into spec that no other cluster has on the tunnel address of its host.
// after is one that the host refused, or 0.
func (r *Reconciler) choosePort(ctx context.Context, s *scope, on loadbalancer.Host, after int32) error {
	r.reserving.Lock()
	defer r.reserving.Unlock()
	clusters, err := r.decided(ctx)
	if err != nil {
		return err
	}
	taken := map[int32]bool{}
	for i := range clusters {
		c := &clusters[i]
		if c.UID != s.capstan.UID && (c.Spec.LoadBalancer.HostName == on.Name || c.Spec.ControlPlaneEndpoint.Host == on.Tunnel) {
			taken[loadbalancer.Port(c)] = true
		}
	}
	port, err := network.ChoosePort(s.capstan.Spec.ID, r.EndpointPorts, taken, after)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason, "%s", err)
		return err // there is no event when a port becomes free
	}
	before := s.capstan.DeepCopy()
	s.capstan.Spec.LoadBalancer.Port = port
	metav1.SetMetaDataAnnotation(&s.capstan.ObjectMeta, infrav1.PortFromRangeAnnotation, "")
	return r.record(ctx, s, before)
}

// mayChoosePortAgain reports whether the controller chose the port, and the endpoint does not contain it yet.
func mayChoosePortAgain(c *infrav1.CapstanCluster) bool {
	_, ours := c.Annotations[infrav1.PortFromRangeAnnotation]
	return ours && c.Spec.ControlPlaneEndpoint.IsZero()
}

// capstanHost reads a CapstanHost from the cache.
func (r *Reconciler) capstanHost(ctx context.Context, name string) (*infrav1.CapstanHost, error) {
	h := &infrav1.CapstanHost{}
	return h, r.Client.Get(ctx, client.ObjectKey{Name: name}, h)
}

// reconcileOverlay keeps the network, its peers and the load balancer on every host that has machines of the cluster, and
// on the load balancer's host.
func (r *Reconciler) reconcileOverlay(ctx context.Context, s *scope) error {
	if !spans(s.capstan) || !begun(s.capstan) || external(s.capstan) ||
		conditions.GetReason(s.capstan, infrav1.NetworkReadyCondition) == infrav1.NetworkInvalidReason {
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
	if r.Pool.Connected(s.capstan.Spec.LoadBalancer.HostName) == nil {
		err = r.leaveFormerHosts(ctx, s) // otherwise done before the load balancer was made
	}
	// Conditions of the machines on a host that the cluster must not use report this (ALL-18).
	mayHave := func(name string) bool {
		return hostselection.Find(s.usable, name) != nil || isOn(r.Pool.Get(name), s)
	}
	members, trouble := r.members(s, machines, hosts, mayHave)
	if err := r.recordMembers(ctx, s, members); err != nil {
		return err
	}
	ensure, failed := r.overlayPart(ctx, s, members, machines, hosts)
	if failed != nil {
		return errors.Join(err, failed)
	}
	return errors.Join(err, updateMembers(s, members, trouble, ensure))
}

// overlayRefusal returns the reason why a host cannot have a part of the overlay now, or "".
func overlayRefusal(h, balancer overlay.Host) string {
	switch {
	case h.Tunnel == "":
		return fmt.Sprintf("CapstanHost %s has no spec.tunnelAddress any more: set it again", h.Name)
	case balancer.Tunnel != "" && h.Encrypted() != balancer.Encrypted():
		return fmt.Sprintf("Host %s: %s", h.Name, overlay.Disagreement(h.Encrypted()))
	}
	return ""
}

// overlayPart returns the function that brings the network, its peers and the load balancer of one host up to date.
func (r *Reconciler) overlayPart(ctx context.Context, s *scope, members []member, machines []infrav1.CapstanMachine, hosts map[string]overlay.Host) (func(member) error, error) {
	networks, err := network.Machines(s.capstan.Spec.Network)
	if err != nil {
		return nil, err
	}
	backends, err := loadbalancer.ListBackends(ctx, r.Client, s.cluster, s.capstan.Spec.Network, "")
	if err != nil {
		return nil, err
	}
	balancers := balancersOf(s, members)
	balancerHosts := hostselection.BalancerHosts(s.capstan)
	names := slices.Concat(overlay.Hosts(s.capstan.Spec.LoadBalancer.HostName, machines), balancerHosts)
	return func(m member) error {
		peers, tunnels := overlay.Peers(m.Host, machines, hosts, networks), overlay.Tunnels(m.Host, balancerHosts, hosts)
		err := m.conn.EnsurePeers(ctx, overlay.Network(s.capstan, s.key(), m.Tunnel), peers, tunnels, overlay.Keys(m.Host, names, peers, tunnels, hosts))
		if err == nil && m.Name != s.capstan.Spec.LoadBalancer.HostName {
			err = r.ensureBalancer(ctx, s, m, balancers[m.Name], backends)
		}
		return err
	}, nil
}

// remedy returns the advice for a host that has the network with another tunnel address: the subject of its refusal.
func remedy(err error, c *infrav1.CapstanCluster) string {
	r := refusal.Of(err)
	if _, invalid := netip.ParseAddr(r.GetSubject()); r.GetReason() != hostpb.Refusal_NETWORK_CONFLICT || invalid != nil || !spans(c) {
		return ""
	}
	return fmt.Sprintf(" (spec.tunnelAddress of a CapstanHost can change only while the host has no network of a cluster that spans hosts: set it back to %s)", r.GetSubject())
}
