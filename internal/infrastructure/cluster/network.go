package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// checkNetworks returns the reason why the networks of the cluster cannot work.
func checkNetworks(s *scope) error {
	n, machines := s.cluster.Spec.ClusterNetwork, s.capstan.Spec.Network
	if err := network.Validate(machines, n.Pods.CIDRBlocks, n.Services.CIDRBlocks); err != nil {
		return err
	}
	if s.cluster.Spec.ControlPlaneRef.GroupKind() == controlplanev1.ControlPlaneGroupKind && network.IPv6Only(machines) && (len(n.Pods.CIDRBlocks) == 0 || len(n.Services.CIDRBlocks) == 0) {
		return fmt.Errorf("the machines in %s have IPv6 addresses only, and the networks of pods and Services are IPv4 by default: "+
			"set IPv6 networks in spec.clusterNetwork.pods and spec.clusterNetwork.services of the Cluster", machines.MachineCIDR)
	}
	return network.CheckEndpoint(machines, s.cluster.Spec.ControlPlaneEndpoint.Host, s.capstan.Spec.ControlPlaneEndpoint.Host, s.capstan.Spec.LoadBalancer.BindAddress)
}

// chooseLAN returns the network of the LAN to which the machines are attached; empty for a cluster with a network of its own. It
// stops a cluster whose LAN no host offers. A cluster whose machines may run continues: they keep their network.
func (r *Reconciler) chooseLAN(ctx context.Context, s *scope) (cidr string, err error) {
	if s.capstan.Spec.Network.LAN.Name == "" || s.capstan.AllowsBoot() {
		return "", nil
	}
	offering, cidr, why, err := hostselection.Offering(ctx, r.Client, s.capstan, s.usable)
	if err != nil || len(offering) > 0 {
		return cidr, err
	}
	reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason,
		"No CapstanHost that the cluster may use offers the LAN %s of spec.network.lan to namespace %s: %s", s.capstan.Spec.Network.LAN.Name, s.capstan.Namespace, cmp.Or(why, "no host is usable"))
	return "", reconciling.ErrWaiting // A change of a CapstanHost is the event.
}

// chooseNetwork puts a machine network into spec, unless there is one that was not refused.
func (r *Reconciler) chooseNetwork(ctx context.Context, s *scope, refused netip.Prefix) error {
	if s.capstan.Spec.Network.MachineCIDR != "" && !refused.IsValid() {
		return nil
	}
	clusters, err := r.decided(ctx)
	if err != nil {
		return err
	}
	taken, err := r.takenNetworks(ctx, s, clusters)
	if err != nil {
		return err
	}
	cidr, err := network.Choose(r.NetworkPool, r.NetworkBits, taken, refused)
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NoFreeNetworkReason, "%s", err)
		return err // there is no event when a network of another plane becomes free
	}
	s.capstan.Spec.Network.MachineCIDR = cidr.String()
	metav1.SetMetaDataAnnotation(&s.capstan.ObjectMeta, infrav1.MachineCIDRFromPoolAnnotation, "")
	return nil
}

// takenNetworks are the cluster's own networks and the machine networks of others. A namespace can write one that contains the whole pool,
// so a network that is larger than those of the pool counts only under conditions: see reservesLarge.
func (r *Reconciler) takenNetworks(ctx context.Context, s *scope, clusters []infrav1.CapstanCluster) ([]netip.Prefix, error) {
	own := s.cluster.Spec.ClusterNetwork
	taken := network.Parse(append(slices.Clone(own.Pods.CIDRBlocks), own.Services.CIDRBlocks...)...)
	for i := range clusters {
		c := &clusters[i]
		n := network.Parse(c.Spec.Network.MachineCIDR)
		if c.UID == s.capstan.UID || len(n) == 0 {
			continue
		}
		if n[0].Bits() < r.NetworkBits {
			reserves, err := r.reservesLarge(ctx, s, c)
			if err != nil {
				return nil, err
			}
			if !reserves {
				continue
			}
		}
		taken = append(taken, n...)
	}
	return taken, nil
}

// reservesLarge reports whether another cluster keeps its large network: its machines may run, and a host admits both clusters (ALL-18).
func (r *Reconciler) reservesLarge(ctx context.Context, s *scope, other *infrav1.CapstanCluster) (bool, error) {
	if !other.AllowsBoot() {
		return false, nil
	}
	hosts := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	both, err := hostselection.Admitting(ctx, r.Client, s.capstan.Namespace, hosts.Items)
	if err == nil {
		both, err = hostselection.Admitting(ctx, r.Client, other.Namespace, both)
	}
	return len(both) > 0, err
}

