package capstanhost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/networklist"
	"capstan.dev/capstan/internal/shorten"
)

// A management cluster whose etcd was restored from an old snapshot has machines without objects. A host can have machines of
// several management clusters. A machine belongs to this one in two cases. In the first case, its network is that of a
// CapstanCluster here. The id of the network is part of the CapstanCluster and moves with it. In the second case, its cluster is
// missing too, and the host has recorded this management cluster for the machine. A restore keeps this identity, and the target
// of a move replaces it.

// reconcileUnknown shows the machines of the host that have no CapstanMachine, and removes those that the administrator has named.
func (r *Reconciler) reconcileUnknown(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) error {
	candidates, clusters, err := r.candidates(ctx, host.Name, conn.Machines())
	if err != nil {
		return err
	}
	unknown, err := r.gone(ctx, candidates)
	if err != nil {
		return err
	}
	host.Status.UnknownMachines = unknownMachines(host.Status.UnknownMachines, unknown, time.Now())
	return r.prune(ctx, host, conn, unknown, clusters)
}

// maxLookups bounds the requests of one reconcile. A host can report any number of machines, whose objects exist with other ids.
const maxLookups = 2 * infrav1.MaxUnknownMachines

// gone returns the first machines that have no object. It reads at most maxLookups objects from the API server, because the cache may be
// stale, and another manager may be responsible for the namespace.
func (r *Reconciler) gone(ctx context.Context, candidates []*hostpb.Machine) (out []*hostpb.Machine, _ error) {
	objects := map[client.ObjectKey]*infrav1.CapstanMachine{}
	for _, m := range candidates {
		key := client.ObjectKey{Namespace: m.GetSpec().GetNamespace(), Name: m.GetSpec().GetName()}
		object, read := objects[key]
		if len(out) == infrav1.MaxUnknownMachines || !read && len(objects) == maxLookups {
			break
		}
		if !read {
			object = &infrav1.CapstanMachine{}
			if err := r.LiveClient.Get(ctx, key, object); client.IgnoreNotFound(err) != nil {
				return nil, err
			}
			objects[key] = object
		}
		// An object without an id may be about to get that of the machine.
		if object.Name == "" || object.Spec.ID != "" && object.Spec.ID != m.GetSpec().GetId() {
			out = append(out, m)
		}
	}
	return out, nil
}

// candidates are the machines of this management cluster on a host of which the cache has no CapstanMachine there. Those of a paused
// cluster are not among them: in a move its objects come one after another. The clusters, by id, are those whose CapstanCluster is
// here; they are read only for a machine without an object, because each change of a machine leads here.
func (r *Reconciler) candidates(ctx context.Context, host string, machines []*hostpb.Machine) (out []*hostpb.Machine, clusters map[scopedID]bool, err error) {
	known := &infrav1.CapstanMachineList{}
	if err := r.Client.List(ctx, known, client.MatchingFields{MachineHostIndex: host}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, nil, err
	}
	if out = withoutObject(machines, known.Items); len(out) == 0 {
		return nil, nil, nil
	}
	if clusters, err = r.clusters(ctx); err != nil {
		return nil, nil, err
	}
	self, err := connections.ManagementCluster(ctx, r.Client)
	out = slices.DeleteFunc(ours(out, clusters, self), func(m *hostpb.Machine) bool {
		return !storable(m) || r.WatchNamespace != "" && m.GetSpec().GetNamespace() != r.WatchNamespace // of another manager here
	})
	return out, clusters, err
}

// scopedID is an id of a namespace. Ids are public: objects of another namespace with the same id hide nothing of this one.
type scopedID struct{ namespace, id string }

// clusters returns the ids of the CapstanClusters here, each with whether it may lose machines: it is not paused.
func (r *Reconciler) clusters(ctx context.Context) (map[scopedID]bool, error) {
	list := &infrav1.CapstanClusterList{}
	if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	clusters := map[scopedID]bool{}
	for i := range list.Items {
		c := &list.Items[i]
		if c.Spec.ID == "" {
			continue
		}
		paused, err := r.paused(ctx, c)
		if err != nil {
			return nil, err
		}
		clusters[scopedID{c.Namespace, c.Spec.ID}] = !paused
	}
	return clusters, nil
}

