package machinepool

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// ofCapstanMachine maps a CapstanMachine to its pool.
func ofCapstanMachine(_ context.Context, o client.Object) []reconcile.Request {
	for _, ref := range o.GetOwnerReferences() {
		if ref.Kind == poolGVK.Kind {
			return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: ref.Name}}}
		}
	}
	return nil
}

// ofMachine maps a Machine to the pool of its MachinePool, because its CapstanMachine may already be deleted.
func (r *Reconciler) ofMachine(ctx context.Context, o client.Object) []reconcile.Request {
	if _, controlPlane := o.GetLabels()[clusterv1.MachineControlPlaneLabel]; controlPlane {
		return r.listed(ctx, client.InNamespace(o.GetNamespace()), client.MatchingLabels{clusterv1.ClusterNameLabel: o.GetLabels()[clusterv1.ClusterNameLabel]})
	}
	owner := metav1.GetControllerOf(o)
	if owner == nil || owner.Kind != machinePoolGroupKind.Kind {
		return nil
	}
	mp := &clusterv1.MachinePool{}
	if !reconciling.Found(ctx, r.Client.Get(ctx, client.ObjectKey{Namespace: o.GetNamespace(), Name: owner.Name}, mp)) {
		return nil
	}
	ref := mp.Spec.Template.Spec.InfrastructureRef
	if ref.Kind != poolGVK.Kind || ref.APIGroup != poolGVK.Group {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: ref.Name}}}
}

// ofCluster maps a Cluster to its pools.
func (r *Reconciler) ofCluster(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, client.InNamespace(o.GetNamespace()), client.MatchingLabels{clusterv1.ClusterNameLabel: o.GetName()})
}

// ofCapstanCluster maps a CapstanCluster to the pools of its cluster.
func (r *Reconciler) ofCapstanCluster(ctx context.Context, o client.Object) []reconcile.Request {
	cluster, ok := reconciling.OwnerCluster(o)
	if !ok {
		return nil
	}
	return r.listed(ctx, client.InNamespace(cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.Name})
}

// all maps a host to every pool: any of them may use it.
func (r *Reconciler) all(ctx context.Context, _ client.Object) []reconcile.Request {
	return r.listed(ctx)
}

// ofNamespace maps a Namespace, which hosts may admit now, to its pools (ALL-18).
func (r *Reconciler) ofNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, client.InNamespace(o.GetName()))
}

func (r *Reconciler) listed(ctx context.Context, opts ...client.ListOption) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanMachinePoolList{}, func(p *infrav1.CapstanMachinePool) bool {
		return !p.DeletionTimestamp.IsZero() || reconciling.HasOwner(p, machinePoolGroupKind)
	}, opts...)
}

// machinePoolChanged drops core's own writes to a MachinePool.
func machinePoolChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.MachinePool) bool {
		was, is := before.Spec, after.Spec
		was.ProviderIDList, is.ProviderIDList = nil, nil
		return !equality.Semantic.DeepEqual(was, is) ||
			!equality.Semantic.DeepEqual(before.Annotations, after.Annotations) ||
			!before.DeletionTimestamp.Equal(after.DeletionTimestamp)
	})
}

// capstanMachineChanged passes the changes of CapstanMachines that pools depend on.
func capstanMachineChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *infrav1.CapstanMachine) bool {
		return !before.DeletionTimestamp.Equal(after.DeletionTimestamp) ||
			before.Spec.ProviderID != after.Spec.ProviderID ||
			failure(before) != failure(after) || deletionBlocked(before) != deletionBlocked(after) ||
			before.Status.FailureDomain != after.Status.FailureDomain ||
			!equality.Semantic.DeepEqual(before.Status.Update, after.Status.Update) ||
			!equality.Semantic.DeepEqual(before.Annotations, after.Annotations) ||
			!equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
			len(after.OwnerReferences) < len(before.OwnerReferences) ||
			!slices.Equal(before.Status.Addresses, after.Status.Addresses)
	})
}

// machineChanged passes the changes of Machines that pools depend on.
func machineChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.Machine) bool {
		return !before.DeletionTimestamp.Equal(after.DeletionTimestamp) ||
			!equality.Semantic.DeepEqual(before.Annotations, after.Annotations) ||
			nodeVersion(before) != nodeVersion(after) ||
			wantsRemediation(before) != wantsRemediation(after) ||
			conditions.IsTrue(before, clusterv1.ReadyCondition) != conditions.IsTrue(after, clusterv1.ReadyCondition)
	})
}

// clusterChanged passes the changes of Clusters that pools depend on.
func clusterChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.Cluster) bool {
		provisioned := func(c *clusterv1.Cluster) bool {
			return ptr.Deref(c.Status.Initialization.InfrastructureProvisioned, false)
		}
		return ptr.Deref(before.Spec.Paused, false) != ptr.Deref(after.Spec.Paused, false) ||
			provisioned(before) != provisioned(after) ||
			!equality.Semantic.DeepEqual(before.Status.FailureDomains, after.Status.FailureDomains)
	})
}

// hostChanged passes changes of the versions and the size of a host, and whether it takes machines, but no changes of its free resources.
func hostChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *infrav1.CapstanHost) bool {
		return !slices.Equal(before.Status.Versions, after.Status.Versions) ||
			!equality.Semantic.DeepEqual(before.Status.Capacity, after.Status.Capacity) ||
			before.Status.NodeInfo != after.Status.NodeInfo ||
			takesMachines(before) != takesMachines(after)
	})
}