// ensureNetwork makes the network on the load balancer's host. Every host makes it by itself with its
// first machine of the cluster, and removes it with the last one.
func (r *Reconciler) ensureNetwork(ctx context.Context, s *scope) error {
	if external(s.capstan) {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		return nil
	}
	host, reason, why := r.balancerHost(ctx, s.capstan)
	if host == nil {
		r.showWithoutBalancerHost(s, reason, why)
		return reconciling.ErrWaiting // The connection is the event.
	}
	made := hasBalancer(host, s)
	// The rule applies to any author of the host in spec (ALL-18). A running load balancer stays, even if its host would no longer be
	// chosen.
	if !made && hostselection.Find(s.usable, host.Name()) == nil {
		setNetworkAndBalancer(s.capstan, metav1.ConditionFalse, infrav1.HostNotAllowedReason, fmt.Sprintf(
			"spec.loadBalancer.hostName is CapstanHost %s, which does not admit namespace %s, or does not match spec.hostSelector: set another host, or change its spec.allowedNamespaces and labels",
			host.Name(), s.capstan.Namespace))
		return reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	h, err := r.capstanHost(ctx, host.Name())
	if err != nil {
		return err
	}
	if err := r.recordHost(ctx, s, host, h); err != nil {
		return err
	}
	if conditions.IsTrue(s.capstan, infrav1.NetworkReadyCondition) && made {
		reconciling.KeepCondition(s.capstan, infrav1.NetworkReadyCondition)
		return nil
	}
	return r.makeNetwork(ctx, s, host, h)
}

// showWithoutBalancerHost sets the conditions while the load balancer's host is not connected.
func (r *Reconciler) showWithoutBalancerHost(s *scope, reason, why string) {
	if holder := r.endpointHolder(s); holder != "" {
		// The cluster does not depend on its first host. MachineHealthChecks work only while both are True.
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason, "Host %s has the virtual address. %s", holder, why)
		return
	}
	// The load balancer is a separate process, so it can serve while capstand does not answer.
	setNetworkAndBalancer(s.capstan, metav1.ConditionUnknown, reason, why)
}

// makeNetwork makes the network on the load balancer's host. If the host refuses a network that the controller has chosen, it chooses
// another one.
func (r *Reconciler) makeNetwork(ctx context.Context, s *scope, host *connections.Host, h *infrav1.CapstanHost) error {
	if spans(s.capstan) && h.Spec.TunnelAddress == "" {
		setNetworkAndBalancer(s.capstan, metav1.ConditionFalse, infrav1.NetworkInvalidReason, fmt.Sprintf(
			"spec.network.overlay is set, but CapstanHost %s of spec.loadBalancer has no spec.tunnelAddress: set it, or set another spec.loadBalancer.hostName", h.Name))
		return reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	n, refused, err := r.networkOn(ctx, s, h)
	if err != nil {
		return err
	}
	if refused != "" {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason, "CapstanHost %s %s", h.Name, refused)
		return reconciling.ErrWaiting // A change of the CapstanHost is the event.
	}
	_, err = host.EnsureNetwork(ctx, n)
	if err == nil {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		return nil
	}
	reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason,
		"Host %s refused network %s: %s", host.Name(), s.capstan.Spec.Network, connections.PublicMessage(err))
	if mayChooseAgain(s.capstan, refusal.Of(err)) {
		ctrl.LoggerFrom(ctx).Info("The host refused the network, and the cluster chooses another one", "CapstanHost", klog.KRef("", host.Name()), "cause", connections.Message(err))
		return r.chooseAgain(ctx, s, refusal.Of(err).Subject)
	}
	return fmt.Errorf("network %s on host %s: %w", s.capstan.Spec.Network, host.Name(), err)
}

// mayChooseAgain returns whether a host refused the machine network for a conflict, the controller chose the part that conflicts,
// and no machine uses it yet. The controller never chooses the IPv6 network.
func mayChooseAgain(c *infrav1.CapstanCluster, r *hostpb.Refusal) bool {
	_, ours := c.Annotations[infrav1.MachineCIDRFromPoolAnnotation]
	return (ours && r.Subject == c.Spec.Network.MachineCIDR || isVNI(c, r.Subject)) &&
		r.Reason == hostpb.Refusal_NETWORK_CONFLICT && !c.AllowsBoot()
}

// isVNI reports whether the subject of a refusal is the cluster's VXLAN network identifier.
func isVNI(c *infrav1.CapstanCluster, subject string) bool {
	return spans(c) && subject == strconv.Itoa(int(c.Spec.Network.Overlay.VNI))
}

// chooseAgain tries the network, or the VXLAN network identifier, behind the one that a host refused.
func (r *Reconciler) chooseAgain(ctx context.Context, s *scope, subject string) error {
	r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, infrav1.NetworkRefusedReason, "ChooseNetwork",
		"%s", conditions.GetMessage(s.capstan, infrav1.NetworkReadyCondition))
	r.reserving.Lock()
	before := s.capstan.DeepCopy()
	err := r.chooseOther(ctx, s, subject)
	if err == nil {
		err = r.record(ctx, s, before)
	}
	r.reserving.Unlock()
	if err != nil {
		return err
	}
	// The next network is tried by the next reconcile, so that a host that refuses everything does
	// not hold a worker: the change of spec is the event that leads to it.
	return reconciling.ErrWaiting
}

func (r *Reconciler) chooseOther(ctx context.Context, s *scope, subject string) error {
	if isVNI(s.capstan, subject) {
		return r.chooseVNI(ctx, s, s.capstan.Spec.Network.Overlay.VNI)
	}
	refused, err := netip.ParsePrefix(subject)
	if err != nil {
		return err
	}
	return r.chooseNetwork(ctx, s, refused)
}