func (r *Reconciler) paused(ctx context.Context, c *infrav1.CapstanCluster) (bool, error) {
	cluster := &clusterv1.Cluster{}
	key := client.ObjectKey{Namespace: c.Namespace, Name: cmp.Or(c.Labels[clusterv1.ClusterNameLabel], c.Name)}
	if err := r.Client.Get(ctx, key, cluster); client.IgnoreNotFound(err) != nil {
		return false, err
	}
	return annotations.IsPaused(cluster, c), nil
}

// withoutObject are the machines that are not among the objects, in the order of their ids.
func withoutObject(machines []*hostpb.Machine, objects []infrav1.CapstanMachine) (out []*hostpb.Machine) {
	known := make(map[scopedID]bool, len(objects))
	for i := range objects {
		known[scopedID{objects[i].Namespace, objects[i].Spec.ID}] = true
	}
	for _, m := range machines {
		if !known[scopedID{m.GetSpec().GetNamespace(), m.GetSpec().GetId()}] {
			out = append(out, m)
		}
	}
	slices.SortFunc(out, func(a, b *hostpb.Machine) int { return cmp.Compare(a.GetSpec().GetId(), b.GetSpec().GetId()) })
	return out
}

// ours are the machines of this management cluster: the network of each is that of a cluster here that is not paused, or it is that
// of none and the host has recorded self.
func ours(machines []*hostpb.Machine, clusters map[scopedID]bool, self string) (out []*hostpb.Machine) {
	for _, m := range machines {
		its, known := clusters[scopedID{m.GetSpec().GetNamespace(), m.GetSpec().GetNetwork().GetId()}]
		if !known {
			its = self != "" && m.GetStatus().GetManagementCluster() == self
		}
		if its {
			out = append(out, m)
		}
	}
	return out
}

// storable reports whether the status can name a machine. No object can have other names.
func storable(m *hostpb.Machine) bool {
	spec := m.GetSpec()
	return spec.GetId() != "" && len(spec.GetId()) <= validation.DNS1123LabelMaxLength &&
		len(validation.IsDNS1123Label(spec.GetNamespace())) == 0 && len(validation.IsDNS1123Subdomain(spec.GetName())) == 0
}

// unknownMachines keeps since when each of them has been unknown. One that is being removed is not listed any more.
func unknownMachines(before []infrav1.UnknownMachine, now []*hostpb.Machine, at time.Time) (out []infrav1.UnknownMachine) {
	for _, m := range now {
		if m.GetStatus().GetPhase() == hostpb.MachineStatus_DELETING {
			continue
		}
		spec := m.GetSpec()
		u := infrav1.UnknownMachine{
			ID: spec.GetId(), Namespace: spec.GetNamespace(), Name: spec.GetName(), Cluster: shorten.To(spec.GetCluster(), validation.DNS1123SubdomainMaxLength), Since: metav1.NewTime(at.Truncate(time.Second)),
		}
		for _, a := range spec.GetAddresses() {
			if address, err := netip.ParseAddr(a.GetAddress()); err == nil && address.Zone() == "" {
				u.Addresses = append(u.Addresses, address.String())
			}
		}
		if i := slices.IndexFunc(before, func(b infrav1.UnknownMachine) bool { return b.ID == u.ID }); i >= 0 {
			u.Since = before[i].Since
		}
		out = append(out, u)
	}
	return out
}

