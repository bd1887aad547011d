package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// errWaiting ends a reconcile that an event will continue. A condition names the event.
var errWaiting = errors.New("waiting")

// reconcileNormal runs the steps of the contract in their order (IC-11). Each step completes, or sets a condition that names the
// missing prerequisite.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	usable, err := hostselection.Usable(ctx, r.Client, s.capstan.Namespace, s.capstan.Spec.HostSelector)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, step := range []func(context.Context, *scope, []infrav1.CapstanHost) error{r.observeHosts, r.reserve, r.showDomains} {
		if err := step(ctx, s, usable); err != nil {
			return ctrl.Result{}, unlessWaiting(err)
		}
	}
	res, err := r.reconcileBalancerHost(ctx, s, usable)
	// The other hosts of the cluster's network do not wait for that one.
	return res, errors.Join(err, r.reconcileOverlay(ctx, s, usable), r.reconcileLAN(ctx, s, usable))
}

// reconcileBalancerHost makes the network and the load balancer on the load balancer's host.
func (r *Reconciler) reconcileBalancerHost(ctx context.Context, s *scope, usable []infrav1.CapstanHost) (ctrl.Result, error) {
	for _, step := range []func(context.Context, *scope, []infrav1.CapstanHost) error{r.ensureNetwork, r.claimAddress, r.ensureLoadBalancer} {
		if err := step(ctx, s, usable); err != nil {
			return ctrl.Result{}, unlessWaiting(err)
		}
	}
	res, err := r.provision(ctx, s)
	return res, errors.Join(err, s.leaving)
}

func unlessWaiting(err error) error {
	if errors.Is(err, errWaiting) {
		return nil
	}
	return err
}

// observeHosts looks whether there is a host that the cluster may use.
func (r *Reconciler) observeHosts(_ context.Context, s *scope, usable []infrav1.CapstanHost) error {
	connected := slices.ContainsFunc(usable, func(h infrav1.CapstanHost) bool { return r.Pool.Connected(h.Name) != nil })
	switch {
	case len(usable) == 0:
		set(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostsReason,
			"No CapstanHost admits namespace %s and matches spec.hostSelector: create one, or see spec.allowedNamespaces of those that exist", s.capstan.Namespace)
	case !connected:
		set(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostConnectedReason,
			"None of the %d hosts that the cluster may use is connected: see their conditions", len(usable))
	default:
		set(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionTrue, infrav1.HostsAvailableReason, "")
		return nil
	}
	// A cluster with an id already has a host, so its other steps continue.
	if s.capstan.Spec.ID == "" {
		return errWaiting
	}
	return nil
}

// showDomains shows the failure domains of the hosts that the cluster may use (IC-04) and that its network reaches. A
// domain stays while its hosts are away, but gets no new control plane machines.
func (r *Reconciler) showDomains(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	within, err := hostselection.Within(ctx, r.Client, r.Pool, s.capstan)
	if err != nil {
		return err
	}
	offering, _, _, err := hostselection.Offering(ctx, r.Client, s.capstan, hostselection.Reached(usable, r.Pool, within))
	if err != nil {
		return err
	}
	s.capstan.Status.FailureDomains = failureDomains(offering)
	return nil
}

// failureDomains of hosts, by name; at most 100, which is all that the contract has room for. Control plane machines
// would wait for ever in one where every host that may have them takes no more machines, repels them by a taint, or is lost: the replacement of a
// machine on a lost host must go elsewhere. If all of them are lost, there is no other place.
func failureDomains(usable []infrav1.CapstanHost) []clusterv1.FailureDomain {
	reached := slices.DeleteFunc(slices.Clone(usable), func(h infrav1.CapstanHost) bool {
		return conditions.IsFalse(&h, infrav1.HostConnectedCondition)
	})
	if !slices.ContainsFunc(reached, takesControlPlane) {
		reached = usable
	}
	byName := map[string]bool{}
	for i := range usable {
		byName[placement.FailureDomain(&usable[i])] = false
	}
	for i := range reached {
		name := placement.FailureDomain(&reached[i])
		byName[name] = byName[name] || takesControlPlane(reached[i])
	}
	var out []clusterv1.FailureDomain
	for name, controlPlane := range byName {
		out = append(out, clusterv1.FailureDomain{Name: name, ControlPlane: ptr.To(controlPlane)})
	}
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int { return cmp.Compare(a.Name, b.Name) })
	return out[:min(len(out), 100)]
}

func takesControlPlane(h infrav1.CapstanHost) bool {
	return placement.Schedulable(&h) && h.DeletionTimestamp.IsZero() && placement.AllowsControlPlane(&h) && !placement.Repels(&h)
}

