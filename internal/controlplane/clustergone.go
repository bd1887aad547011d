package controlplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// partsRetry is the time after which the objects of deleted Machines are looked for again. Their deletion is no event: the controller
// watches no infrastructure machines of its own accord.
const partsRetry = 5 * time.Second

var (
	clusterGroupKind = clusterv1.GroupVersion.WithKind("Cluster").GroupKind()
	machineGroupKind = clusterv1.GroupVersion.WithKind("Machine").GroupKind()
)

// clusterOf returns the Cluster of a control plane; nil until core has written the owner reference. A deleted control plane may have lost the
// reference or its Cluster. It belongs to the Cluster that references it. If the API server has none, gone is true, and the Cluster has only
// a name. The cache is not asked: Machines are deleted in another way without a Cluster.
func (r *Reconciler) clusterOf(ctx context.Context, controlPlane *controlplanev1.CapstanControlPlane) (cluster *clusterv1.Cluster, gone bool, err error) {
	cluster, err = util.GetOwnerCluster(ctx, r.Client, controlPlane.ObjectMeta)
	if err = client.IgnoreNotFound(err); err != nil || cluster != nil || controlPlane.DeletionTimestamp.IsZero() {
		return cluster, false, err
	}
	clusters := &clusterv1.ClusterList{}
	if err := r.LiveClient.List(ctx, clusters, client.InNamespace(controlPlane.Namespace)); err != nil {
		return nil, false, err
	}
	for i := range clusters.Items {
		if cluster := &clusters.Items[i]; model.IsReferenced(controlPlane, cluster) || util.IsOwnedByObject(controlPlane, cluster, clusterGroupKind) {
			return cluster, false, nil
		}
	}
	// clusterctl move annotates the control plane before it deletes the Cluster. The cache can be older than both, and the machines belong
	// to another management cluster.
	latest := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(controlPlane), latest); err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}
	if _, moved := latest.Annotations[clusterctlv1.DeleteForMoveAnnotation]; moved {
		return nil, false, nil
	}
	name := controlPlane.Labels[clusterv1.ClusterNameLabel]
	return &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: controlPlane.Namespace, Name: name}}, true, nil
}

// reconcileWithoutCluster deletes the Machines that the control plane controls, and no others. Core does not continue the deletion of a
// Machine without its Cluster, so this step does the rest: it deletes the objects of the Machine, and then removes core's finalizer. No Node
// is drained, and workers do not matter any more. The garbage collector deletes owned Secrets.
func (r *deletion) reconcileWithoutCluster(ctx context.Context, s *scope) (result, error) {
	list := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, list, client.InNamespace(s.Object.Namespace)); err != nil {
		return result{}, err
	}
	list.Items = slices.DeleteFunc(list.Items, func(m clusterv1.Machine) bool { return !model.IsController(s.Object, &m) })
	s.Machines = collections.FromMachineList(list)
	if len(s.Machines) == 0 {
		return r.complete(ctx, s)
	}
	out := deleting(controlplanev1.WaitingForMachinesReason, fmt.Sprintf("the Cluster does not exist, and %d control plane machines are being deleted without it", len(s.Machines)))
	if err := r.deleteMachines(ctx, s); err != nil {
		return out, err
	}
	for _, machine := range s.Machines.SortedByCreationTimestamp() {
		waits, foreign, err := r.finishMachine(ctx, s, machine)
		if err != nil {
			return out, err
		}
		if waits {
			out.requeueAfter = partsRetry
		}
		for _, name := range foreign {
			out.deletingMessage += fmt.Sprintf(". Machine %s waits for the deletion of the %s, which has another owner", machine.Name, name)
		}
	}
	return out, nil
}

// finishMachine deletes the objects of a deleted Machine, and releases it when they are gone. The hooks of others delay both. waits: objects
// remain. foreign names those of other owners, which it does not delete.
func (r *deletion) finishMachine(ctx context.Context, s *scope, machine *clusterv1.Machine) (waits bool, foreign []string, err error) {
	if machine.DeletionTimestamp.IsZero() || hasHook(machine) {
		return false, nil, nil // Its deletion is an event.
	}
	parts, err := r.remainingParts(ctx, machine)
	if err != nil {
		return false, nil, err
	}
	if len(parts) == 0 && onlyCoresFinalizer(machine) {
		return false, nil, r.release(ctx, s, machine, "whose Cluster does not exist")
	}
	for _, part := range parts {
		if !part.GetDeletionTimestamp().IsZero() {
			continue
		}
		name := part.GetObjectKind().GroupVersionKind().Kind + " " + part.GetName()
		if !util.IsControlledBy(part, machine, machineGroupKind) && !util.IsOwnedByObject(part, s.Object, controlplanev1.ControlPlaneGroupKind) {
			foreign = append(foreign, name)
			continue
		}
		uid := part.GetUID()
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, part, client.Preconditions{UID: &uid})); err != nil {
			return true, foreign, fmt.Errorf("cannot delete the %s: %w", name, err)
		}
	}
	return len(parts) > 0, foreign, nil
}
