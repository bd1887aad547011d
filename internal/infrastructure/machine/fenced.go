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
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

const notStopped = "Its machines do not count as stopped, because "

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
	id, err := connections.ManagementCluster(ctx, r.Client)
	if err != nil {
		return false, "", err
	}
	lost := fencing.Lost{
		Tunnel: h.Spec.TunnelAddress, ManagementCluster: id,
		Wanted: ptr.Deref(h.Spec.Fencing.StopAfterSeconds, 0), Acknowledged: ptr.Deref(h.Status.Fencing.StopAfterSeconds, 0), Away: conn.Away(),
	}
	others, err := r.observers(ctx, h, s.cluster.Name, capstanCluster)
	if err != nil {
		return false, "", err
	}
	d := fencing.Early(lost, others)
	if d.Why == "" {
		if err := r.askContacts(ctx, s, h.Name, others, capstanCluster.Spec.ID); err != nil {
			return false, "", err
		}
		d = fencing.Decide(lost, others, r.Pool.Unchanged())
	}
	if !d.Fenced {
		s.again = d.Again
		return false, notStopped + d.Why, nil
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

// observers describes all other hosts, without their contacts.
func (r *Reconciler) observers(ctx context.Context, lost *infrav1.CapstanHost, cluster string, c *infrav1.CapstanCluster) ([]fencing.Other, error) {
	hosts, machines := &infrav1.CapstanHostList{}, &infrav1.CapstanMachineList{}
	// All hosts and all machines of the cluster, and only read: they are not copied.
	if err := r.Client.List(ctx, hosts, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	if err := r.Client.List(ctx, machines, reconciling.OfCluster(client.ObjectKey{Namespace: c.Namespace, Name: cluster}), client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	members := hostselection.BalancerHosts(c)
	for i := range machines.Items {
		members = append(members, machines.Items[i].Spec.HostName)
	}
	var out []fencing.Other
	for i := range hosts.Items {
		h := &hosts.Items[i]
		if h.Name == lost.Name {
			continue
		}
		other := fencing.Other{
			Name: h.Name, Abandoned: hostselection.Abandoned(h), Member: slices.Contains(members, h.Name), SameBox: sameBox(h, lost, r.Pool),
		}
		if conn := r.Pool.Get(h.Name); conn != nil { // For this process, the others were lost just now.
			other.Connected, other.Away = conn.ConnectionError() == nil, conn.Away()
		}
		out = append(out, other)
	}
	return out, nil
}

// askContacts asks the connected hosts that are not abandoned for their contacts in a network. This takes a turn of the lost host: one host
// that lets the question wait would otherwise occupy a worker for each machine of the lost one.
func (r *Reconciler) askContacts(ctx context.Context, s *scope, lost string, others []fencing.Other, network string) error {
	end, err := r.turn(ctx, s, lost, showUnanswered)
	if err != nil {
		return err
	}
	defer end()
	failed := make([]error, len(others))
	var all sync.WaitGroup
	for i := range others {
		if o := &others[i]; o.Connected && !o.Abandoned {
			all.Go(func() { o.Contacts, failed[i] = contacts(ctx, r.Pool.Get(o.Name), o.Name, network) })
		}
	}
	all.Wait()
	return errors.Join(failed...)
}

// showUnanswered sets the condition of a machine whose lost host others are asked about for too long.
func showUnanswered(s *scope, lost string) {
	blockedByLost(s, lost, notStopped+"another host does not answer when it was in contact with this one")
}

// contacts asks a host for its contacts in a network; nil if its capstand is older than the question. A host that was connected and cannot be
// asked is an error: it may still answer the lost one.
func contacts(ctx context.Context, conn *connections.Host, name, network string) (*hostpb.ListContactsResponse, error) {
	if conn == nil {
		return nil, fmt.Errorf("contacts of host %s: it was removed in between", name)
	}
	out, err := conn.ListContacts(ctx, &hostpb.ListContactsRequest{NetworkId: network})
	if connections.Code(err) == codes.Unimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("contacts of host %s: %s", name, connections.Message(err))
	}
	return out, nil
}

func sameBox(a, b *infrav1.CapstanHost, pool *connections.Pool) bool {
	box := hostselection.Box(a, pool)
	return box != "" && box == b.Status.BoxID || a.Spec.TunnelAddress != "" && a.Spec.TunnelAddress == b.Spec.TunnelAddress
}
