package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

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
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostaccess"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// errWaiting ends a reconcile that an event will continue; a condition says what for.
var errWaiting = errors.New("waiting")

// reconcileNormal goes through the contract's steps in their order (IC-11). Each one either is done, or
// says in a condition what it waits for.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	usable, err := hostaccess.Usable(ctx, r.Client, s.capstan.Namespace, s.capstan.Spec.HostSelector)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, step := range []func(context.Context, *scope, []infrav1.CapstanHost) error{
		r.observeHosts, r.reserve, r.showDomains, r.ensureNetwork, r.claimAddress, r.ensureLoadBalancer,
	} {
		if err := step(ctx, s, usable); errors.Is(err, errWaiting) {
			return ctrl.Result{}, nil
		} else if err != nil {
			return ctrl.Result{}, err
		}
	}
	return r.provision(ctx, s)
}

// observeHosts looks whether there is a host that the cluster may use.
func (r *Reconciler) observeHosts(_ context.Context, s *scope, usable []infrav1.CapstanHost) error {
	connected := slices.ContainsFunc(usable, func(h infrav1.CapstanHost) bool { return r.connected(h.Name) != nil })
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
	// A cluster that has all it needs goes on as well as it can.
	if s.capstan.Spec.ID == "" {
		return errWaiting
	}
	return nil
}

// showDomains shows the failure domains of the hosts that the cluster may use (IC-04), which are those of its load
// balancer's box: its network does not leave that. A domain stays while its hosts are away: control planes should
// not move because of an outage.
func (r *Reconciler) showDomains(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	box, err := hostaccess.BoxOf(ctx, r.Client, r.Pool, s.capstan)
	if err != nil {
		return err
	}
	s.capstan.Status.FailureDomains = failureDomains(hostaccess.OnBox(usable, r.Pool, box))
	return nil
}

// failureDomains of hosts, by name; at most 100, which is all that the contract has room for. Control plane machines
// would wait for ever in one where every host that may have them takes no more machines.
func failureDomains(usable []infrav1.CapstanHost) []clusterv1.FailureDomain {
	byName := map[string]bool{}
	for i := range usable {
		name := placement.FailureDomain(&usable[i])
		takes := !ptr.Deref(usable[i].Spec.Unschedulable, false) && usable[i].DeletionTimestamp.IsZero()
		byName[name] = byName[name] || takes && placement.AllowsControlPlane(&usable[i])
	}
	var out []clusterv1.FailureDomain
	for name, controlPlane := range byName {
		out = append(out, clusterv1.FailureDomain{Name: name, ControlPlane: ptr.To(controlPlane)})
	}
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out[:min(len(out), 100)]
}

// connected returns the connection to a host, or nil.
func (r *Reconciler) connected(name string) *connections.Host {
	if h := r.Pool.Get(name); h != nil && h.Connected() == nil {
		return h
	}
	return nil
}

// balancerHost returns the connection to the load balancer's host, or why there is none.
func (r *Reconciler) balancerHost(c *infrav1.CapstanCluster) (host *connections.Host, reason, why string) {
	lb := c.Spec.LoadBalancer
	host = r.connected(lb.HostName)
	if host == nil {
		return nil, infrav1.NoHostConnectedReason, fmt.Sprintf("Host %s is not connected", lb.HostName)
	}
	if why := hostaccess.Mismatch(lb.HostName, lb.HostID, host.ID()); why != "" {
		return nil, infrav1.LoadBalancerHostMismatchReason, why
	}
	return host, "", ""
}

// hostID is the identity of a host; empty while it is not connected.
func (r *Reconciler) hostID(name string) string {
	if host := r.connected(name); host != nil {
		return host.ID()
	}
	return ""
}

