package machinepool

import (
	"context"
	"errors"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileDelete deletes all machines at once, through their Machines, and then the finalizer. It needs
// neither MachinePool nor Cluster: without a MachinePool there are no Machines either.
func (r *Reconciler) reconcileDelete(ctx context.Context, s *scope) error {
	// Live, or a machine that the cache has not seen yet would be left behind.
	members, orphans, err := find(ctx, r.LiveClient, s)
	if err != nil {
		return err
	}
	s.members = members
	if len(members) == 0 && len(orphans) == 0 {
		r.controller.ClearConsistencyStore(client.ObjectKeyFromObject(s.pool), s.pool.UID)
		controllerutil.RemoveFinalizer(s.pool, infrav1.MachinePoolFinalizer)
		return nil
	}
	var remove []string
	for _, m := range members {
		if !m.leaving() {
			remove = append(remove, m.capstan.Name)
		}
	}
	setDeleting(s)
	// Machines are watched: the deletion of the last one triggers this reconcile again.
	return errors.Join(
		r.deleteMachines(ctx, append(orphans, strays(members)...)),
		r.deleteMembers(ctx, s, remove, "the pool is deleted"),
	)
}

// setDeleting keeps the status true while the machines go.
func setDeleting(s *scope) {
	observeMembers(s, time.Now())
	reconciling.SetCondition(s.pool, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason, "%d machines still exist", len(s.members))
	reconciling.SetCondition(s.pool, clusterv1.ReadyCondition, metav1.ConditionFalse, clusterv1.DeletingReason, "%d machines still exist", len(s.members))
}