// balancerHost returns the connection to the load balancer's host, or why there is none.
func (r *Reconciler) balancerHost(c *infrav1.CapstanCluster) (host *connections.Host, reason, why string) {
	lb := c.Spec.LoadBalancer
	host = r.Pool.Connected(lb.HostName)
	if host == nil {
		return nil, infrav1.NoHostConnectedReason, fmt.Sprintf("Host %s is not connected", lb.HostName)
	}
	if why := hostselection.Mismatch(lb.HostName, lb.HostID, host.ID()); why != "" {
		return nil, infrav1.LoadBalancerHostMismatchReason, why
	}
	return host, "", ""
}

// hostID is the identity of a host; empty while it is not connected.
func (r *Reconciler) hostID(name string) string {
	if host := r.Pool.Connected(name); host != nil {
		return host.ID()
	}
	return ""
}

// reserve writes the cluster's identity, its machine network and the load balancer's host to spec,
// all of them before the first side effect.
func (r *Reconciler) reserve(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	if err := checkNetworks(s); err != nil {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason, "%s", err)
		return errWaiting
	}
	if err := r.refuseRival(ctx, s); err != nil {
		return err
	}
	cidr, err := r.chooseLAN(ctx, s, usable)
	if err != nil {
		return err
	}
	lb := &s.capstan.Spec.LoadBalancer
	if s.capstan.Spec.ID != "" && s.capstan.Spec.Network.MachineCIDR != "" && (lb.HostName != "" || external(s.capstan)) {
		return nil
	}
	r.reserving.Lock()
	defer r.reserving.Unlock()
	before := s.capstan.DeepCopy()
	if s.capstan.Spec.ID == "" {
		s.capstan.Spec.ID = uuid.NewString()
	}
	s.capstan.Spec.Network.MachineCIDR = cmp.Or(s.capstan.Spec.Network.MachineCIDR, cidr)
	if err := r.chooseNetwork(ctx, s, netip.Prefix{}); err != nil {
		return err
	}
	if lb.HostName == "" && !external(s.capstan) {
		if err := r.chooseBalancerHost(ctx, s, usable); err != nil {
			return err
		}
	}
	return r.record(ctx, s, before)
}

// chooseBalancerHost puts the host of the load balancer into spec, and the overlay that this host can have.
func (r *Reconciler) chooseBalancerHost(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	candidates, err := r.balancerCandidates(ctx, s, usable)
	if err != nil {
		return err
	}
	host, err := placement.Choose(hostselection.Candidates(candidates, r.Pool), placement.Request{ControlPlane: true, AnyTaint: true})
	if err != nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.NoHostReason, "For the load balancer: %s", err)
		return errWaiting
	}
	if err := r.chooseOverlay(ctx, s, &hostselection.Named(usable, host)[0]); err != nil {
		return err
	}
	lb := &s.capstan.Spec.LoadBalancer
	lb.HostName, lb.HostID = host, r.hostID(host)
	if lb.HostID != "" {
		noteHost(s.capstan, lb.HostName, lb.HostID)
	}
	return nil
}

// chooseLAN returns the network of the LAN to which the machines are attached; empty for a cluster with a network of its own. It
// stops a cluster whose LAN no host offers. A cluster whose machines may run continues: they keep their network.
func (r *Reconciler) chooseLAN(ctx context.Context, s *scope, usable []infrav1.CapstanHost) (cidr string, err error) {
	if s.capstan.Spec.Network.LAN.Name == "" || s.capstan.AllowsBoot() {
		return "", nil
	}
	offering, cidr, why, err := hostselection.Offering(ctx, r.Client, s.capstan, usable)
	if err != nil || len(offering) > 0 {
		return cidr, err
	}
	set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason,
		"No CapstanHost that the cluster may use offers the LAN %s of spec.network.lan to namespace %s: %s", s.capstan.Spec.Network.LAN.Name, s.capstan.Namespace, cmp.Or(why, "no host is usable"))
	return "", errWaiting // A change of a CapstanHost is the event.
}

// checkNetworks returns the reason why the networks of the cluster cannot work.
func checkNetworks(s *scope) error {
	n, machines := s.cluster.Spec.ClusterNetwork, s.capstan.Spec.Network
	if err := network.Validate(machines, n.Pods.CIDRBlocks, n.Services.CIDRBlocks); err != nil {
		return err
	}
	if s.cluster.Spec.ControlPlaneRef.Kind == "CapstanControlPlane" && network.IPv6Only(machines) && (len(n.Pods.CIDRBlocks) == 0 || len(n.Services.CIDRBlocks) == 0) {
		return fmt.Errorf("the machines in %s have IPv6 addresses only, and the networks of pods and Services are IPv4 by default: "+
			"set IPv6 networks in spec.clusterNetwork.pods and spec.clusterNetwork.services of the Cluster", machines.MachineCIDR)
	}
	return network.CheckEndpoint(machines, s.cluster.Spec.ControlPlaneEndpoint.Host, s.capstan.Spec.ControlPlaneEndpoint.Host, s.capstan.Spec.LoadBalancer.BindAddress)
}

