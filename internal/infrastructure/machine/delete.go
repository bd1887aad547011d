package machine

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileDelete removes the machine: load balancer, host, volumes, claims, finalizer (IM-06, IM-09). It needs neither
// Machine nor Cluster. A machine that never got an id has nothing anywhere, but perhaps claims.
func (r *Reconciler) reconcileDelete(ctx context.Context, s *scope) error {
	if err := reconciling.RunSteps(ctx, s, r.leaveLoadBalancer, r.deleteMachine, r.releaseVolumes, r.releaseAddresses); err != nil {
		if reconciling.IgnoreWaiting(err) != nil {
			reconciling.ShowBlocked(s.capstan, "%s", err)
		}
		return reconciling.IgnoreWaiting(err)
	}
	r.forget(s.capstan)
	controllerutil.RemoveFinalizer(s.capstan, infrav1.MachineFinalizer)
	return nil
}

// forget drops what this process and the cache remember about the machine.
func (r *Reconciler) forget(m *infrav1.CapstanMachine) {
	key := client.ObjectKeyFromObject(m)
	r.drop(key)
	r.controller.ClearConsistencyStore(key, m.UID)
}

// leaveLoadBalancer removes a control plane machine from the load balancer before its deletion, so that no client is
// sent to it. It does nothing for a cluster that is being deleted, which loses its load balancer anyway, and for a host
// that does not answer: its load balancer checks the health of its backends itself, and is updated when the host is
// back.
func (r *Reconciler) leaveLoadBalancer(ctx context.Context, s *scope) error {
	if s.capstan.Spec.ID == "" || s.machine == nil || s.cluster == nil || !s.cluster.DeletionTimestamp.IsZero() || !util.IsControlPlaneMachine(s.machine) {
		return nil
	}
	capstanCluster, err := r.capstanCluster(ctx, s)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	backends, err := loadbalancer.ListBackends(ctx, r.Client, s.cluster, capstanCluster.Spec.Network, s.capstan.Name)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range hostselection.BalancerHosts(capstanCluster) {
		errs = append(errs, r.keepBackends(ctx, s, capstanCluster, name, backends))
	}
	return errors.Join(errs...)
}

// keepBackends removes all but the given backends from the load balancer of one host, if the host is connected and has one.
func (r *Reconciler) keepBackends(ctx context.Context, s *scope, c *infrav1.CapstanCluster, name string, backends []*hostpb.Backend) error {
	host := r.Pool.Connected(name)
	if host == nil || !owner.Same(host.LoadBalancer(c.Spec.ID), s.cluster) {
		return nil
	}
	h := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: name}, h); err != nil {
		return client.IgnoreNotFound(err)
	}
	desired := loadbalancer.Desired(c, client.ObjectKeyFromObject(s.cluster), backends, loadbalancer.Host{
		Name: name, Tunnel: h.Spec.TunnelAddress, Virtual: host.LoadBalancer(c.Spec.ID).GetVirtualAddress(),
	})
	end, err := r.turn(ctx, s, host.Name(), showWait)
	if err != nil {
		return err
	}
	defer end()
	if _, err := loadbalancer.Ensure(ctx, host, desired); err != nil {
		return fmt.Errorf("leave the load balancer on host %s: %s", name, connections.Message(err))
	}
	return nil
}

// deleteMachine makes the host remove the machine and waits for the removal.
func (r *Reconciler) deleteMachine(ctx context.Context, s *scope) error {
	host, err := r.hostToClear(ctx, s)
	if err != nil || host == nil {
		return err
	}
	end, err := r.turn(ctx, s, host.Name(), showWait)
	if err != nil {
		return err
	}
	defer end()
	return r.removeFrom(ctx, s, host)
}

