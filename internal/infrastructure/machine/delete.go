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
	"capstan.dev/capstan/internal/infrastructure/hostaccess"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
)

// reconcileDelete removes the machine: load balancer, host, volumes, claims, finalizer (IM-06, IM-09). It needs neither
// Machine nor Cluster. A machine that never got an id has nothing anywhere, but perhaps claims.
func (r *Reconciler) reconcileDelete(ctx context.Context, s *scope) error {
	for _, step := range []func(context.Context, *scope) error{r.leaveLoadBalancer, r.deleteMachine, r.releaseVolumes, r.releaseAddresses} {
		if err := step(ctx, s); errors.Is(err, errWaiting) {
			return nil
		} else if err != nil {
			blocked(s, "%s", err)
			return err
		}
	}
	r.forget(s.capstan)
	controllerutil.RemoveFinalizer(s.capstan, infrav1.MachineFinalizer)
	return nil
}

// forget drops this process's memory about the machine.
func (r *Reconciler) forget(m *infrav1.CapstanMachine) {
	key := client.ObjectKeyFromObject(m)
	r.unplaced.Delete(key)
	r.reserved.release(key)
	r.chosen.release(key)
	r.controller.ClearConsistencyStore(key, m.UID)
}

func blocked(s *scope, format string, args ...any) {
	set(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason, format, args...)
}

// leaveLoadBalancer removes a control plane machine from the load balancer before its deletion, so that no client is
// sent to it. It does nothing for a cluster that is being deleted, which loses its load balancer anyway, and for a host
// that does not answer: its load balancer checks the health of its members itself, and is updated when the host is
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
	members, err := loadbalancer.Members(ctx, r.Client, s.cluster, s.capstan.Name)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range hostaccess.BalancerHosts(capstanCluster) {
		errs = append(errs, r.keepMembers(ctx, s, capstanCluster, name, members))
	}
	return errors.Join(errs...)
}

// keepMembers removes all but the members from the load balancer of one host, if the host is connected and has one.
func (r *Reconciler) keepMembers(ctx context.Context, s *scope, c *infrav1.CapstanCluster, name string, members []*hostpb.Backend) error {
	host := r.Pool.Get(name)
	if host == nil || host.Connected() != nil || !owner.Same(host.LoadBalancer(c.Spec.ID), s.cluster) {
		return nil
	}
	h := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: name}, h); err != nil {
		return client.IgnoreNotFound(err)
	}
	desired := loadbalancer.Desired(c, client.ObjectKeyFromObject(s.cluster), members, loadbalancer.Host{
		Name: name, Tunnel: h.Spec.TunnelAddress, Virtual: host.LoadBalancer(c.Spec.ID).GetVirtualAddress(),
	})
	end, err := r.turn(ctx, s, host)
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
	spec := s.capstan.Spec
	if spec.ID == "" || spec.HostName == "" || hostaccess.Abandoned(s.capstan) {
		return nil
	}
	h := &infrav1.CapstanHost{}
	switch err := r.Client.Get(ctx, client.ObjectKey{Name: spec.HostName}, h); {
	case apierrors.IsNotFound(err):
		blocked(s, "CapstanHost %s does not exist, so the machine cannot be removed. Create the CapstanHost again. If the host is permanently lost, annotate this CapstanMachine with %s",
			spec.HostName, infrav1.HostAbandonedAnnotation)
		return errWaiting
	case err != nil:
		return err
	case hostaccess.Abandoned(h):
		return nil
	}
	host := r.Pool.Get(spec.HostName)
	if host == nil || host.Connected() != nil {
		fenced, why, err := r.fenced(ctx, s, h)
		if err != nil || fenced {
			return err
		}
		blocked(s, "%s", strings.TrimSpace(fmt.Sprintf("Host %s is not connected. If it is permanently lost, annotate the CapstanHost with %s. %s", spec.HostName, infrav1.HostAbandonedAnnotation, why)))
		return errWaiting
	}
	if why := hostaccess.Mismatch(spec.HostName, spec.HostID, host.ID()); why != "" {
		blocked(s, "%s", why)
		return errWaiting
	}
	if other := host.Machine(spec.ID).GetSpec(); other != nil && !owner.Same(other, s.capstan) {
		return nil // This is a copy of that one, and has nothing there.
	}
	end, err := r.turn(ctx, s, host)
	if err != nil {
		return err
	}
	defer end()
	res, err := host.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: spec.ID, Namespace: s.capstan.Namespace, Name: s.capstan.Name})
	if connections.Code(err) == codes.PermissionDenied {
		return nil // The same holds while the host has not reported the other machine yet.
	}
	if err != nil {
		return fmt.Errorf("delete the machine on host %s: %s", spec.HostName, connections.Message(err))
	}
	if !res.GetDone() {
		progress := "Host " + spec.HostName + " is removing the machine"
		if message := host.Machine(spec.ID).GetStatus().GetMessage(); message != "" {
			progress += ": " + message
		}
		set(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason, "%s", progress)
		return errWaiting
	}
	host.Release(spec.ID)
	ctrl.LoggerFrom(ctx).Info("Host removed the machine", "CapstanHost", klog.KRef("", spec.HostName), "id", spec.ID)
	return nil
}

// releaseAddresses waits until the machine's claims are deleted (IPAM-07).
func (r *Reconciler) releaseAddresses(ctx context.Context, s *scope) error {
	gone, err := r.claimsGone(ctx, s)
	if err != nil {
		return err
	}
	if !gone {
		set(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason, "Waiting for the deletion of the IPAddressClaims")
		return errWaiting
	}
	return nil
}
