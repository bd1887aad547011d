// Package volume reconciles CapstanVolumes: it shows their state, and deletes the data of those that are deleted. The machines create
// and bind them (package machine).
//
// Layer: reconciler. Allowed imports: api, library, contract.
package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/predicates"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanvolumes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanvolumes/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts;capstanmachines,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get

// Reconciler shows the state of volumes and deletes them.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	frame reconciling.Frame
}

// SetupWithManager adds the reconciler.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	r.frame = reconciling.Frame{Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.VolumeFinalizer}
	return r.Controller(mgr, infrav1.VolumeKind).
		For(&infrav1.CapstanVolume{}).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.ofCluster), predicates.ClusterPausedTransitions(mgr.GetScheme(), mgr.GetLogger())).
		Watches(&infrav1.CapstanHost{}, handler.EnqueueRequestsFromMapFunc(r.deletedOn), reconciling.IgnoreStatus()).
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(r.deletedOn), reconciling.OnlyDeletes).
		WatchesRawSource(r.Pool.Source(func(ctx context.Context, e connections.Event) []reconcile.Request {
			if e.Connection || r.removed(e) {
				return r.waiting(ctx, e.Host)
			}
			return nil
		})).
		Complete(ctx, reconciling.Fair(r.For(infrav1.VolumeKind).MaxConcurrentReconciles, reconciling.Traced(infrav1.VolumeKind, r)))
}

func (r *Reconciler) ofCluster(ctx context.Context, o client.Object) []reconcile.Request {
	return r.list(ctx, func(v *infrav1.CapstanVolume) bool { return v.Spec.ClusterName == o.GetName() }, client.InNamespace(o.GetNamespace()))
}

// removed reports whether an event is the removal of a machine with volumes.
func (r *Reconciler) removed(e connections.Event) bool {
	if len(e.Machine.GetSpec().GetVolumes()) == 0 {
		return false
	}
	host := r.Pool.Connected(e.Host)
	return host != nil && host.Machine(e.Machine.GetSpec().GetId()) == nil
}

// deletedOn maps a host, or a deleted machine, to the volumes on its host that wait.
func (r *Reconciler) deletedOn(ctx context.Context, o client.Object) []reconcile.Request {
	if m, ok := o.(*infrav1.CapstanMachine); ok {
		return append(r.waiting(ctx, m.Spec.HostName), r.list(ctx, func(v *infrav1.CapstanVolume) bool {
			return v.Spec.MachineName == m.Name // The machine may have waited for the host of the volume.
		}, client.InNamespace(m.Namespace))...)
	}
	return r.waiting(ctx, o.GetName())
}

// waiting returns the volumes of a host whose deletion waits, and those of CapstanMachines that do not exist any more.
func (r *Reconciler) waiting(ctx context.Context, host string) []reconcile.Request {
	return r.list(ctx, func(v *infrav1.CapstanVolume) bool {
		return v.Spec.HostName == host && (!v.DeletionTimestamp.IsZero() || v.Spec.MachineName != "" && apierrors.IsNotFound(getMachine(ctx, r.Client, v)))
	})
}

// getMachine returns an error if the CapstanMachine that has the volume cannot be read.
func getMachine(ctx context.Context, c client.Reader, v *infrav1.CapstanVolume) error {
	return c.Get(ctx, client.ObjectKey{Namespace: v.Namespace, Name: v.Spec.MachineName}, &infrav1.CapstanMachine{})
}

func (r *Reconciler) list(ctx context.Context, of func(*infrav1.CapstanVolume) bool, options ...client.ListOption) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanVolumeList{}, of, options...)
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	v := &infrav1.CapstanVolume{}
	if err := r.Client.Get(ctx, req.NamespacedName, v); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Watches(v) || moved(v) {
		return ctrl.Result{}, nil
	}
	cluster := &clusterv1.Cluster{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: v.Namespace, Name: v.Spec.ClusterName}, cluster); apierrors.IsNotFound(err) {
		cluster = nil
	} else if err != nil {
		return ctrl.Result{}, err
	}
	if cluster != nil && !annotations.IsPaused(cluster, v) {
		if freed, err := r.free(ctx, v); freed || err != nil {
			return ctrl.Result{}, err // The change of the object is an event.
		}
	}
	patch, err := r.frame.Begin(ctx, cluster, v)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	defer func() { reterr = errors.Join(reterr, r.frame.End(ctx, patch, v)) }()
	if v.DeletionTimestamp.IsZero() {
		show(v)
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, errors.Join(r.reconcileDelete(ctx, v), reconciling.SetReady(v)) // ALL-09
}

// moved reports whether clusterctl deletes the object after it was moved. It sets the annotation first, and removes the finalizer last.
// The data belongs to the management cluster with the other object then.
func moved(v *infrav1.CapstanVolume) bool {
	_, ok := v.Annotations[clusterctlv1.DeleteForMoveAnnotation]
	return ok
}

// free gives up a volume whose CapstanMachine was deleted without its finalizer, as soon as its host has no such machine. A CapstanMachine with
// its finalizer gives up its volumes itself. A machine that still has the volume can be one whose CapstanMachine will be restored from a backup.
func (r *Reconciler) free(ctx context.Context, v *infrav1.CapstanVolume) (bool, error) {
	if v.Spec.MachineName == "" || !v.DeletionTimestamp.IsZero() || !apierrors.IsNotFound(getMachine(ctx, r.Client, v)) || !r.unused(v) {
		return false, nil
	}
	if err := getMachine(ctx, r.LiveClient, v); !apierrors.IsNotFound(err) {
		return false, err // A cached list can be older than the machine.
	}
	ctrl.LoggerFrom(ctx).Info("Freed the volume of a CapstanMachine that does not exist", "CapstanMachine", klog.KRef(v.Namespace, v.Spec.MachineName), "CapstanHost", klog.KRef("", v.Spec.HostName))
	return true, client.IgnoreNotFound(reconciling.Change(ctx, r.Client, v, func() { v.Spec.MachineName = "" }))
}

