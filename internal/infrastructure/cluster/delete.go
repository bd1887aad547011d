package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileDelete removes the load balancer and the network from every host, then the claim of its address
// (IPAM-07), then the finalizer (IC-12).
func (r *Reconciler) reconcileDelete(ctx context.Context, s *scope) error {
	if err := reconciling.RunSteps(ctx, s, r.leaveHosts, r.releaseAddress); err != nil {
		if reconciling.IgnoreWaiting(err) != nil {
			reconciling.ShowBlocked(s.capstan, "%s", err)
		}
		return reconciling.IgnoreWaiting(err)
	}
	controllerutil.RemoveFinalizer(s.capstan, infrav1.ClusterFinalizer)
	ctrl.LoggerFrom(ctx).Info("Removed the network and the load balancer")
	return nil
}

// leaveHosts removes the cluster from its hosts after its last machine. A cluster that never got an id has nothing on any host.
func (r *Reconciler) leaveHosts(ctx context.Context, s *scope) error {
	if s.capstan.Spec.ID == "" || hostselection.Abandoned(s.capstan) {
		return nil
	}
	left, err := r.machinesLeft(ctx, s)
	if err != nil {
		return err
	}
	if left > 0 {
		reconciling.ShowBlocked(s.capstan, "%d CapstanMachines of the cluster still exist", left)
		return reconciling.ErrWaiting // The deletion of the last one is the event.
	}
	waiting, err := r.removeFromHosts(ctx, s)
	if err != nil {
		return err
	}
	if waiting != "" {
		reconciling.ShowBlocked(s.capstan, "%s", waiting)
		return reconciling.ErrWaiting // The connection is the event.
	}
	return nil
}

// releaseAddress waits until the claim of the endpoint's address is deleted.
func (r *Reconciler) releaseAddress(ctx context.Context, s *scope) error {
	gone, err := r.claimGone(ctx, s)
	if err != nil {
		return err
	}
	if !gone {
		reconciling.SetCondition(s.capstan, clusterv1.DeletingCondition, metav1.ConditionTrue, clusterv1.DeletingReason,
			"Waiting for the deletion of IPAddressClaim %s", claimName(s.capstan))
		return reconciling.ErrWaiting // The claim is watched.
	}
	return nil
}

func (r *Reconciler) machinesLeft(ctx context.Context, s *scope) (int, error) {
	list := &infrav1.CapstanMachineList{}
	err := r.Client.List(ctx, list, reconciling.OfCluster(client.ObjectKey{Namespace: s.capstan.Namespace, Name: s.clusterName()}), client.UnsafeDisableDeepCopy)
	return len(list.Items), err
}

// removeFromHosts removes the load balancer and the network from all recorded hosts, and from the other connected hosts that admit the
// namespace or show the load balancer, at once. It returns the reason if a recorded host, which has or had the load balancer, cannot be
// reached. Networks without a load balancer were removed with the last machine. The host of another tenant gets no call: its answer
// could prevent the deletion.
func (r *Reconciler) removeFromHosts(ctx context.Context, s *scope) (waiting string, err error) {
	list := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil { // All hosts, and only read.
		return "", err
	}
	admitting, err := hostselection.Admitting(ctx, r.Client, s.capstan.Namespace, list.Items)
	if err != nil {
		return "", err
	}
	concerned := sets.New[string]()
	for i := range admitting {
		concerned.Insert(admitting[i].Name)
	}
	recorded := recordedHosts(s.capstan)
	var members []member
	for i := range list.Items {
		h := &list.Items[i]
		id, known := recorded[h.Name]
		delete(recorded, h.Name)
		conn := r.Pool.Connected(h.Name)
		if hostselection.Abandoned(h) {
			continue
		}
		if why := unreachable(h.Name, id, conn); known && why != "" {
			waiting = why
			continue
		}
		if conn != nil && (known || concerned.Has(h.Name) || hasBalancer(conn, s)) {
			members = append(members, member{overlay.Host{Name: h.Name}, conn})
		}
	}
	if missing := slices.Sorted(maps.Keys(recorded)); len(missing) > 0 {
		waiting = fmt.Sprintf("CapstanHost %s does not exist, so the load balancer cannot be removed. Create the CapstanHost again. If the host is permanently lost, annotate this CapstanCluster with %s",
			missing[0], infrav1.HostAbandonedAnnotation)
	}
	var errs []error
	for i, err := range atOnce(members, func(m member) error { return remove(ctx, m.conn, s) }) {
		if err != nil {
			errs = append(errs, fmt.Errorf("host %s: %w", members[i].Name, err))
		}
	}
	return waiting, errors.Join(errs...)
}

// deletionOf returns the request that removes the load balancer of the cluster from a host.
func deletionOf(s *scope) *hostpb.DeleteLoadBalancerRequest {
	return &hostpb.DeleteLoadBalancerRequest{Id: s.capstan.Spec.ID, Namespace: s.capstan.Namespace, Name: s.clusterName()}
}

// recordedHosts returns the ids, by name, of the hosts that may have parts of the load balancer. For load balancers
// that are older than the record, only the last host is known.
func recordedHosts(c *infrav1.CapstanCluster) map[string]string {
	out := map[string]string{}
	if lb := c.Spec.LoadBalancer; lb.HostID != "" {
		out[lb.HostName] = lb.HostID
	}
	for _, h := range c.Spec.LoadBalancerHosts {
		out[h.Name] = h.ID
	}
	return out
}

// unreachable returns the reason why a host that has or had the load balancer cannot be reached, or "".
func unreachable(name, id string, conn *connections.Host) string {
	if conn == nil {
		return fmt.Sprintf("Host %s, which has or had the cluster's load balancer, is not connected. If it is permanently lost, annotate the CapstanHost with %s",
			name, infrav1.HostAbandonedAnnotation)
	}
	return hostselection.Mismatch(name, id, conn.ID())
}

// errNetworkInUse means that a host keeps the network, because machines are attached to it.
var errNetworkInUse = errors.New("the network is in use")

// remove removes the objects of the cluster from a host. Objects of another cluster with the same id stay: this cluster
// is then a copy and has nothing there.
func remove(ctx context.Context, host *connections.Host, s *scope) error {
	req := deletionOf(s)
	if other := host.LoadBalancer(req.GetId()); other != nil && !owner.Same(other, req) {
		return nil
	}
	if _, err := host.DeleteLoadBalancer(ctx, req); !absent(err) {
		return fmt.Errorf("delete the load balancer: %s", connections.Message(err))
	}
	_, err := host.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: req.GetId(), Namespace: req.GetNamespace(), Name: req.GetName()})
	switch {
	case absent(err):
		return nil
	case refusal.Of(err).Reason == hostpb.Refusal_NETWORK_IN_USE:
		return fmt.Errorf("%w: %s", errNetworkInUse, connections.Message(err))
	}
	return fmt.Errorf("delete the network: %s", connections.Message(err))
}

// absent reports whether a deletion left nothing of the cluster.
func absent(err error) bool {
	return slices.Contains([]codes.Code{codes.OK, codes.NotFound, codes.PermissionDenied}, connections.Code(err))
}
