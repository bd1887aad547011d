package capstanhost

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// A drain deletes Machines. Their owners, of any kind, create the replacements, and Cluster API's core drains the Nodes with
// respect to PodDisruptionBudgets and hooks. The annotations of Cluster API do less: remediate-machine needs a
// MachineHealthCheck and counts as a failure, and delete-machine only selects a Machine when its owner scales down.

// drainPause is the time between two decisions. This controller has no events of Machines, because drains are rare.
const drainPause = 5 * time.Second

// drainLocks makes it improbable that two clusters wait for each other.
const drainLocks = 1024

// maxDelays is the largest number of causes of delays in a condition.
const maxDelays = 5

// reconcileDrain deletes the Machines of a host that is to be drained by its spec or for a reboot, and reports the progress. It
// returns whether machines are left.
func (r *Reconciler) reconcileDrain(ctx context.Context, host *infrav1.CapstanHost, reboots bool) (draining bool, err error) {
	if !ptr.Deref(host.Spec.Drain, false) && !reboots {
		conditions.Delete(host, infrav1.HostDrainedCondition)
		return false, nil
	}
	on := &infrav1.CapstanMachineList{}
	if err := r.Client.List(ctx, on, client.MatchingFields{MachineHostIndex: host.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return true, err
	}
	machines, unjudged := only(on.Items, r.residentsOf(ctx, host).machine)
	if len(machines) == 0 {
		reconciling.SetCondition(host, infrav1.HostDrainedCondition, metav1.ConditionTrue, infrav1.HostDrainedReason, "")
		return false, nil
	}
	var delays []string
	if unjudged != nil {
		delays = append(delays, unjudged.Error())
	}
	for cluster, names := range byCluster(machines) {
		why, err := r.drainCluster(ctx, cluster, names)
		if err != nil {
			why = append(why, fmt.Sprintf("Cluster %s: %s", cluster, err))
		}
		delays = append(delays, why...)
	}
	reconciling.SetCondition(host, infrav1.HostDrainedCondition, metav1.ConditionFalse, infrav1.HostDrainingReason,
		"%s", drainMessage(len(machines), delays))
	return true, unjudged
}

// byCluster returns the names of CapstanMachines by their cluster.
func byCluster(machines []infrav1.CapstanMachine) map[client.ObjectKey]map[string]bool {
	out := map[client.ObjectKey]map[string]bool{}
	for i := range machines {
		m := &machines[i]
		key := client.ObjectKey{Namespace: m.Namespace, Name: m.Labels[clusterv1.ClusterNameLabel]}
		if out[key] == nil {
			out[key] = map[string]bool{}
		}
		out[key][m.Name] = true
	}
	return out
}

func drainMessage(left int, delays []string) string {
	slices.Sort(delays)
	if more := len(delays) - maxDelays; more > 0 {
		delays = append(delays[:maxDelays:maxDelays], fmt.Sprintf("%d more causes", more))
	}
	return strings.Join(append([]string{fmt.Sprintf("%d machines are left", left)}, delays...), "; ")
}

// drainCluster deletes the Machines of one cluster that may go now. names are those of its CapstanMachines on the host. It
// reads the Machines live, because a decision on outdated ones could remove too many. For the same reason, it waits for the
// decisions on the same cluster for other hosts. Managers share no cluster, so each of them drains its own ones.
func (r *Reconciler) drainCluster(ctx context.Context, key client.ObjectKey, names map[string]bool) (delays []string, err error) {
	cluster := &clusterv1.Cluster{}
	if err := r.Client.Get(ctx, key, cluster); err != nil {
		return nil, err
	}
	r.draining.LockKey(key.String())
	defer func() { _ = r.draining.UnlockKey(key.String()) }() // never fails
	machines := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, machines, reconciling.OfCluster(key)); err != nil {
		return nil, err
	}
	next, delays := planDrain(cluster, machines.Items, names)
	for _, m := range next {
		ctrl.LoggerFrom(ctx).Info("Deleting a Machine of a host that is drained", "Machine", klog.KObj(m))
		err := r.Client.Delete(ctx, m, client.Preconditions{UID: &m.UID, ResourceVersion: &m.ResourceVersion})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // A conflict: the next decision sees the newer Machine.
			return delays, err
		}
	}
	return delays, nil
}