// record writes decisions to spec at once.
func (r *Reconciler) record(ctx context.Context, s *scope, before *infrav1.CapstanCluster) error {
	patch, err := reconciling.Record(ctx, r.Client, r.LiveClient, before, s.capstan)
	if err != nil {
		before.Spec.DeepCopyInto(&s.capstan.Spec) // An unrecorded decision must not be written at the end.
		return err
	}
	s.patch = patch
	if r.WatchNamespace == "" {
		r.decisions.note(s.capstan)
	}
	spec := &s.capstan.Spec
	ctrl.LoggerFrom(ctx).Info("Recorded the network and the load balancer", "id", spec.ID, "network", spec.Network.MachineCIDR,
		"CapstanHost", klog.KRef("", spec.LoadBalancer.HostName), "endpoint", spec.ControlPlaneEndpoint.String())
	return nil
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
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NoFreeNetworkReason, "%s", err)
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
func (r *Reconciler) ensureNetwork(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	if external(s.capstan) {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		return nil
	}
	host, reason, why := r.balancerHost(s.capstan)
	if host == nil {
		r.showWithoutBalancerHost(s, reason, why)
		return errWaiting // The connection is the event.
	}
	made := hasBalancer(host, s)
	// The rule applies to any author of the host in spec (ALL-18). A running load balancer stays, even if its host would no longer be
	// chosen.
	if !made && len(hostselection.Named(usable, host.Name())) == 0 {
		setNetworkAndBalancer(s.capstan, metav1.ConditionFalse, infrav1.HostNotAllowedReason, fmt.Sprintf(
			"spec.loadBalancer.hostName is CapstanHost %s, which does not admit namespace %s, or does not match spec.hostSelector: set another host, or change its spec.allowedNamespaces and labels",
			host.Name(), s.capstan.Namespace))
		return errWaiting // A change of the CapstanHost is the event.
	}
	h, err := r.capstanHost(ctx, host.Name())
	if err != nil {
		return err
	}
	if err := r.recordHost(ctx, s, host, h); err != nil {
		return err
	}
	if conditions.IsTrue(s.capstan, infrav1.NetworkReadyCondition) && made {
		return nil
	}
	return r.makeNetwork(ctx, s, host, h)
}

// showWithoutBalancerHost sets the conditions while the load balancer's host is not connected.
func (r *Reconciler) showWithoutBalancerHost(s *scope, reason, why string) {
	if holder := r.endpointHolder(s); holder != "" {
		// The cluster does not depend on its first host. MachineHealthChecks work only while both are True.
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason, "Host %s has the virtual address. %s", holder, why)
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
		return errWaiting // A change of the CapstanHost is the event.
	}
	n, refused, err := r.networkOn(ctx, s, h)
	if err != nil {
		return err
	}
	if refused != "" {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.LANNotOfferedReason, "CapstanHost %s %s", h.Name, refused)
		return errWaiting // A change of the CapstanHost is the event.
	}
	_, err = host.EnsureNetwork(ctx, n)
	if err == nil {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		return nil
	}
	set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason,
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
	return errWaiting
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

// ensureLoadBalancer makes the load balancer, keeps its members (IM-06), and records the endpoint (IC-10). A former host that keeps its
// load balancer holds nothing up, and is tried again.
func (r *Reconciler) ensureLoadBalancer(ctx context.Context, s *scope, _ []infrav1.CapstanHost) error {
	if external(s.capstan) {
		return externalEndpoint(s)
	}
	host, reason, why := r.balancerHost(s.capstan)
	if host == nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionUnknown, reason, "%s", why)
		return errWaiting
	}
	backends, err := loadbalancer.Members(ctx, r.Client, s.cluster, "")
	if err != nil {
		return err
	}
	h, err := r.capstanHost(ctx, host.Name())
	if err != nil {
		return err
	}
	s.leaving = r.leaveFormerHosts(ctx, s)
	switch err := r.serveEndpoint(ctx, s, host, h, backends); {
	case errors.Is(err, errWaiting):
		return cmp.Or(s.leaving, err)
	case err != nil:
		return errors.Join(err, s.leaving)
	}
	var trouble string
	if s.leaving != nil {
		trouble = s.leaving.Error()
	}
	set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason, "%s", trouble)
	return nil
}

