package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
)

// balancerHost returns the connection to the load balancer's host. Without one, it returns the reason and the message of a condition.
func (r *Reconciler) balancerHost(ctx context.Context, c *infrav1.CapstanCluster) (host *connections.Host, reason, why string) {
	lb := c.Spec.LoadBalancer
	host = r.Pool.Connected(lb.HostName)
	if host == nil {
		if _, err := r.capstanHost(ctx, lb.HostName); apierrors.IsNotFound(err) {
			return nil, infrav1.NoHostConnectedReason, fmt.Sprintf(
				"CapstanHost %s of spec.loadBalancer.hostName does not exist: name another host, and remove spec.loadBalancer.hostID", lb.HostName)
		}
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

// chooseBalancerHost puts the host of the load balancer into spec, and the overlay that this host can have.
func (r *Reconciler) chooseBalancerHost(ctx context.Context, s *scope) error {
	candidates, err := r.balancerCandidates(ctx, s)
	if err != nil {
		return err
	}
	host, err := placement.Choose(hostselection.Candidates(candidates, r.Pool), placement.Request{ControlPlane: true, AnyTaint: true})
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerNoHostReason, "For the load balancer: %s", err)
		return reconciling.ErrWaiting
	}
	if err := r.chooseOverlay(ctx, s, hostselection.Find(s.usable, host)); err != nil {
		return err
	}
	lb := &s.capstan.Spec.LoadBalancer
	lb.HostName, lb.HostID = host, r.hostID(host)
	if lb.HostID != "" {
		noteHost(s.capstan, lb.HostName, lb.HostID)
	}
	return nil
}

func external(c *infrav1.CapstanCluster) bool {
	return c.Spec.LoadBalancer.Mode == infrav1.LoadBalancerExternal
}

// ensureLoadBalancer makes the load balancer, keeps its backends (IM-06), and records the endpoint (IC-10). A former host that keeps its
// load balancer holds nothing up, and is tried again.
func (r *Reconciler) ensureLoadBalancer(ctx context.Context, s *scope) error {
	if external(s.capstan) {
		return externalEndpoint(s)
	}
	host, reason, why := r.balancerHost(ctx, s.capstan)
	if host == nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionUnknown, reason, "%s", why)
		return reconciling.ErrWaiting
	}
	backends, err := loadbalancer.ListBackends(ctx, r.Client, s.cluster, s.capstan.Spec.Network, "")
	if err != nil {
		return err
	}
	h, err := r.capstanHost(ctx, host.Name())
	if err != nil {
		return err
	}
	s.leaving = r.leaveFormerHosts(ctx, s)
	switch err := r.serveEndpoint(ctx, s, host, h, backends); {
	case errors.Is(err, reconciling.ErrWaiting):
		return cmp.Or(s.leaving, err)
	case err != nil:
		return errors.Join(err, s.leaving)
	}
	var trouble string
	if s.leaving != nil {
		trouble = s.leaving.Error()
	}
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerReadyReason, "%s", trouble)
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
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason, "%s", notServing(s.capstan, h))
		return cmp.Or(r.withdraw(ctx, s, host), reconciling.ErrWaiting) // A change of the CapstanHost is the event.
	}
	if loadbalancer.NeedsPort(s.capstan, on) {
		if err := r.choosePort(ctx, s, on, 0); err != nil {
			return err
		}
	}
	lb, err := loadbalancer.Ensure(ctx, host, loadbalancer.Desired(s.capstan, s.key(), backends, on))
	if refusal.Of(err).GetReason() == hostpb.Refusal_PORT_IN_USE && mayChoosePortAgain(s.capstan) {
		return cmp.Or(r.choosePort(ctx, s, on, s.capstan.Spec.LoadBalancer.Port), reconciling.ErrWaiting) // The change of spec is the event.
	}
	if err != nil {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerRefusedReason,
			"Host %s refused the load balancer: %s", host.Name(), connections.PublicMessage(err))
		return fmt.Errorf("load balancer on host %s: %w", host.Name(), err)
	}
	s.capstan.Spec.LoadBalancer.HostID = host.ID() // also after hostName was changed
	if err := recordEndpoint(s, on); err != nil {
		return err
	}
	if !lb.GetServing() {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.LoadBalancerNotServingReason,
			"The load balancer on host %s does not listen: %s", host.Name(), lb.GetMessage())
		return reconciling.ErrWaiting
	}
	return nil
}
