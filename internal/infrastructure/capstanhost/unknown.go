package capstanhost

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// A management cluster whose etcd was restored from an old snapshot has machines without objects. A host may have machines of
// several management clusters, so a machine counts as this one's only if its network is that of a CapstanCluster here: the id of
// the network is the CapstanCluster's, and goes with it in a move.

// reconcileUnknown shows the machines of the host that have no CapstanMachine, and removes those that the administrator has named.
func (r *Reconciler) reconcileUnknown(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) error {
	candidates, err := r.candidates(ctx, conn.Machines())
	if err != nil {
		return err
	}
	var unknown []*hostpb.MachineSpec
	for _, spec := range candidates {
		if len(unknown) == infrav1.MaxUnknownMachines {
			break
		}
		gone, err := r.hasNoObject(ctx, spec)
		if err != nil {
			return err
		}
		if gone {
			unknown = append(unknown, spec)
		}
	}
	host.Status.UnknownMachines = unknownMachines(host.Status.UnknownMachines, unknown, time.Now())
	return prune(ctx, host, conn, unknown)
}

// candidates are the machines of this management cluster's clusters that the cache knows no CapstanMachine of. Those of a paused
// cluster are not among them: in a move its objects come one after another.
func (r *Reconciler) candidates(ctx context.Context, machines []*hostpb.Machine) ([]*hostpb.MachineSpec, error) {
	clusters, known := &infrav1.CapstanClusterList{}, &infrav1.CapstanMachineList{}
	for _, list := range []client.ObjectList{clusters, known} {
		if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
	}
	ours, objects := map[string]bool{}, map[string]bool{}
	for i := range clusters.Items {
		paused, err := r.paused(ctx, &clusters.Items[i])
		if err != nil {
			return nil, err
		}
		ours[clusters.Items[i].Spec.ID] = !paused
	}
	for i := range known.Items {
		objects[known.Items[i].Spec.ID] = true
	}
	delete(ours, "") // of clusters that have none yet
	return withoutObject(machines, ours, objects), nil
}

func (r *Reconciler) paused(ctx context.Context, c *infrav1.CapstanCluster) (bool, error) {
	cluster := &clusterv1.Cluster{}
	key := client.ObjectKey{Namespace: c.Namespace, Name: cmp.Or(c.Labels[clusterv1.ClusterNameLabel], c.Name)}
	if err := r.Client.Get(ctx, key, cluster); client.IgnoreNotFound(err) != nil {
		return false, err
	}
	return annotations.IsPaused(cluster, c), nil
}

// withoutObject are the machines of our clusters, by the ids of their networks, that are not among the objects, by id.
func withoutObject(machines []*hostpb.Machine, ours, objects map[string]bool) (out []*hostpb.MachineSpec) {
	for _, m := range machines {
		spec := m.GetSpec()
		if ours[spec.GetNetwork().GetId()] && !objects[spec.GetId()] && m.GetStatus().GetPhase() != hostpb.MachineStatus_DELETING {
			out = append(out, spec)
		}
	}
	slices.SortFunc(out, func(a, b *hostpb.MachineSpec) int { return cmp.Compare(a.GetId(), b.GetId()) })
	return out
}

// hasNoObject asks the API server: the cache may be behind, and another manager may be responsible for the namespace.
func (r *Reconciler) hasNoObject(ctx context.Context, spec *hostpb.MachineSpec) (bool, error) {
	m := &infrav1.CapstanMachine{}
	err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: spec.GetNamespace(), Name: spec.GetName()}, m)
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return err == nil && m.Spec.ID != "" && m.Spec.ID != spec.GetId(), err
}

// unknownMachines keeps since when each of them has been unknown.
func unknownMachines(before []infrav1.UnknownMachine, now []*hostpb.MachineSpec, at time.Time) (out []infrav1.UnknownMachine) {
	for _, spec := range now {
		u := infrav1.UnknownMachine{
			ID: spec.GetId(), Namespace: spec.GetNamespace(), Name: spec.GetName(), Cluster: spec.GetCluster(), Since: metav1.NewTime(at.Truncate(time.Second)),
		}
		for _, a := range spec.GetAddresses() {
			u.Addresses = append(u.Addresses, a.GetAddress())
		}
		if i := slices.IndexFunc(before, func(b infrav1.UnknownMachine) bool { return b.ID == u.ID }); i >= 0 {
			u.Since = before[i].Since
		}
		out = append(out, u)
	}
	return out
}

// prune removes the unknown machines that the annotation names. One that has an object again, or that was never unknown, stays.
func prune(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host, unknown []*hostpb.MachineSpec) error {
	value, ok := host.Annotations[infrav1.HostPruneAnnotation]
	if !ok {
		return nil
	}
	ids := strings.Split(value, ",")
	for _, spec := range unknown {
		if !slices.Contains(ids, spec.GetId()) {
			continue
		}
		req := &hostpb.DeleteMachineRequest{Id: spec.GetId(), Namespace: spec.GetNamespace(), Name: spec.GetName()}
		if _, err := conn.DeleteMachine(ctx, req); err != nil {
			return fmt.Errorf("remove the unknown machine %s/%s: %s", spec.GetNamespace(), spec.GetName(), connections.Message(err))
		}
		ctrl.LoggerFrom(ctx).Info("Removed a machine without a CapstanMachine", "id", spec.GetId(), "machine", spec.GetNamespace()+"/"+spec.GetName())
	}
	delete(host.Annotations, infrav1.HostPruneAnnotation)
	return nil
}