// unused reports whether the host is connected and none of its machines has the volume, or the host has never made the volume.
func (r *Reconciler) unused(v *infrav1.CapstanVolume) bool {
	if v.Spec.HostID == "" {
		return true
	}
	host := r.Pool.Connected(v.Spec.HostName)
	return host != nil && host.ID() == v.Spec.HostID && !slices.ContainsFunc(host.Machines(), func(m *hostpb.Machine) bool {
		return slices.ContainsFunc(m.GetSpec().GetVolumes(), func(mount *hostpb.VolumeMount) bool { return mount.GetId() == v.Spec.ID })
	})
}

// show sets Ready from the spec, which is the record of the host and the machine.
func show(v *infrav1.CapstanVolume) {
	ready := metav1.Condition{Type: clusterv1.ReadyCondition, Status: metav1.ConditionTrue, Reason: infrav1.VolumeFreeReason, Message: "No machine has the volume"}
	switch {
	case v.Spec.HostID == "":
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, infrav1.VolumePendingReason, "Host "+v.Spec.HostName+" makes the volume before the first machine starts"
	case v.Spec.MachineName != "":
		ready.Reason, ready.Message = infrav1.VolumeInUseReason, "CapstanMachine "+v.Spec.MachineName+" has the volume"
	}
	conditions.Set(v, ready)
}

// reconcileDelete deletes the data when no machine has the volume.
func (r *Reconciler) reconcileDelete(ctx context.Context, v *infrav1.CapstanVolume) error {
	if name := v.Spec.MachineName; name != "" {
		err := getMachine(ctx, r.LiveClient, v)
		if err == nil {
			reconciling.ShowBlocked(v, "CapstanMachine %s has the volume: the data is deleted after its Machine is deleted", name)
		}
		if !apierrors.IsNotFound(err) {
			return err
		}
	}
	gone, err := r.deleteData(ctx, v)
	if err != nil {
		reconciling.ShowBlocked(v, "%s", err)
	}
	if gone {
		controllerutil.RemoveFinalizer(v, infrav1.VolumeFinalizer)
	}
	return err
}

// retained reports whether a deleted namespace takes the volume along. This is no decision about data with the policy Retain, so the
// volume, and with it the namespace, waits for one. A volume with the policy Delete has an owner.
func (r *Reconciler) retained(ctx context.Context, v *infrav1.CapstanVolume) (bool, error) {
	if _, permitted := v.Annotations[infrav1.VolumeDeleteDataAnnotation]; permitted || len(v.OwnerReferences) > 0 {
		return false, nil
	}
	ns := &corev1.Namespace{}
	// A cached Namespace can be older than the deletion.
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Name: v.Namespace}, ns); err != nil {
		return false, fmt.Errorf("read Namespace %s: %w", v.Namespace, err)
	}
	if ns.DeletionTimestamp.IsZero() {
		return false, nil
	}
	reconciling.ShowBlocked(v, "Namespace %s is being deleted, and the volume has the policy Retain. To delete its data, annotate this CapstanVolume with %s",
		v.Namespace, infrav1.VolumeDeleteDataAnnotation)
	return true, nil
}

// deleteData makes the host delete the volume. It returns whether nothing of it is left, as far as Capstan is responsible.
func (r *Reconciler) deleteData(ctx context.Context, v *infrav1.CapstanVolume) (gone bool, err error) {
	if hostselection.Abandoned(v) {
		return true, nil
	}
	name := v.Spec.HostName
	h := &infrav1.CapstanHost{}
	switch err := r.Client.Get(ctx, client.ObjectKey{Name: name}, h); {
	case apierrors.IsNotFound(err):
		reconciling.ShowBlocked(v, "CapstanHost %s does not exist, so the data cannot be deleted. Create the CapstanHost again. If the host is permanently lost, annotate this CapstanVolume with %s",
			name, infrav1.HostAbandonedAnnotation)
		return false, nil
	case err != nil:
		return false, err
	case hostselection.Abandoned(h):
		return true, nil
	}
	if keep, err := r.retained(ctx, v); err != nil || keep {
		return false, err
	}
	host := r.Pool.Connected(name)
	if host == nil {
		reconciling.ShowBlocked(v, "Host %s is not connected. If it is permanently lost, annotate the CapstanHost with %s", name, infrav1.HostAbandonedAnnotation)
		return false, nil
	}
	if why := hostselection.Mismatch(name, v.Spec.HostID, host.ID()); why != "" {
		reconciling.ShowBlocked(v, "%s", why)
		return false, nil
	}
	_, err = host.DeleteVolume(ctx, &hostpb.DeleteVolumeRequest{Id: v.Spec.ID, Namespace: v.Namespace, Name: v.Name})
	switch connections.Code(err) {
	case codes.OK, codes.PermissionDenied: // A copy of the object of another namespace has nothing on the host.
		ctrl.LoggerFrom(ctx).Info("Host deleted the volume", "CapstanHost", klog.KRef("", name), "id", v.Spec.ID)
		return true, nil
	case codes.Unimplemented: // A capstand without volumes has none.
		return true, nil
	}
	return false, fmt.Errorf("delete the volume on host %s: %s", name, connections.Message(err))
}
