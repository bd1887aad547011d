package controlplane

import (
	"context"
	"fmt"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// formerFinalizer is the finalizer of earlier builds. It has no path, about which the API server warns.
const formerFinalizer = "capstancontrolplane.controlplane.capstan.dev"

// dropFormerFinalizer removes the former finalizer from a control plane that has the present one.
func (r *Reconciler) dropFormerFinalizer(ctx context.Context, controlPlane *controlplanev1.CapstanControlPlane) error {
	before := controlPlane.DeepCopy()
	if !controllerutil.ContainsFinalizer(controlPlane, controlplanev1.ControlPlaneFinalizer) || !controllerutil.RemoveFinalizer(controlPlane, formerFinalizer) {
		return nil
	}
	return r.Client.Patch(ctx, controlPlane, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// reconcileDelete waits until the workers are gone, because draining them needs the control plane,
// deletes the control plane Machines, waits until those are gone, and lets the object go. Each
// Machine's end is an event.
func (r *Reconciler) reconcileDelete(ctx context.Context, s *scope) (ctrl.Result, error) {
	r.prober.forget(client.ObjectKeyFromObject(s.controlPlane))
	workers, err := r.workers(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	if workers > 0 {
		s.deletingReason = controlplanev1.WaitingForWorkersReason
		s.deletingMessage = fmt.Sprintf("%d worker machines or machine pools have to be deleted first", workers)
		return ctrl.Result{}, nil
	}
	// Live, so that a Machine that was just made is not left behind.
	if s.machines, err = r.ownMachines(ctx, r.LiveClient, s); err != nil {
		return ctrl.Result{}, err
	}
	if len(s.machines) == 0 {
		// The garbage collector takes those that are owned, and nothing else would.
		if err := r.ownSecrets(ctx, s); err != nil {
			return ctrl.Result{}, err
		}
		s.deletingReason = clusterv1.DeletionCompletedReason
		before := s.controlPlane.DeepCopy()
		controllerutil.RemoveFinalizer(s.controlPlane, controlplanev1.ControlPlaneFinalizer)
		controllerutil.RemoveFinalizer(s.controlPlane, formerFinalizer)
		return ctrl.Result{}, client.IgnoreNotFound(r.Client.Patch(ctx, s.controlPlane, client.MergeFrom(before)))
	}
	s.deletingReason = controlplanev1.WaitingForMachinesReason
	s.deletingMessage = fmt.Sprintf("%d control plane machines are being deleted", len(s.machines))
	for _, machine := range s.machines.SortedByCreationTimestamp() {
		// Nobody needs a quorum any more.
		if err := r.dropHook(ctx, machine); err != nil {
			return ctrl.Result{}, err
		}
		if !machine.DeletionTimestamp.IsZero() {
			continue
		}
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, machine)); err != nil {
			return ctrl.Result{}, fmt.Errorf("cannot delete the Machine %s: %w", machine.Name, err)
		}
	}
	again, err := r.releaseAbandoned(ctx, s)
	return ctrl.Result{RequeueAfter: again}, err
}

// workers counts the worker Machines and MachinePools of the cluster.
func (r *Reconciler) workers(ctx context.Context, s *scope) (int, error) {
	ofCluster := []client.ListOption{client.InNamespace(s.cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}}
	machines := &clusterv1.MachineList{}
	if err := r.Client.List(ctx, machines, ofCluster...); err != nil {
		return 0, err
	}
	n := 0
	for i := range machines.Items {
		if !util.IsControlPlaneMachine(&machines.Items[i]) {
			n++
		}
	}
	pools := &clusterv1.MachinePoolList{}
	if err := r.Client.List(ctx, pools, ofCluster...); err != nil {
		return 0, err
	}
	return n + len(pools.Items), nil
}