// prune removes the unknown machines that the annotation names, and then the networks that have no cluster any more. One that has
// an object again, or that was never unknown, stays. Only the machines connect a network with the request: the networks are
// recorded before the first machine is removed, so that a manager that continues after a crash finds them.
func (r *Reconciler) prune(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host, unknown []*hostpb.Machine, clusters map[scopedID]bool) error {
	value, ok := host.Annotations[infrav1.HostPruneAnnotation]
	if !ok {
		delete(host.Annotations, infrav1.HostPruneNetworksAnnotation) // of a request that was withdrawn
		return nil
	}
	ids := strings.Split(value, ",")
	named := slices.DeleteFunc(unknown, func(m *hostpb.Machine) bool { return !slices.Contains(ids, m.GetSpec().GetId()) })
	recorded := host.Annotations[infrav1.HostPruneNetworksAnnotation]
	networks, ignored := networklist.Parse(recorded)
	if ignored > 0 {
		ctrl.LoggerFrom(ctx).Info("Ignored entries of an annotation: expected namespace/name/id", "annotation", infrav1.HostPruneNetworksAnnotation, "ignored", ignored)
	}
	networks = networklist.WithLost(networks, named, func(n *hostpb.Network) bool {
		_, found := clusters[scopedID{n.GetNamespace(), n.GetId()}]
		return found
	})
	if all := networklist.Format(networks); all != recorded {
		metav1.SetMetaDataAnnotation(&host.ObjectMeta, infrav1.HostPruneNetworksAnnotation, all)
		return nil // The event of this write leads to the next reconcile, which removes the machines.
	}
	for _, m := range named {
		if err := remove(ctx, conn, m.GetSpec()); err != nil {
			return fmt.Errorf("remove the unknown machine %s/%s: %s", m.GetSpec().GetNamespace(), m.GetSpec().GetName(), connections.Message(err))
		}
	}
	if err := r.removeNetworks(ctx, conn, networks); err != nil {
		return err
	}
	delete(host.Annotations, infrav1.HostPruneAnnotation)
	delete(host.Annotations, infrav1.HostPruneNetworksAnnotation)
	return nil
}

// remove removes a machine, and fails as long as something of it is left.
func remove(ctx context.Context, conn *connections.Host, spec *hostpb.MachineSpec) error {
	req := &hostpb.DeleteMachineRequest{Id: spec.GetId(), Namespace: spec.GetNamespace(), Name: spec.GetName()}
	done, err := conn.DeleteMachine(ctx, req)
	if err == nil && !done.GetDone() {
		err = errors.New("the host is removing it")
	}
	if err == nil {
		ctrl.LoggerFrom(ctx).Info("Removed a machine without a CapstanMachine", "id", spec.GetId(), "machine", spec.GetNamespace()+"/"+spec.GetName())
	}
	return err
}

// removeNetworks removes the networks and load balancers of clusters without a CapstanCluster.
func (r *Reconciler) removeNetworks(ctx context.Context, conn *connections.Host, networks []*hostpb.Network) error {
	for _, n := range networks {
		here, err := r.hasCluster(ctx, n)
		if err != nil {
			return err
		}
		if here {
			continue
		}
		if err := removeNetwork(ctx, conn, n); err != nil {
			return fmt.Errorf("remove the load balancer and network of cluster %s/%s, which has no CapstanCluster: %s",
				n.GetNamespace(), n.GetName(), connections.Message(err))
		}
	}
	return nil
}

// hasCluster asks the API server whether a network has a CapstanCluster: the cache may be behind.
func (r *Reconciler) hasCluster(ctx context.Context, n *hostpb.Network) (bool, error) {
	list := &infrav1.CapstanClusterList{}
	err := r.LiveClient.List(ctx, list, client.InNamespace(n.GetNamespace()))
	return slices.ContainsFunc(list.Items, func(c infrav1.CapstanCluster) bool { return c.Spec.ID == n.GetId() }), err
}

// removeNetwork removes the network and the load balancer of a cluster from a host after its last machine.
func removeNetwork(ctx context.Context, conn *connections.Host, n *hostpb.Network) error {
	left, err := conn.ListMachines(ctx, &hostpb.ListMachinesRequest{})
	if err != nil || slices.ContainsFunc(left.GetMachines(), func(m *hostpb.Machine) bool { return m.GetSpec().GetNetwork().GetId() == n.GetId() }) {
		return err
	}
	balancer := &hostpb.DeleteLoadBalancerRequest{Id: n.GetId(), Namespace: n.GetNamespace(), Name: n.GetName()}
	if _, err := conn.DeleteLoadBalancer(ctx, balancer); err != nil && connections.Code(err) != codes.NotFound {
		return err
	}
	_, err = conn.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: n.GetId(), Namespace: n.GetNamespace(), Name: n.GetName()})
	if connections.Code(err) == codes.NotFound {
		return nil
	}
	return err
}