// planDrain returns the Machines of a cluster to delete now, and why others wait: of the control plane and of the workers, one
// each, if all other Machines of that group are Available and none is missing. names are the CapstanMachines to replace.
func planDrain(cluster *clusterv1.Cluster, machines []clusterv1.Machine, names map[string]bool) (next []*clusterv1.Machine, delays []string) {
	text := klog.KObj(cluster).String()
	if !cluster.DeletionTimestamp.IsZero() {
		return nil, nil // Its Machines are being deleted anyway.
	}
	if ptr.Deref(cluster.Spec.Paused, false) {
		return nil, []string{fmt.Sprintf("Cluster %s is paused", text)}
	}
	if name := withoutMachine(machines, names); name != "" {
		delays = append(delays, fmt.Sprintf("Cluster %s: CapstanMachine %s has no Machine: delete it", text, name))
	}
	for _, group := range groups(cluster, machines) {
		m, why := group.next(names)
		if m != nil {
			next = append(next, m)
		}
		if why != "" {
			delays = append(delays, fmt.Sprintf("Cluster %s: %s", text, why))
		}
	}
	return next, delays
}

// withoutMachine returns the first of the CapstanMachines that belongs to no Machine, or "". Only a client other than Cluster API makes
// one.
func withoutMachine(machines []clusterv1.Machine, names map[string]bool) string {
	left := maps.Clone(names)
	for i := range machines {
		if ref := machines[i].Spec.InfrastructureRef; ref.Kind == infrav1.MachineKind {
			delete(left, ref.Name)
		}
	}
	if len(left) == 0 {
		return ""
	}
	return slices.Min(slices.Collect(maps.Keys(left)))
}

// drainGroup is the control plane or the workers of a cluster.
type drainGroup struct {
	machines []*clusterv1.Machine
	desired  int32
}

func groups(cluster *clusterv1.Cluster, machines []clusterv1.Machine) []drainGroup {
	var controlPlane, workers drainGroup
	if s := cluster.Status.ControlPlane; s != nil {
		controlPlane.desired = ptr.Deref(s.DesiredReplicas, 0)
	}
	if s := cluster.Status.Workers; s != nil {
		workers.desired = ptr.Deref(s.DesiredReplicas, 0)
	}
	for i := range machines {
		g := &workers
		if util.IsControlPlaneMachine(&machines[i]) {
			g = &controlPlane
		}
		g.machines = append(g.machines, &machines[i])
	}
	return []drainGroup{controlPlane, workers}
}

// next returns the Machine to delete now, or why none is deleted.
func (g drainGroup) next(names map[string]bool) (*clusterv1.Machine, string) {
	var candidates []*clusterv1.Machine
	for _, m := range g.machines {
		if ref := m.Spec.InfrastructureRef; ref.Kind == infrav1.MachineKind && names[ref.Name] {
			candidates = append(candidates, m)
		}
	}
	if len(candidates) == 0 {
		return nil, ""
	}
	owned := slices.DeleteFunc(slices.Clone(candidates), func(m *clusterv1.Machine) bool {
		return metav1.GetControllerOf(m) == nil || annotations.HasPaused(m)
	})
	if len(owned) == 0 {
		return nil, fmt.Sprintf("Machine %s is paused, or has no owner that would replace it: delete it", candidates[0].Name)
	}
	// A failed Machine is deleted first, because its replacement only improves the group.
	victim := slices.MinFunc(owned, func(a, b *clusterv1.Machine) int {
		return cmp.Or(cmp.Compare(rankAvailable(a), rankAvailable(b)), cmp.Compare(a.Name, b.Name))
	})
	var staying int32
	for _, m := range g.machines {
		switch {
		case !m.DeletionTimestamp.IsZero():
			return nil, fmt.Sprintf("Machine %s is being deleted", m.Name)
		case m != victim && rankAvailable(m) == 0:
			return nil, fmt.Sprintf("Machine %s is not Available", m.Name)
		}
		staying++
	}
	if staying < g.desired {
		return nil, fmt.Sprintf("%d of %d Machines exist", staying, g.desired)
	}
	return victim, ""
}

// rankAvailable is 1 for a Machine that is Available, otherwise 0.
func rankAvailable(m *clusterv1.Machine) int {
	if conditions.IsTrue(m, clusterv1.AvailableCondition) {
		return 1
	}
	return 0
}
