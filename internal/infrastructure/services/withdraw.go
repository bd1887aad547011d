package services

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

// withdrawal ends publications that hosts do not allow any more. It reads the record of each host, the CapstanHost and the labels of
// Namespaces, and no object of a namespace. So it works while a Cluster is paused (ALL-08 stops the reconcile of requests of a tenant, not
// a decision about the host), after a tenant removed objects, and after a restart of the manager.
type withdrawal struct{ *Reconciler }

func (w withdrawal) setupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	return w.Controller(mgr, controllerName+"-withdrawal").
		WithOptions(w.For("CapstanHost")).
		For(&infrav1.CapstanHost{}, builder.WithPredicates(reconciling.IgnoreStatus())).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []ctrl.Request {
			return reconciling.Requests(ctx, w.Client, &infrav1.CapstanHostList{})
		}), selection.NamespaceChanged()).
		WatchesRawSource(w.Pool.Source(func(_ context.Context, e connections.Event) []ctrl.Request {
			if !e.Connection {
				return nil
			}
			return []ctrl.Request{{NamespacedName: client.ObjectKey{Name: e.Host}}}
		})).
		Complete(ctx, reconciling.Traced("WithdrawServices", w))
}

// Reconcile implements reconcile.Reconciler for a CapstanHost.
func (w withdrawal) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	conn := w.Pool.Connected(req.Name)
	if conn == nil {
		return ctrl.Result{}, nil // The connection is an event.
	}
	lists, err := conn.AllServices(ctx)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("reading the Services of host %s: %s", req.Name, connections.Message(err))
	}
	id, err := connections.ManagementCluster(ctx, w.Client)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, list := range lists {
		ours, e := w.ours(ctx, conn, id, list)
		if ours && e == nil {
			w.pulses(conn, list)
			e = w.withdrawFrom(ctx, conn, list)
		}
		err = errors.Join(err, e)
	}
	return ctrl.Result{}, err
}

// pulses starts pulses to a host with addresses of a cluster, also while the Cluster is paused. The other reconciler ends them.
func (w withdrawal) pulses(conn *connections.Host, list *hostpb.SetServicesRequest) {
	if slices.ContainsFunc(list.GetServices(), func(s *hostpb.PublishedService) bool { return !s.GetHostPorts() }) {
		conn.SetPulses(connections.NetworkOf(list.GetNetworkId(), list), true)
	}
}

// ours reports whether a network belongs to this management cluster, which has the id. A host can have networks of several management
// clusters, each with a CapstanHost of its own.
func (w withdrawal) ours(ctx context.Context, conn *connections.Host, id string, list *hostpb.SetServicesRequest) (bool, error) {
	for _, m := range conn.Machines() {
		if m.GetSpec().GetNetwork().GetId() == list.GetNetworkId() && m.GetStatus().GetManagementCluster() == id {
			return true, nil
		}
	}
	clusters := &infrav1.CapstanClusterList{}
	// A tenant can write the id of a network of another management cluster into a CapstanCluster.
	err := w.Client.List(ctx, clusters, client.InNamespace(list.GetNamespace()), client.MatchingFields{"spec.id": list.GetNetworkId()}, client.UnsafeDisableDeepCopy)
	return len(clusters.Items) > 0, err
}

// withdrawFrom sets the Services of a network to those that the host still allows.
func (w withdrawal) withdrawFrom(ctx context.Context, conn *connections.Host, list *hostpb.SetServicesRequest) error {
	defer w.setting.lock(conn.Name(), connections.NetworkOf(list.GetNetworkId(), list))()
	keep, fewer, err := w.stillPermitted(ctx, conn.Name(), list)
	if err != nil || !fewer {
		return err
	}
	_, err = conn.EnsureServices(ctx, &hostpb.SetServicesRequest{
		NetworkId: list.GetNetworkId(), Namespace: list.GetNamespace(), Name: list.GetName(), Services: keep,
	})
	if err != nil && connections.Code(err) != codes.NotFound {
		return fmt.Errorf("withdrawing Services of %s/%s from host %s: %s", list.GetNamespace(), list.GetName(), conn.Name(), connections.Message(err))
	}
	ctrl.LoggerFrom(ctx).Info("Withdrew Services that the host does not allow any more", "cluster", list.GetNamespace()+"/"+list.GetName(),
		"withdrawn", len(list.GetServices())-len(keep), "left", len(keep))
	return nil
}

// stillPermitted returns the Services of a list that the host allows now, and whether these are fewer.
func (r *Reconciler) stillPermitted(ctx context.Context, name string, list *hostpb.SetServicesRequest) (keep []*hostpb.PublishedService, fewer bool, err error) {
	h, ns := &infrav1.CapstanHost{}, &corev1.Namespace{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: name}, h); err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}
	// A namespace that does not exist has no labels.
	if err := r.Client.Get(ctx, client.ObjectKey{Name: list.GetNamespace()}, ns); client.IgnoreNotFound(err) != nil {
		return nil, false, err
	}
	ns.Name = list.GetNamespace()
	keep, fewer = permission(h, ns, true, true).permitted(list)
	return keep, fewer, nil
}
