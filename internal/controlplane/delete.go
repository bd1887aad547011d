package controlplane

import (
	"context"
	"fmt"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// formerFinalizer is the finalizer of earlier builds. It has no path, about which the API server warns.
const formerFinalizer = "capstancontrolplane.controlplane.capstan.dev"

// dropFormerFinalizer removes the former finalizer from a control plane that has the present one.
func dropFormerFinalizer(ctx context.Context, c client.Client, controlPlane *controlplanev1.CapstanControlPlane) error {
	if !controllerutil.ContainsFinalizer(controlPlane, controlplanev1.ControlPlaneFinalizer) {
		return nil
	}
	return reconciling.Change(ctx, c, controlPlane, func() { controllerutil.RemoveFinalizer(controlPlane, formerFinalizer) })
}

// deletion is the step of a control plane that is being deleted.
type deletion struct {
	*clients
	*machineReader
	*machineWriter
	*secrets
	*abandonment
}

// reconcile waits for the deletion of the workers, because draining them needs the control plane, then deletes the control
// plane Machines, waits for their deletion and removes the finalizer. The deletion of each Machine is an event.
func (r *deletion) reconcile(ctx context.Context, s *scope) (result, error) {
	if s.clusterGone {
		return r.reconcileWithoutCluster(ctx, s)
	}
	workers, err := r.workers(ctx, s)
	if err != nil {
		return result{}, err
	}
	if workers > 0 {
		return deleting(controlplanev1.WaitingForWorkersReason, fmt.Sprintf("%d worker machines or machine pools have to be deleted first", workers)), nil
	}
	// Live, so that a Machine that was just created is not left behind.
	if s.Machines, err = r.ownMachines(ctx, r.LiveClient, s); err != nil {
		return result{}, err
	}
	if len(s.Machines) == 0 {
		// The garbage collector deletes owned Secrets only.
		if err := r.ownSecrets(ctx, s); err != nil {
			return result{}, err
		}
		return r.complete(ctx, s)
	}
	out := deleting(controlplanev1.WaitingForMachinesReason, fmt.Sprintf("%d control plane machines are being deleted", len(s.Machines)))
	if err := r.deleteMachines(ctx, s); err != nil {
		return out, err
	}
	again, err := r.releaseAbandoned(ctx, s)
	out.requeueAfter = again
	return out, err
}

// deleteMachines deletes the Machines. Their hooks protect the quorum, which is not needed any more.
func (r *deletion) deleteMachines(ctx context.Context, s *scope) error {
	for _, machine := range s.Machines.SortedByCreationTimestamp() {
		if err := r.dropHook(ctx, machine); err != nil {
			return err
		}
		if !machine.DeletionTimestamp.IsZero() {
			continue
		}
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, machine)); err != nil {
			return fmt.Errorf("cannot delete the Machine %s: %w", machine.Name, err)
		}
	}
	return nil
}

// complete removes the finalizers of the control plane.
func (r *deletion) complete(ctx context.Context, s *scope) (result, error) {
	err := reconciling.Change(ctx, r.Client, s.Object, func() {
		controllerutil.RemoveFinalizer(s.Object, controlplanev1.ControlPlaneFinalizer)
		controllerutil.RemoveFinalizer(s.Object, formerFinalizer)
	})
	return deleting(clusterv1.DeletionCompletedReason, ""), client.IgnoreNotFound(err)
}

func deleting(reason, message string) result {
	return result{deletingReason: reason, deletingMessage: message}
}

// workers counts the worker Machines and MachinePools of the cluster.
func (r *deletion) workers(ctx context.Context, s *scope) (int, error) {
	ofCluster := reconciling.OfCluster(client.ObjectKeyFromObject(s.Cluster))
	machines := &clusterv1.MachineList{}
	if err := r.Client.List(ctx, machines, ofCluster, client.UnsafeDisableDeepCopy); err != nil {
		return 0, err
	}
	n := 0
	for i := range machines.Items {
		if !util.IsControlPlaneMachine(&machines.Items[i]) {
			n++
		}
	}
	pools := &clusterv1.MachinePoolList{}
	if err := r.Client.List(ctx, pools, ofCluster, client.UnsafeDisableDeepCopy); err != nil {
		return 0, err
	}
	return n + len(pools.Items), nil
}
