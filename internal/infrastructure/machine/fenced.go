package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/fencing"
	"capstan.dev/capstan/internal/infrastructure/hostaccess"
	"capstan.dev/capstan/internal/reconciling"
)

// fenced returns whether a host that is not connected has stopped the machine, so that the machine needs no answer of the host. It
// returns why not, and sets when to decide again.
func (r *Reconciler) fenced(ctx context.Context, s *scope, h *infrav1.CapstanHost) (bool, string, error) {
	if h.Spec.Fencing.StopAfterSeconds == nil {
		return false, "", nil
	}
	if r.WatchNamespace != "" || r.WatchFilter != "" {
		// Another manager of this management cluster may be connected to the host.
		return false, "spec.fencing of the host has no effect on the deletion, because this manager is responsible for a part of the objects", nil
	}
	capstanCluster, err := r.capstanClusterOf(ctx, s)
	if err != nil || capstanCluster == nil {
		return false, "", err
	}
	conn := r.Pool.Get(h.Name)
	if conn == nil || conn.Away() == 0 {
		return false, "", nil
	}
	id, err := hostaccess.ManagementCluster(ctx, r.Client)
	if err != nil {
		return false, "", err
	}
	others, err := r.observers(ctx, h, s.cluster.Name, capstanCluster)
	if err != nil {
		return false, "", err
	}
	d := fencing.Decide(fencing.Lost{
		Tunnel: h.Spec.TunnelAddress, ManagementCluster: id,
		Wanted: ptr.Deref(h.Spec.Fencing.StopAfterSeconds, 0), Acknowledged: ptr.Deref(h.Status.Fencing.StopAfterSeconds, 0), Away: conn.Away(),
	}, others, r.Pool.Unchanged())
	if !d.Fenced {
		s.again = d.Again
		return false, "Its machines do not count as stopped, because " + d.Why, nil
	}
	ctrl.LoggerFrom(ctx).Info("The lost host has stopped the machine", "CapstanHost", h.Name, "id", s.capstan.Spec.ID)
	r.recorder.Eventf(s.capstan, nil, corev1.EventTypeWarning, infrav1.HostFencedReason, "Delete",
		"Host %s is cut off from the managers and all hosts of the cluster, and has stopped the machine: it is removed without an answer of the host", h.Name)
	return true, "", nil
}

// capstanClusterOf returns the CapstanCluster of the machine, or nil.
func (r *Reconciler) capstanClusterOf(ctx context.Context, s *scope) (*infrav1.CapstanCluster, error) {
	if s.cluster == nil {
		return nil, nil
	}
	c, err := r.capstanCluster(ctx, s)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return c, err
}

// observers describes all other hosts, and asks the connected ones that are not abandoned for their contacts in the network of the cluster,
// unless one of them is an obstacle.
func (r *Reconciler) observers(ctx context.Context, lost *infrav1.CapstanHost, cluster string, c *infrav1.CapstanCluster) ([]fencing.Other, error) {
	hosts, machines := &infrav1.CapstanHostList{}, &infrav1.CapstanMachineList{}
	if err := r.Client.List(ctx, hosts); err != nil {
		return nil, err
	}
	if err := r.Client.List(ctx, machines, reconciling.OfCluster(client.ObjectKey{Namespace: c.Namespace, Name: cluster}), client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	members := hostaccess.BalancerHosts(c)
	for i := range machines.Items {
		members = append(members, machines.Items[i].Spec.HostName)
	}
	others := slices.DeleteFunc(hosts.Items, func(h infrav1.CapstanHost) bool { return h.Name == lost.Name })
	out, failed := make([]fencing.Other, len(others)), make([]error, len(others))
	conns := make([]*connections.Host, len(others))
	obstacle := false
	for i := range others {
		h := &others[i]
		out[i] = fencing.Other{
			Name: h.Name, Abandoned: hostaccess.Abandoned(h), Member: slices.Contains(members, h.Name), SameBox: sameBox(h, lost, r.Pool),
		}
		if conns[i] = r.Pool.Get(h.Name); conns[i] != nil { // For this process, the others were lost just now.
			out[i].Connected, out[i].Away = conns[i].Connected() == nil, conns[i].Away()
		}
		obstacle = obstacle || fencing.Obstacle(out[i]) != ""
	}
	if obstacle {
		return out, nil // The answers would decide nothing, and a host can be slow.
	}
	var all sync.WaitGroup
	for i := range out {
		if out[i].Connected && !out[i].Abandoned {
			all.Go(func() { out[i].Contacts, failed[i] = contacts(ctx, conns[i], c.Spec.ID) })
		}
	}
	all.Wait()
	return out, errors.Join(failed...)
}

// contacts asks a host for its contacts in a network; nil if its capstand is older than the question.
func contacts(ctx context.Context, conn *connections.Host, network string) (*hostpb.ListContactsResponse, error) {
	out, err := conn.ListContacts(ctx, &hostpb.ListContactsRequest{NetworkId: network})
	if connections.Code(err) == codes.Unimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("contacts of host %s: %s", conn.Name(), connections.Message(err))
	}
	return out, nil
}

func sameBox(a, b *infrav1.CapstanHost, pool *connections.Pool) bool {
	box := hostaccess.Box(a, pool)
	return box != "" && box == b.Status.BoxID || a.Spec.TunnelAddress != "" && a.Spec.TunnelAddress == b.Spec.TunnelAddress
}
