// Package capstanhost reconciles CapstanHosts: it maintains the connections to hosts and reports their state. It renews their certificates,
// sets their fencing, drains and reboots them, and removes unknown machines from them.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package capstanhost

import (
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/keymutex"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts/finalizers,verbs=update
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines;capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines,verbs=list;delete
// Secrets are patched in the provider's own namespace only, credentials and tokens: config/infrastructure/rbac/host_credentials_role.yaml.
// +kubebuilder:rbac:groups="",resources=secrets;namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

// Fields of the cache's indexes for the objects on a host.
const (
	// MachineHostIndex of CapstanMachines: spec.hostName, or NoHost.
	MachineHostIndex = "spec.hostName"
	// ClusterHostIndex of CapstanClusters: the hosts that have their load balancers, or had them and are not rid of them.
	ClusterHostIndex = "spec.loadBalancer.hostName"
	// NoHost is the index value of machines that have no host yet. No host can have this name.
	NoHost = "-"
)

// capacityDelay is the time that the free resources of a host wait for their report. A host changes them several times for each new
// machine, and each report is a write. Placement does not use the report.
const capacityDelay = time.Second

// Reconciler keeps the connection to each host and shows the host's state. It writes only when
// something changed.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	frame    reconciling.Frame
	recorder events.EventRecorder
	// secrets reads the metadata of Secrets that have an owner; see addSecrets.
	secrets client.Reader
	// draining is locked by cluster from the list of its Machines until those that may go are deleted.
	draining keymutex.KeyMutex
}

// SetupWithManager adds the reconciler and the indexes of this package.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := addIndexes(ctx, mgr); err != nil {
		return err
	}
	secrets, changes, err := addSecrets(mgr)
	if err != nil {
		return err
	}
	r.secrets, r.draining = secrets, keymutex.NewHashed(drainLocks)
	r.recorder = reconciling.EventRecorder(mgr, "capstanhost-controller")
	r.frame = reconciling.Frame{
		Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.HostFinalizer,
		Summary: []string{infrav1.HostConnectedCondition},
	}
	return r.Controller(mgr, infrav1.HostKind).
		For(&infrav1.CapstanHost{}).
		// The last machine or cluster that leaves lets a host that is being deleted go.
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(hostsOf), reconciling.OnlyDeletes).
		Watches(&infrav1.CapstanVolume{}, handler.EnqueueRequestsFromMapFunc(hostsOf), reconciling.OnlyDeletes).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(hostsOf), predicate.Or(reconciling.OnlyDeletes, hostsChanged)).
		// A namespace that is not admitted any more can let such a host go, too.
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.deletedOfNamespace), selection.NamespaceChanged()).
		// Credentials that were renewed are used at once.
		WatchesRawSource(changes).
		WatchesRawSource(r.Pool.Source(func(_ context.Context, e connections.Event) []reconcile.Request {
			if !e.Connection && !e.Claimed {
				return nil
			}
			return request(e.Host)
		})).
		WatchesRawSource(r.Pool.SourceAfter(capacityDelay, func(_ context.Context, e connections.Event) []reconcile.Request {
			if !e.Capacity {
				return nil
			}
			return request(e.Host)
		})).
		Complete(ctx, reconciling.Traced(infrav1.HostKind, r))
}

func addIndexes(ctx context.Context, mgr ctrl.Manager) error {
	return errors.Join(
		mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanMachine{}, MachineHostIndex, func(o client.Object) []string {
			if name := o.(*infrav1.CapstanMachine).Spec.HostName; name != "" {
				return []string{name}
			}
			return []string{NoHost}
		}),
		mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanCluster{}, ClusterHostIndex, func(o client.Object) []string {
			return hostselection.BalancerHosts(o.(*infrav1.CapstanCluster))
		}),
	)
}

// hostsChanged passes the update with which a load balancer is off a host.
var hostsChanged = reconciling.Changed(func(before, after *infrav1.CapstanCluster) bool {
	return !slices.Equal(hostselection.BalancerHosts(before), hostselection.BalancerHosts(after))
})

func hostsOf(_ context.Context, o client.Object) (out []reconcile.Request) {
	switch o := o.(type) {
	case *infrav1.CapstanMachine:
		return request(o.Spec.HostName)
	case *infrav1.CapstanVolume:
		return request(o.Spec.HostName)
	case *infrav1.CapstanCluster:
		for _, name := range hostselection.BalancerHosts(o) {
			out = append(out, request(name)...)
		}
	}
	return out
}

// deletedOfNamespace maps a Namespace to the hosts that are being deleted and select namespaces by label.
func (r *Reconciler) deletedOfNamespace(ctx context.Context, _ client.Object) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanHostList{}, func(h *infrav1.CapstanHost) bool {
		return !h.DeletionTimestamp.IsZero() && h.Spec.AllowedNamespaces != nil && h.Spec.AllowedNamespaces.Selector != nil
	})
}

func request(name string) []reconcile.Request {
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: name}}}
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	host := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, req.NamespacedName, host); err != nil {
		if apierrors.IsNotFound(err) {
			expiry.Forget(infrav1.HostKind, "", req.Name)
			r.Pool.Disconnect(req.Name)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Watches(host) {
		return ctrl.Result{}, nil
	}
	patch, err := r.frame.Begin(ctx, nil, host)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	defer func() { reterr = errors.Join(reterr, r.frame.End(ctx, patch, host)) }()
	// A host that is being deleted stays connected, so that its machines and load balancers can be removed.
	before := connection(host)
	again, err := r.reconcileConnection(ctx, host)
	r.recordConnection(host, before)
	if !host.DeletionTimestamp.IsZero() {
		return ctrl.Result{RequeueAfter: again}, errors.Join(err, r.reconcileDelete(ctx, host))
	}
	step := nextReboot(host, bootOf(r.Pool.Get(host.Name)))
	draining, errDrain := r.reconcileDrain(ctx, host, step == rebootPrepare)
	rebooting, errReboot := r.reconcileReboot(ctx, host, step, draining)
	if draining || rebooting {
		again = order.Sooner(again, drainPause)
	}
	return ctrl.Result{RequeueAfter: again}, errors.Join(err, errDrain, errReboot)
}
