package cluster

import (
	"context"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/capstanhost"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/reconciling"
)

// idIndex finds a CapstanCluster by spec.id, the only field that hosts report.
const idIndex = "spec.id"

// vniIndex finds the CapstanClusters that claim one VXLAN network identifier.
const vniIndex = "spec.network.overlay.vni"

func vniOf(c *infrav1.CapstanCluster) string {
	return strconv.Itoa(int(c.Spec.Network.Overlay.VNI))
}

// rivals maps a CapstanCluster to those with the same VXLAN network identifier: the change decides which of them can go on.
func (r *Reconciler) rivals(ctx context.Context, o client.Object) []reconcile.Request {
	c := o.(*infrav1.CapstanCluster)
	if !spans(c) {
		return nil
	}
	return slices.DeleteFunc(r.listed(ctx, client.MatchingFields{vniIndex: vniOf(c)}), func(req reconcile.Request) bool {
		return req.NamespacedName == client.ObjectKeyFromObject(c)
	})
}

// ofLabel maps an object that carries the cluster's name to the CapstanCluster.
func (r *Reconciler) ofLabel(ctx context.Context, o client.Object) []reconcile.Request {
	cluster := &clusterv1.Cluster{}
	key := client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetLabels()[clusterv1.ClusterNameLabel]}
	if key.Name == "" {
		return nil
	}
	switch err := r.Client.Get(ctx, key, cluster); {
	case apierrors.IsNotFound(err):
		return r.withoutCluster(ctx, key)
	case !reconciling.Found(ctx, err) || cluster.Spec.InfrastructureRef.Kind != infrav1.ClusterKind:
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: key.Namespace, Name: cluster.Spec.InfrastructureRef.Name}}}
}

// withoutCluster finds the CapstanCluster of a Cluster that was removed by force: the deletion of the CapstanCluster
// still waits for its machines (ALL-13).
func (r *Reconciler) withoutCluster(ctx context.Context, key client.ObjectKey) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanClusterList{}, func(c *infrav1.CapstanCluster) bool {
		return clusterName(c) == key.Name && owned(c)
	}, client.InNamespace(key.Namespace))
}

// ofMachine maps a machine to its CapstanCluster: control plane machines are backends of the load balancer, and the deletion of a
// cluster waits for all machines. Other events of workers matter only to a load balancer on several hosts, and there can be thousands.
func (r *Reconciler) ofMachine(ctx context.Context, o client.Object) []reconcile.Request {
	out := r.ofLabel(ctx, o)
	if len(out) == 0 || !r.isWorker(ctx, o) {
		return out
	}
	c := &infrav1.CapstanCluster{}
	if err := r.Client.Get(ctx, out[0].NamespacedName, c); err == nil && c.DeletionTimestamp.IsZero() && !loadbalancer.Moves(c) {
		return nil
	}
	return out
}

// isWorker is also true for an object without a Machine, because it has no machine on a host: the event of its owner reference
// follows. It is false if the Machine cannot be read.
func (r *Reconciler) isWorker(ctx context.Context, o client.Object) bool {
	if _, ok := o.GetLabels()[infrav1.MachinePoolLabel]; ok || !reconciling.HasOwner(o, machineGroupKind) {
		return true
	}
	machine, err := util.GetOwnerMachine(ctx, r.Client, metav1.ObjectMeta{Namespace: o.GetNamespace(), OwnerReferences: o.GetOwnerReferences()})
	return err == nil && machine != nil && !util.IsControlPlaneMachine(machine)
}

// all maps a change of a host to every cluster: any of them may use it.
func (r *Reconciler) all(ctx context.Context, _ client.Object) []reconcile.Request {
	return r.listed(ctx)
}

// ofNamespace maps a Namespace, which hosts may admit now, to its clusters (ALL-18).
func (r *Reconciler) ofNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	return r.listed(ctx, client.InNamespace(o.GetName()))
}

func (r *Reconciler) listed(ctx context.Context, opts ...client.ListOption) []reconcile.Request {
	return reconciling.Requests(ctx, r.Client, &infrav1.CapstanClusterList{}, opts...)
}

// ofEvent maps a load balancer on a host to its cluster, and a connection to the clusters whose load balancer is or was
// there: behind the name of a host may be another one than before.
func (r *Reconciler) ofEvent(ctx context.Context, e connections.Event) []reconcile.Request {
	var by client.MatchingFields
	switch {
	case e.LoadBalancer != nil:
		by = client.MatchingFields{idIndex: e.LoadBalancer.GetId()}
	case e.Connection:
		by = client.MatchingFields{capstanhost.ClusterHostIndex: e.Host}
	default:
		return nil
	}
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanClusterList{}, owned, by)
}

func owned(c *infrav1.CapstanCluster) bool { return reconciling.HasOwner(c, clusterGroupKind) }

// isPreparedControlPlane selects control plane Machines whose bootstrap data exists. Only their boot remains.
func isPreparedControlPlane(o client.Object) bool {
	m := o.(*clusterv1.Machine)
	return util.IsControlPlaneMachine(m) && m.Spec.Bootstrap.DataSecretName != nil && !ptr.Deref(m.Status.Initialization.InfrastructureProvisioned, false)
}

// controlPlanePrepared passes the event with which a Machine becomes a prepared one. Later writes of the Machine change nothing for the
// boot, and a cluster stays allowed to boot without it. A Machine that gets the label of its cluster later is found after prepareWait.
func controlPlanePrepared() predicate.Predicate {
	return predicate.Or(
		predicate.And(reconciling.OnlyCreates, predicate.NewPredicateFuncs(isPreparedControlPlane)),
		reconciling.Became(isPreparedControlPlane),
	)
}

func isKubeconfig(o client.Object) bool {
	return strings.HasSuffix(o.GetName(), "-"+string(secret.Kubeconfig))
}

// hostChanged passes the changes of hosts that clusters depend on: creation, deletion, spec, connection, key and the end of a reboot, but not the
// free resources.
func hostChanged() predicate.Predicate {
	connected := reconciling.FilterUpdates(func(before, after *infrav1.CapstanHost) bool {
		return conditions.IsTrue(before, infrav1.HostConnectedCondition) != conditions.IsTrue(after, infrav1.HostConnectedCondition) ||
			conditions.IsFalse(before, infrav1.HostConnectedCondition) != conditions.IsFalse(after, infrav1.HostConnectedCondition) ||
			before.Status.OverlayPublicKey != after.Status.OverlayPublicKey
	})
	return predicate.Or(reconciling.IgnoreStatus(), connected, hostselection.RebootEnded())
}
