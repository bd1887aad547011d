package machine

import (
	"context"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/labels/format"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/capstanhost"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// ofEvent maps the event of a host. A machine of another management plane maps to nothing, or harmlessly to an object
// of the same name.
func (r *Reconciler) ofEvent(ctx context.Context, e connections.Event) []reconcile.Request {
	switch {
	case e.Machine != nil:
		spec := e.Machine.GetSpec()
		return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: spec.GetNamespace(), Name: spec.GetName()}}}
	case e.Connection:
		return r.onHost(ctx, e.Host)
	case e.Capacity, e.Silence:
		return r.waitingForHosts()
	}
	return nil
}

// waitingForHosts returns the machines that no host has accepted yet. They are listed before the call of a host, so
// that room which appears during a refusal is not missed. Running machines are skipped: with many of them, each
// creation and deletion changes the free resources of the host.
func (r *Reconciler) waitingForHosts() []reconcile.Request {
	var out []reconcile.Request
	r.unplaced.Range(func(key, _ any) bool {
		out = append(out, reconcile.Request{NamespacedName: key.(client.ObjectKey)})
		return true
	})
	return out
}

func (r *Reconciler) ofHost(ctx context.Context, o client.Object) []reconcile.Request {
	return r.onHost(ctx, o.GetName())
}

// onHost lists the machines on a host, and those without a host: it may take them now.
func (r *Reconciler) onHost(ctx context.Context, name string) []reconcile.Request {
	return append(r.listed(ctx, concerned, client.MatchingFields{capstanhost.MachineHostIndex: name}),
		r.listed(ctx, concerned, client.MatchingFields{capstanhost.MachineHostIndex: capstanhost.NoHost})...)
}

// ofNamespace maps a Namespace, which hosts may admit now, to those of its machines that wait for one (ALL-18).
func (r *Reconciler) ofNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, waits, client.InNamespace(o.GetName()))
}

// ofCluster maps a Cluster to its machines.
func (r *Reconciler) ofCluster(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, concerned, reconciling.OfCluster(client.ObjectKeyFromObject(o)))
}

// ofCapstanCluster maps a CapstanCluster, which is provisioned or admits other hosts now, to those of its machines that wait for that.
func (r *Reconciler) ofCapstanCluster(ctx context.Context, o client.Object) []reconcile.Request {
	cluster, ok := reconciling.OwnerCluster(o)
	if !ok {
		return nil
	}
	return r.listed(ctx, waits, reconciling.OfCluster(cluster))
}

// ofUpdateData maps a Secret with the data of an update in place to the machines of its cluster that wait for one.
func (r *Reconciler) ofUpdateData(ctx context.Context, o client.Object) []reconcile.Request {
	cluster := client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetLabels()[clusterv1.ClusterNameLabel]}
	return r.listed(ctx, func(m *infrav1.CapstanMachine) bool {
		_, updates := m.Annotations[clusterv1.UpdateInProgressAnnotation]
		return updates && concerned(m)
	}, reconciling.OfCluster(cluster))
}

// ofMachinePool maps a MachinePool to those of its machines that wait for its bootstrap data (IM-05).
func (r *Reconciler) ofMachinePool(ctx context.Context, o client.Object) []reconcile.Request {
	cluster := client.ObjectKey{Namespace: o.GetNamespace(), Name: o.(*clusterv1.MachinePool).Spec.ClusterName}
	ofPool := client.MatchingLabels{clusterv1.MachinePoolNameLabel: format.MustFormatValue(o.GetName())}
	return r.listed(ctx, waits, reconciling.OfCluster(cluster), ofPool)
}

func (r *Reconciler) listed(ctx context.Context, keep func(*infrav1.CapstanMachine) bool, opts ...client.ListOption) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanMachineList{}, keep, opts...)
}

// concerned reports whether the reconciler has work with a machine: it has an owner, or is being deleted.
func concerned(m *infrav1.CapstanMachine) bool {
	return !m.DeletionTimestamp.IsZero() || reconciling.HasOwner(m, machineGroupKind)
}

// waits reports whether a machine does not run yet.
func waits(m *infrav1.CapstanMachine) bool { return m.Spec.ProviderID == "" && concerned(m) }

// dataSecretChanged leaves out that core writes the providerIDs of all machines into the spec of their MachinePool, time and
// again while it scales.
func dataSecretChanged() predicate.Predicate {
	return reconciling.FilterUpdates(func(before, after *clusterv1.MachinePool) bool {
		return ptr.Deref(before.Spec.Template.Spec.Bootstrap.DataSecretName, "") != ptr.Deref(after.Spec.Template.Spec.Bootstrap.DataSecretName, "")
	})
}
