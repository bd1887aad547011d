package services

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
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

const (
	// withdrawalTime bounds one attempt, in which a host can answer each request late.
	withdrawalTime = time.Minute
	// maxLists bounds the time of one attempt. A box with so many networks has no room for machines.
	maxLists = 4096
	// maxWithdrawals bounds the requests of one attempt, and its messages in the log.
	maxWithdrawals = 100
)

func (w withdrawal) setupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	return w.Controller(mgr, controllerName+"-withdrawal").
		WithOptions(w.For(infrav1.HostKind)).
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
	ctx, cancel := context.WithTimeout(ctx, withdrawalTime)
	defer cancel()
	lists, err := conn.AllServices(ctx)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("reading the Services of host %s: %s", req.Name, connections.Message(err))
	}
	if len(lists) > maxLists {
		return ctrl.Result{}, fmt.Errorf("reading the Services of host %s: expected those of at most %d networks, found %d: check capstand of this host", req.Name, maxLists, len(lists))
	}
	id, err := connections.ManagementCluster(ctx, w.Client)
	if err != nil {
		return ctrl.Result{}, err
	}
	machines, sent := networksOf(conn, id), 0
	for _, list := range plausible(lists) {
		requested, e := w.end(ctx, conn, list, machines)
		err = cmp.Or(err, e) // The first error is enough for the log: the host can fail each request.
		if requested {
			sent++
		}
		if sent == maxWithdrawals {
			return ctrl.Result{}, cmp.Or(err, fmt.Errorf("host %s: expected at most %d clusters whose Services it does not allow any more: the next attempt continues", req.Name, maxWithdrawals))
		}
	}
	return ctrl.Result{}, err
}

// plausible returns the lists that a host can have: one of each network, whose names are not too long. Other names would fill the log.
func plausible(lists []*hostpb.SetServicesRequest) []*hostpb.SetServicesRequest {
	seen := map[string]bool{}
	return slices.DeleteFunc(lists, func(l *hostpb.SetServicesRequest) bool {
		id := l.GetNetworkId()
		if seen[id] || len(id) > validation.DNS1123LabelMaxLength || len(l.GetNamespace()) > validation.DNS1123LabelMaxLength || len(l.GetName()) > validation.DNS1123SubdomainMaxLength {
			return true
		}
		seen[id] = true
		return false
	})
}

// networksOf returns the networks of the machines on a host that belong to this management cluster, which has the id. A host can have
// networks of several management clusters, each with a CapstanHost of its own.
func networksOf(conn *connections.Host, id string) map[connections.Network]bool {
	out := map[connections.Network]bool{}
	for _, m := range conn.Machines() {
		if n := m.GetSpec().GetNetwork(); m.GetStatus().GetManagementCluster() == id {
			out[connections.NetworkOf(n.GetId(), n)] = true
		}
	}
	return out
}

// end ends the publications of a network that the host does not allow any more, if the network belongs to this management cluster: machines
// has it, or a CapstanCluster has its id. It returns whether it sent a request.
func (w withdrawal) end(ctx context.Context, conn *connections.Host, list *hostpb.SetServicesRequest, machines map[connections.Network]bool) (sent bool, err error) {
	network := connections.NetworkOf(list.GetNetworkId(), list)
	clusters := &infrav1.CapstanClusterList{}
	// A tenant can write the id of a network of another management cluster into a CapstanCluster.
	err = w.Client.List(ctx, clusters, client.InNamespace(list.GetNamespace()), client.MatchingFields{"spec.id": list.GetNetworkId()}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return false, err
	}
	found := len(clusters.Items) > 0
	if !found && !machines[network] {
		return false, nil
	}
	if found && slices.ContainsFunc(list.GetServices(), func(s *hostpb.PublishedService) bool { return !s.GetHostPorts() }) {
		conn.SetPulses(network, true) // Also while the Cluster is paused. The other reconciler ends them.
	}
	return w.withdrawFrom(ctx, conn, list)
}

// withdrawFrom sets the Services of a network to those that the host still allows. It returns whether it sent a request.
func (w withdrawal) withdrawFrom(ctx context.Context, conn *connections.Host, list *hostpb.SetServicesRequest) (sent bool, err error) {
	defer w.setting.lock(conn.Name(), connections.NetworkOf(list.GetNetworkId(), list))()
	keep, fewer, err := w.stillPermitted(ctx, conn.Name(), list)
	if err != nil || !fewer {
		return false, err
	}
	_, err = conn.PublishServices(ctx, &hostpb.SetServicesRequest{
		NetworkId: list.GetNetworkId(), Namespace: list.GetNamespace(), Name: list.GetName(), Services: keep,
	})
	if err != nil && connections.Code(err) != codes.NotFound {
		return true, fmt.Errorf("withdrawing Services of %s/%s from host %s: %s", list.GetNamespace(), list.GetName(), conn.Name(), connections.Message(err))
	}
	ctrl.LoggerFrom(ctx).Info("Withdrew Services that the host does not allow any more", "cluster", list.GetNamespace()+"/"+list.GetName(),
		"withdrawn", len(list.GetServices())-len(keep), "left", len(keep))
	return true, nil
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
	keep, fewer = permission(h, ns).permitted(list)
	return keep, fewer, nil
}
