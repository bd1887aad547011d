package machinetemplate

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

var sizeChanged = reconciling.FilterUpdates(func(before, after *infrav1.CapstanHost) bool {
	return !equality.Semantic.DeepEqual(before.Status.Capacity, after.Status.Capacity) || before.Status.NodeInfo != after.Status.NodeInfo
})

// clusterChanged passes the changes of a Cluster that Reconcile reads: the pause and the reference to the CapstanCluster.
var clusterChanged = reconciling.FilterUpdates(func(before, after *clusterv1.Cluster) bool {
	return ptr.Deref(before.Spec.Paused, false) != ptr.Deref(after.Spec.Paused, false) || before.Spec.InfrastructureRef != after.Spec.InfrastructureRef
})

// selectorChanged passes the changes of the host selector of a CapstanCluster, the only field that Reconcile reads.
var selectorChanged = predicate.Funcs{
	CreateFunc: func(e event.CreateEvent) bool { return selects(e.Object) },
	DeleteFunc: func(e event.DeleteEvent) bool { return selects(e.Object) },
	UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*infrav1.CapstanCluster), e.ObjectNew.(*infrav1.CapstanCluster)
		return !equality.Semantic.DeepEqual(before.Spec.HostSelector, after.Spec.HostSelector)
	},
}

func selects(o client.Object) bool { return o.(*infrav1.CapstanCluster).Spec.HostSelector != nil }

func (r *Reconciler) all(ctx context.Context, _ client.Object) []reconcile.Request {
	return r.listed(ctx)
}

// ofNamespace maps a Namespace, which hosts may admit now, to its templates (ALL-18).
func (r *Reconciler) ofNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, client.InNamespace(o.GetName()))
}

// ofCluster maps a Cluster to its templates.
func (r *Reconciler) ofCluster(ctx context.Context, o client.Object) []reconcile.Request {
	return r.owned(ctx, client.ObjectKeyFromObject(o))
}

// ofCapstanCluster maps a CapstanCluster to the templates of its Cluster. The Cluster can name it before it has its owner: then the
// templates of the namespace are reconciled.
func (r *Reconciler) ofCapstanCluster(ctx context.Context, o client.Object) []reconcile.Request {
	cluster, ok := reconciling.OwnerCluster(o)
	if !ok {
		return r.listed(ctx, client.InNamespace(o.GetNamespace()))
	}
	return r.owned(ctx, cluster)
}

func (r *Reconciler) owned(ctx context.Context, cluster client.ObjectKey) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, r.Kind.list(), func(t client.Object) bool {
		owner, ok := reconciling.OwnerCluster(t)
		return ok && owner == cluster
	}, client.InNamespace(cluster.Namespace))
}

func (r *Reconciler) listed(ctx context.Context, opts ...client.ListOption) []reconcile.Request {
	return reconciling.Requests(ctx, r.Client, r.Kind.list(), opts...)
}