// reserve writes the cluster's identity, its machine network and the load balancer's host to spec,
// all of them before the first side effect.
func (r *Reconciler) reserve(ctx context.Context, s *scope, usable []infrav1.CapstanHost) error {
	clusterNetwork := s.cluster.Spec.ClusterNetwork
	if err := network.Validate(s.capstan.Spec.Network, clusterNetwork.Pods.CIDRBlocks, clusterNetwork.Services.CIDRBlocks); err != nil {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason, "%s", err)
		return errWaiting
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
	if err := r.chooseNetwork(ctx, s, netip.Prefix{}); err != nil {
		return err
	}
	if lb.HostName == "" && !external(s.capstan) {
		host, err := placement.Choose(hostaccess.Candidates(usable, r.Pool), placement.Request{ControlPlane: true})
		if err != nil {
			set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.NoHostReason, "For the load balancer: %s", err)
			return errWaiting
		}
		lb.HostName, lb.HostID = host, r.hostID(host)
		if lb.HostID != "" {
			noteHost(s.capstan, lb.HostName, lb.HostID)
		}
	}
	return r.record(ctx, s, before)
}

// record writes decisions to spec at once.
func (r *Reconciler) record(ctx context.Context, s *scope, before *infrav1.CapstanCluster) error {
	patch, err := reconciling.Record(ctx, r.Client, r.LiveClient, before, s.capstan)
	if err != nil {
		before.Spec.DeepCopyInto(&s.capstan.Spec) // An unrecorded decision must not be written at the end.
		return err
	}
	s.patch = patch
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
	clusters := &infrav1.CapstanClusterList{}
	if err := r.LiveClient.List(ctx, clusters, client.InNamespace(r.WatchNamespace)); err != nil {
		return err
	}
	clusterNetwork := s.cluster.Spec.ClusterNetwork
	taken := network.Parse(append(slices.Clone(clusterNetwork.Pods.CIDRBlocks), clusterNetwork.Services.CIDRBlocks...)...)
	for i := range clusters.Items {
		if clusters.Items[i].UID != s.capstan.UID {
			taken = append(taken, network.Parse(clusters.Items[i].Spec.Network.MachineCIDR)...)
		}
	}
	cidr, err := network.Choose(r.NetworkPool, r.NetworkBits, taken, refused)
	if err != nil {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NoFreeNetworkReason, "%s", err)
		return err // no event says that another plane's network became free
	}
	s.capstan.Spec.Network.MachineCIDR = cidr.String()
	metav1.SetMetaDataAnnotation(&s.capstan.ObjectMeta, infrav1.MachineCIDRFromPoolAnnotation, "")
	return nil
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
		// The load balancer is a process of its own: it may well serve while capstand does not answer.
		setNetworkAndBalancer(s.capstan, metav1.ConditionUnknown, reason, why)
		return errWaiting
	}
	made := owner.Same(host.LoadBalancer(s.capstan.Spec.ID), s.cluster)
	// Whoever wrote the host to spec (ALL-18). What runs goes on, also when its host would not be chosen any more.
	if !made && len(hostaccess.Named(usable, host.Name())) == 0 {
		setNetworkAndBalancer(s.capstan, metav1.ConditionFalse, infrav1.HostNotAllowedReason, fmt.Sprintf(
			"spec.loadBalancer.hostName is CapstanHost %s, which does not admit namespace %s, or does not match spec.hostSelector: set another host, or change its spec.allowedNamespaces and labels",
			host.Name(), s.capstan.Namespace))
		return errWaiting // A change of the CapstanHost is the event.
	}
	if err := r.recordHost(ctx, s, host); err != nil {
		return err
	}
	if conditions.IsTrue(s.capstan, infrav1.NetworkReadyCondition) && made {
		return nil
	}
	_, err := host.EnsureNetwork(ctx, &hostpb.Network{
		Id: s.capstan.Spec.ID, Namespace: s.cluster.Namespace, Name: s.cluster.Name,
		Cidr: s.capstan.Spec.Network.MachineCIDR, Ipv6Cidr: s.capstan.Spec.Network.MachineIPv6CIDR,
	})
	if err == nil {
		set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "")
		return nil
	}
	set(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason,
		"Host %s refused network %s: %s", host.Name(), s.capstan.Spec.Network, connections.Message(err))
	if mayChooseAgain(s.capstan, refusal.Of(err)) {
		return r.chooseAgain(ctx, s)
	}
	return fmt.Errorf("network %s on host %s: %w", s.capstan.Spec.Network, host.Name(), err)
}