// hostToClear returns the connected host from which the machine must be removed. It returns nil if the machine is on no host, or
// counts as removed: the host was abandoned, or has fenced itself, or has nothing of a namespace that it does not admit.
func (r *Reconciler) hostToClear(ctx context.Context, s *scope) (*connections.Host, error) {
	spec := s.capstan.Spec
	if spec.ID == "" || spec.HostName == "" || hostselection.Abandoned(s.capstan) {
		return nil, nil
	}
	h := &infrav1.CapstanHost{}
	switch err := r.Client.Get(ctx, client.ObjectKey{Name: spec.HostName}, h); {
	case apierrors.IsNotFound(err):
		reconciling.ShowBlocked(s.capstan, "CapstanHost %s does not exist, so the machine cannot be removed. Create the CapstanHost again. If the host is permanently lost, annotate this CapstanMachine with %s",
			spec.HostName, infrav1.HostAbandonedAnnotation)
		return nil, reconciling.ErrWaiting
	case err != nil:
		return nil, err
	case hostselection.Abandoned(h):
		return nil, nil
	}
	host := r.Pool.Connected(spec.HostName)
	if host == nil {
		return nil, r.awaitFencing(ctx, s, h)
	}
	if why := hostselection.Mismatch(spec.HostName, spec.HostID, host.ID()); why != "" {
		reconciling.ShowBlocked(s.capstan, "%s", why)
		return nil, reconciling.ErrWaiting
	}
	if there := host.Machine(spec.ID).GetSpec(); there != nil {
		if !owner.Same(there, s.capstan) {
			return nil, nil // This object is a copy of the other one, and has nothing there.
		}
		return host, nil
	}
	if may, err := r.mayBeOn(ctx, s, h); err != nil || !may {
		return nil, err
	}
	return host, nil
}

// mayBeOn returns whether a connected host that does not show the machine can have it nevertheless, because a request to make it is on its
// way. A namespace can write any id and any host into an object, and the host would keep a record of each id that it is asked to delete. So
// the host must admit the namespace (ALL-18), or this process must have called it while the host admitted the namespace. Requests of an
// earlier manager need no record: the host shows their machines when this manager connects, and nothing in an object would be evidence of
// them, because the namespace can write it.
func (r *Reconciler) mayBeOn(ctx context.Context, s *scope, h *infrav1.CapstanHost) (bool, error) {
	if r.called(s.capstan) {
		return true, nil
	}
	admitting, err := hostselection.Admitting(ctx, r.Client, s.capstan.Namespace, []infrav1.CapstanHost{*h})
	if err != nil {
		return false, fmt.Errorf("read Namespace %s: %w", s.capstan.Namespace, err)
	}
	return len(admitting) > 0, nil
}

// awaitFencing waits until a host without a connection has stopped its machines by itself.
func (r *Reconciler) awaitFencing(ctx context.Context, s *scope, h *infrav1.CapstanHost) error {
	fenced, why, err := r.fenced(ctx, s, h)
	if err != nil || fenced {
		return err
	}
	blockedByLost(s, h.Name, why)
	return reconciling.ErrWaiting
}

func blockedByLost(s *scope, host, why string) {
	reconciling.ShowBlocked(s.capstan, "%s", strings.TrimSpace(fmt.Sprintf("Host %s is not connected. If it is permanently lost, annotate the CapstanHost with %s. %s", host, infrav1.HostAbandonedAnnotation, why)))
}

// removeFrom calls the host to remove the machine. It waits while the removal runs.
func (r *Reconciler) removeFrom(ctx context.Context, s *scope, host *connections.Host) error {
	id := s.capstan.Spec.ID
	res, err := host.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: id, Namespace: s.capstan.Namespace, Name: s.capstan.Name})
	if connections.Code(err) == codes.PermissionDenied {
		return nil // This object is a copy: the id belongs to another machine, which the host has not reported yet.
	}
	if err != nil {
		return fmt.Errorf("delete the machine on host %s: %s", host.Name(), connections.Message(err))
	}
	if !res.GetDone() {
		progress := "Host " + host.Name() + " is removing the machine"
		if message := host.Machine(id).GetStatus().GetMessage(); message != "" {
			progress += ": " + message
		}
		reconciling.SetCondition(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason, "%s", progress)
		return reconciling.ErrWaiting
	}
	host.Release(id)
	ctrl.LoggerFrom(ctx).Info("Host removed the machine", "CapstanHost", klog.KRef("", host.Name()), "id", id)
	return nil
}

// releaseAddresses waits until the machine's claims are deleted (IPAM-07).
func (r *Reconciler) releaseAddresses(ctx context.Context, s *scope) error {
	gone, err := r.claimsGone(ctx, s)
	if err != nil {
		return err
	}
	if !gone {
		reconciling.SetCondition(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason, "Waiting for the deletion of the IPAddressClaims")
		return reconciling.ErrWaiting
	}
	return nil
}
