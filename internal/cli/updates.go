package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/duration"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cli/dashboard"
)

// update is an update in place in the output of `capstan status`, also for scripts.
type update = dashboard.Update

// updates reads the updates in place of the machines that the user can read.
func (m *management) updates(ctx context.Context) ([]update, error) {
	machines, err := m.listed(ctx, described["machine"][0], "")
	if err != nil {
		return nil, err
	}
	capstan, err := m.listed(ctx, schema.GroupKind{Group: infraGroup, Kind: "CapstanMachine"}, "")
	return updatesOf(typed[clusterv1.Machine](machines), typed[infrav1.CapstanMachine](capstan)), err
}

// updatesOf returns the machines whose update in place was begun and has not succeeded, sorted by cluster, group and name.
func updatesOf(machines []clusterv1.Machine, capstan []infrav1.CapstanMachine) []update {
	type group struct{ namespace, cluster, name string }
	of := func(o client.Object) group {
		return group{o.GetNamespace(), o.GetLabels()[clusterv1.ClusterNameLabel], groupOf(o)}
	}
	remaining := map[group]int{}
	for i := range machines {
		if m := &machines[i]; conditions.IsFalse(m, clusterv1.MachineUpToDateCondition) {
			remaining[of(m)]++
		}
	}
	var out []update
	for i := range capstan {
		m := &capstan[i]
		updating := conditions.Get(m, infrav1.UpdatingCondition)
		if _, begun := m.Annotations[clusterv1.UpdateInProgressAnnotation]; !begun || updating == nil || updating.Reason == infrav1.UpdateSucceededReason || updating.Reason == infrav1.NotUpdatingReason {
			continue
		}
		g, report := of(m), m.Status.Update
		u := update{
			Namespace: g.namespace, Cluster: g.cluster, Group: g.name, Machine: m.Name, State: updating.Reason,
			Message: updating.Message, Since: updating.LastTransitionTime.Time, Remaining: max(remaining[g], 1),
		}
		if updating.Reason == infrav1.UpdateRunningReason || updating.Reason == infrav1.UpdateFailedReason {
			u.Version, u.Step, u.Since = report.KubernetesVersion, report.Step, report.StartTime.Time
		}
		out = append(out, u)
	}
	slices.SortFunc(out, func(a, b update) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Machine, b.Machine))
	})
	return out
}

// groupOf returns the owner of a machine: the control plane, or a MachineDeployment or MachinePool.
func groupOf(o client.Object) string {
	labels := o.GetLabels()
	if _, ok := labels[clusterv1.MachineControlPlaneLabel]; ok {
		return "control plane"
	}
	return cmp.Or(labels[clusterv1.MachineDeploymentNameLabel], labels[clusterv1.MachinePoolNameLabel])
}

// printUpdates prints nothing without updates.
func printUpdates(w io.Writer, updates []update, now time.Time) {
	if len(updates) == 0 {
		return
	}
	fmt.Fprintln(w, "\nUPDATE OF\tGROUP\tREMAINING\tTO\tSTATE\tSTEP\tSINCE\tMESSAGE")
	for _, u := range updates {
		since := ""
		if !u.Since.IsZero() {
			since = duration.HumanDuration(now.Sub(u.Since))
		}
		fmt.Fprintf(w, "%s/%s\t%s of %s\t%d\t%s\t%s\t%s\t%s\t%s\n", u.Namespace, u.Machine, cmp.Or(u.Group, "worker"), u.Cluster, u.Remaining,
			cmp.Or(u.Version, "-"), u.State, cmp.Or(u.Step, "-"), cmp.Or(since, "-"), strings.TrimPrefix(u.Message, u.Step+": "))
	}
}