// mayChooseAgain returns whether a host refused the machine network for a conflict, the controller chose that network,
// and no machine uses it yet. The controller never chooses the IPv6 network.
func mayChooseAgain(c *infrav1.CapstanCluster, r *hostpb.Refusal) bool {
	_, ours := c.Annotations[infrav1.MachineCIDRFromPoolAnnotation]
	return ours && r.Reason == hostpb.Refusal_NETWORK_CONFLICT && r.Subject == c.Spec.Network.MachineCIDR &&
		!ptr.Deref(c.Status.Initialization.Provisioned, false)
}

// chooseAgain tries the network behind the one that a host refused.
func (r *Reconciler) chooseAgain(ctx context.Context, s *scope) error {
	refused, err := netip.ParsePrefix(s.capstan.Spec.Network.MachineCIDR)
	if err != nil {
		return err
	}
	r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, infrav1.NetworkRefusedReason, "ChooseNetwork",
		"%s", conditions.GetMessage(s.capstan, infrav1.NetworkReadyCondition))
	r.reserving.Lock()
	before := s.capstan.DeepCopy()
	err = r.chooseNetwork(ctx, s, refused)
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

// ensureLoadBalancer makes the load balancer, keeps its members (IM-06), and records the endpoint (IC-10).
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
	leaving := r.leaveFormerHosts(ctx, s)
	adoptEndpoint(s)
	lb, err := loadbalancer.Ensure(ctx, host, loadbalancer.Desired(s.capstan, s.key(), backends))
	if err != nil {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason,
			"Host %s refused the load balancer: %s", host.Name(), connections.Message(err))
		return errors.Join(fmt.Errorf("load balancer on host %s: %w", host.Name(), err), leaving)
	}
	s.capstan.Spec.LoadBalancer.HostID = host.ID() // also after hostName was changed
	if err := recordEndpoint(s); err != nil {
		return err
	}
	if !lb.GetServing() {
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerNotServingReason,
			"The load balancer on host %s does not listen: %s", host.Name(), lb.GetMessage())
		return errWaiting
	}
	var trouble string
	if leaving != nil {
		trouble = leaving.Error()
	}
	set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason, "%s", trouble)
	return leaving
}

// adoptEndpoint takes over an endpoint that the user set on the Cluster. The load balancer must listen on its port from
// the start.
func adoptEndpoint(s *scope) {
	if s.capstan.Spec.ControlPlaneEndpoint.Host == "" && s.cluster.Spec.ControlPlaneEndpoint.IsValid() {
		s.capstan.Spec.ControlPlaneEndpoint = s.cluster.Spec.ControlPlaneEndpoint
	}
}

// recordEndpoint fills in what the user left open: host and port of the load balancer.
func recordEndpoint(s *scope) error {
	endpoint := &s.capstan.Spec.ControlPlaneEndpoint
	if endpoint.Host == "" {
		endpoint.Host = cmp.Or(s.capstan.Spec.LoadBalancer.BindAddress, s.capstan.Spec.LoadBalancer.Address)
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
	if s.capstan.Spec.ControlPlaneEndpoint.IsZero() {
		s.capstan.Spec.ControlPlaneEndpoint = s.cluster.Spec.ControlPlaneEndpoint
	}
	if !s.capstan.Spec.ControlPlaneEndpoint.IsValid() {
		s.capstan.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{}
		set(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForEndpointReason,
			"spec.loadBalancer.mode is External: set spec.controlPlaneEndpoint on the Cluster or here")
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