// serveEndpoint makes the load balancer on its host, and fails unless it listens.
func (r *Reconciler) serveEndpoint(ctx context.Context, s *scope, host *connections.Host, h *infrav1.CapstanHost, backends []*hostpb.Backend) error {
	adoptEndpoint(s)
	if err := r.chooseVirtual(ctx, s, h); err != nil {
		return err
	}
	if err := r.refuseRivalEndpoint(ctx, s); err != nil {
		return err
	}
	on := loadbalancer.Host{Name: h.Name, Tunnel: h.Spec.TunnelAddress, Virtual: r.virtualAddress(s, h, host)}
	if loadbalancer.InLAN(s.capstan) && on.Virtual == nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason, "%s", notServing(s.capstan, h))
		return cmp.Or(r.withdraw(ctx, s, host), errWaiting) // A change of the CapstanHost is the event.
	}
	if loadbalancer.NeedsPort(s.capstan, on) {
		if err := r.choosePort(ctx, s, on, 0); err != nil {
			return err
		}
	}
	lb, err := loadbalancer.Ensure(ctx, host, loadbalancer.Desired(s.capstan, s.key(), backends, on))
	if refusal.Of(err).GetReason() == hostpb.Refusal_PORT_IN_USE && mayChoosePortAgain(s.capstan) {
		return cmp.Or(r.choosePort(ctx, s, on, s.capstan.Spec.LoadBalancer.Port), errWaiting) // The change of spec is the event.
	}
	if err != nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason,
			"Host %s refused the load balancer: %s", host.Name(), connections.PublicMessage(err))
		return fmt.Errorf("load balancer on host %s: %w", host.Name(), err)
	}
	s.capstan.Spec.LoadBalancer.HostID = host.ID() // also after hostName was changed
	if err := recordEndpoint(s, on); err != nil {
		return err
	}
	if !lb.GetServing() {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerNotServingReason,
			"The load balancer on host %s does not listen: %s", host.Name(), lb.GetMessage())
		return errWaiting
	}
	return nil
}

// adoptEndpoint completes the endpoint with the one that others set on the Cluster. The load balancer must listen on its port from the
// start. A field that is set stays, and an incomplete endpoint is not recorded: neither of its fields could be changed later.
func adoptEndpoint(s *scope) {
	own, others := &s.capstan.Spec.ControlPlaneEndpoint, s.cluster.Spec.ControlPlaneEndpoint
	complete := clusterv1.APIEndpoint{Host: cmp.Or(own.Host, others.Host), Port: cmp.Or(own.Port, others.Port)}
	if complete.IsValid() {
		*own = complete
	}
}

// recordEndpoint sets the empty fields of the endpoint: host and port of the load balancer.
func recordEndpoint(s *scope, on loadbalancer.Host) error {
	endpoint := &s.capstan.Spec.ControlPlaneEndpoint
	if endpoint.Host == "" {
		endpoint.Host = loadbalancer.Additional(s.capstan, on)
	}
	if endpoint.Host == "" {
		cidr, err := netip.ParsePrefix(s.capstan.Spec.Network.MachineCIDR)
		if err != nil {
			return err
		}
		endpoint.Host = network.Gateway(cidr).String()
	}
	if endpoint.Port == 0 {
		endpoint.Port = loadbalancer.Port(s.capstan)
	}
	return nil
}

// externalEndpoint waits for the endpoint that others provide (IC-14).
func externalEndpoint(s *scope) error {
	adoptEndpoint(s)
	if endpoint := s.capstan.Spec.ControlPlaneEndpoint; !endpoint.IsValid() {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForEndpointReason,
			"spec.loadBalancer.mode is External, and the endpoint has host %q and port %d: set host and port of spec.controlPlaneEndpoint on the Cluster or here",
			endpoint.Host, endpoint.Port)
		return errWaiting
	}
	set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerExternalReason, "")
	return nil
}

func setNetworkAndBalancer(c *infrav1.CapstanCluster, status metav1.ConditionStatus, reason, message string) {
	set(c, infrav1.NetworkReadyCondition, status, reason, "%s", message)
	set(c, infrav1.LoadBalancerReadyCondition, status, reason, "%s", message)
}

func external(c *infrav1.CapstanCluster) bool {
	return c.Spec.LoadBalancer.Mode == infrav1.LoadBalancerExternal
}

func set(c *infrav1.CapstanCluster, condition string, status metav1.ConditionStatus, reason, format string, args ...any) {
	conditions.Set(c, metav1.Condition{Type: condition, Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)})
}
