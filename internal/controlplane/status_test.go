package controlplane

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// TestSetStatus (CP-03, CP-05): each number counts its own condition, the selector selects the Machines of this control plane, and the
// version is the lowest one.
func TestSetStatus(t *testing.T) {
	machine := func(name, version string, isTrue ...string) *clusterv1.Machine {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name}}
		m.Spec.Version = version
		for _, kind := range []string{clusterv1.ReadyCondition, clusterv1.AvailableCondition, clusterv1.MachineUpToDateCondition} {
			status := metav1.ConditionFalse
			if slices.Contains(isTrue, kind) {
				status = metav1.ConditionTrue
			}
			conditions.Set(m, metav1.Condition{Type: kind, Status: status, Reason: "Test"})
		}
		return m
	}
	s := &scope{ControlPlane: &model.ControlPlane{
		Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, Object: &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Name: "other-name"}},
		Workload: model.NotAsked(), Now: time.Now(),
		Machines: collections.FromMachines(
			machine("a", "v1.36.10", clusterv1.ReadyCondition, clusterv1.AvailableCondition, clusterv1.MachineUpToDateCondition),
			machine("b", "v1.36.9", clusterv1.ReadyCondition, clusterv1.AvailableCondition),
			machine("c", "v1.36.9", clusterv1.ReadyCondition),
			machine("d", "v1.36.9"),
		),
	}}
	setStatus(s, &result{})
	st := s.Object.Status
	for name, got := range map[string][2]int32{
		"replicas": {ptr.Deref(st.Replicas, -1), 4}, "readyReplicas": {ptr.Deref(st.ReadyReplicas, -1), 3},
		"availableReplicas": {ptr.Deref(st.AvailableReplicas, -1), 2}, "upToDateReplicas": {ptr.Deref(st.UpToDateReplicas, -1), 1},
	} {
		if got[0] != got[1] {
			t.Errorf("CP-03: %s is %d, want %d", name, got[0], got[1])
		}
	}
	if want := []clusterv1.StatusVersion{{Version: "v1.36.9", Replicas: 3}, {Version: "v1.36.10", Replicas: 1}}; st.Version != "v1.36.9" || !slices.Equal(st.Versions, want) {
		t.Errorf("CP-05: version %s, versions %v", st.Version, st.Versions)
	}
	selector, err := labels.Parse(st.Selector)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		labels labels.Set
		want   bool
	}{
		"its own":         {ownLabels(s), true},
		"a worker":        {labels.Set{clusterv1.ClusterNameLabel: "demo"}, false},
		"another cluster": {labels.Set{clusterv1.ClusterNameLabel: "other", clusterv1.MachineControlPlaneLabel: ""}, false},
	} {
		if selector.Matches(tc.labels) != tc.want {
			t.Errorf("CP-03: the selector %q selects %s: %v", st.Selector, name, !tc.want)
		}
	}
}
