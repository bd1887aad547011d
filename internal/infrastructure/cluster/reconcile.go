package cluster

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileNormal runs the steps of the contract in their order (IC-11).
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (res ctrl.Result, err error) {
	if provisioned(s.capstan) {
		reconciling.KeepCondition(s.capstan, infrav1.BootAllowedCondition) // No step changes it, also while one waits for a host.
	}
	if s.usable, err = hostselection.Usable(ctx, r.Client, s.capstan.Namespace, s.capstan.Spec.HostSelector); err != nil {
		return ctrl.Result{}, err
	}
	if err := reconciling.RunSteps(ctx, s, r.observeHosts, r.reserve, r.setFailureDomains); err != nil {
		return ctrl.Result{}, reconciling.IgnoreWaiting(err)
	}
	res, err = r.reconcileBalancerHost(ctx, s)
	// The other hosts of the cluster's network do not wait for that one.
	return res, errors.Join(err, r.reconcileOverlay(ctx, s), r.reconcileLAN(ctx, s))
}

// reconcileBalancerHost makes the network and the load balancer on the load balancer's host.
func (r *Reconciler) reconcileBalancerHost(ctx context.Context, s *scope) (ctrl.Result, error) {
	if err := reconciling.RunSteps(ctx, s, r.ensureNetwork, r.claimAddress, r.ensureLoadBalancer); err != nil {
		return ctrl.Result{}, reconciling.IgnoreWaiting(err)
	}
	res, err := r.provision(ctx, s)
	return res, errors.Join(err, s.leaving)
}

// observeHosts looks whether there is a host that the cluster may use.
func (r *Reconciler) observeHosts(_ context.Context, s *scope) error {
	connected := slices.ContainsFunc(s.usable, func(h infrav1.CapstanHost) bool { return r.Pool.Connected(h.Name) != nil })
	switch {
	case len(s.usable) == 0:
		reconciling.SetCondition(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostsReason,
			"No CapstanHost admits namespace %s and matches spec.hostSelector: create one, or see spec.allowedNamespaces of those that exist", s.capstan.Namespace)
	case !connected:
		reconciling.SetCondition(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionFalse, infrav1.NoHostConnectedReason,
			"None of the %d hosts that the cluster may use is connected: see their conditions", len(s.usable))
	default:
		reconciling.SetCondition(s.capstan, infrav1.HostsAvailableCondition, metav1.ConditionTrue, infrav1.HostsAvailableReason, "")
		return nil
	}
	// A cluster with an id already has a host, so its other steps continue.
	if s.capstan.Spec.ID == "" {
		return reconciling.ErrWaiting
	}
	return nil
}

// reserve writes the cluster's identity, its machine network and the load balancer's host to spec,
// all of them before the first side effect.
func (r *Reconciler) reserve(ctx context.Context, s *scope) error {
	if err := checkNetworks(s); err != nil {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkInvalidReason, "%s", err)
		return reconciling.ErrWaiting
	}
	if err := r.refuseRival(ctx, s); err != nil {
		return err
	}
	cidr, err := r.chooseLAN(ctx, s)
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
		if err := r.chooseBalancerHost(ctx, s); err != nil {
			return err
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
	if r.WatchNamespace == "" {
		r.decisions.note(s.capstan)
	}
	spec := &s.capstan.Spec
	ctrl.LoggerFrom(ctx).Info("Recorded the network and the load balancer", "id", spec.ID, "network", spec.Network.MachineCIDR,
		"CapstanHost", klog.KRef("", spec.LoadBalancer.HostName), "endpoint", spec.ControlPlaneEndpoint.String())
	return nil
}

func setNetworkAndBalancer(c *infrav1.CapstanCluster, status metav1.ConditionStatus, reason, message string) {
	reconciling.SetCondition(c, infrav1.NetworkReadyCondition, status, reason, "%s", message)
	reconciling.SetCondition(c, infrav1.LoadBalancerReadyCondition, status, reason, "%s", message)
}
