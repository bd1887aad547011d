package machine

import (
	"context"
	"slices"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
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
	var out []reconcile.Request
	for _, value := range []string{name, capstanhost.NoHost} {
		list := &infrav1.CapstanMachineList{}
		if r.Client.List(ctx, list, client.MatchingFields{capstanhost.MachineHostIndex: value}) == nil {
			out = append(out, requests(list)...)
		}
	}
	return out
}

// ofNamespace maps a Namespace, which hosts may admit now, to those of its machines that wait for one (ALL-18).
func (r *Reconciler) ofNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	list := &infrav1.CapstanMachineList{}
	if r.Client.List(ctx, list, client.InNamespace(o.GetName())) != nil {
		return nil
	}
	return requests(unprovided(list))
}

// unprovided leaves of a list the machines that do not run yet.
func unprovided(list *infrav1.CapstanMachineList) *infrav1.CapstanMachineList {
	list.Items = slices.DeleteFunc(list.Items, func(m infrav1.CapstanMachine) bool { return m.Spec.ProviderID != "" })
	return list
}

// ofUpdateData maps a Secret with the data of an update in place to the machines of its cluster that wait for one.
func (r *Reconciler) ofUpdateData(ctx context.Context, o client.Object) []reconcile.Request {
	list := &infrav1.CapstanMachineList{}
	cluster := client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetLabels()[clusterv1.ClusterNameLabel]}
	if r.Client.List(ctx, list, reconciling.OfCluster(cluster)) != nil {
		return nil
	}
	list.Items = slices.DeleteFunc(list.Items, func(m infrav1.CapstanMachine) bool {
		_, updates := m.Annotations[clusterv1.UpdateInProgressAnnotation]
		return !updates
	})
	return requests(list)
}

// ofMachinePool maps a MachinePool to those of its machines that wait for its bootstrap data (IM-05).
func (r *Reconciler) ofMachinePool(ctx context.Context, o client.Object) []reconcile.Request {
	list := &infrav1.CapstanMachineList{}
	cluster := client.ObjectKey{Namespace: o.GetNamespace(), Name: o.(*clusterv1.MachinePool).Spec.ClusterName}
	ofPool := client.MatchingLabels{clusterv1.MachinePoolNameLabel: format.MustFormatValue(o.GetName())}
	if r.Client.List(ctx, list, reconciling.OfCluster(cluster), ofPool) != nil {
		return nil
	}
	return requests(unprovided(list))
}

// dataSecretChanged leaves out that core writes the providerIDs of all machines into the spec of their MachinePool, time and
// again while it scales.
func dataSecretChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*clusterv1.MachinePool), e.ObjectNew.(*clusterv1.MachinePool)
		return ptr.Deref(before.Spec.Template.Spec.Bootstrap.DataSecretName, "") != ptr.Deref(after.Spec.Template.Spec.Bootstrap.DataSecretName, "")
	}}
}

func requests(list *infrav1.CapstanMachineList) []reconcile.Request {
	var out []reconcile.Request
	for i := range list.Items {
		m := &list.Items[i]
		if !m.DeletionTimestamp.IsZero() || reconciling.HasOwner(m, machineGroupKind) {
			out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(m)})
		}
	}
	return out
}
