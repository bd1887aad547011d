package diagnosis

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Update is an update in place in the output of `capstan status` and others, also for scripts.
type Update struct {
	Namespace string `json:"namespace"`
	Cluster   string `json:"cluster"`
	// Group is the control plane, or the name of the MachineDeployment or MachinePool.
	Group   string `json:"group"`
	Machine string `json:"machine"`
	Version string `json:"version,omitempty"`
	// State is the reason of the condition Updating.
	State   string `json:"state"`
	Step    string `json:"step,omitempty"`
	Message string `json:"message,omitempty"`
	// Since is the start of the update on the host, or of the wait for it.
	Since time.Time `json:"since,omitzero"`
	// Remaining is the number of machines of the group that are not up to date, this one included.
	Remaining int `json:"remaining"`
}

// UpdatesOf returns the updates of CapstanMachines that were begun and have not succeeded, sorted by cluster, group and name. The Machines
// show what remains of each group.
func UpdatesOf(machines, capstan []*unstructured.Unstructured) []Update {
	type group struct{ namespace, cluster, name string }
	of := func(o client.Object) group {
		return group{o.GetNamespace(), o.GetLabels()[clusterv1.ClusterNameLabel], groupOf(o)}
	}
	remaining := map[group]int{}
	for _, m := range Typed[clusterv1.Machine](machines) {
		if conditions.IsFalse(&m, clusterv1.MachineUpToDateCondition) {
			remaining[of(&m)]++
		}
	}
	out := []Update{}
	for _, m := range Typed[infrav1.CapstanMachine](capstan) {
		updating := conditions.Get(&m, infrav1.UpdatingCondition)
		if _, begun := m.Annotations[clusterv1.UpdateInProgressAnnotation]; !begun || updating == nil || updating.Reason == infrav1.UpdateSucceededReason || updating.Reason == infrav1.NotUpdatingReason {
			continue
		}
		g, report := of(&m), m.Status.Update
		u := Update{
			Namespace: g.namespace, Cluster: g.cluster, Group: g.name, Machine: m.Name, State: updating.Reason,
			Message: updating.Message, Since: updating.LastTransitionTime.Time, Remaining: max(remaining[g], 1),
		}
		if updating.Reason == infrav1.UpdateRunningReason || updating.Reason == infrav1.UpdateFailedReason {
			u.Version, u.Step, u.Since = report.KubernetesVersion, report.Step, report.StartTime.Time
		}
		out = append(out, u)
	}
	slices.SortFunc(out, func(a, b Update) int {
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

// Typed converts objects, and leaves out those that are not of this type.
func Typed[T any](objects []*unstructured.Unstructured) []T {
	var out []T
	for _, o := range objects {
		var t T
		if runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &t) == nil {
			out = append(out, t)
		}
	}
	return out
}
