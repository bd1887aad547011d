package controlplane

import (
	"slices"
	"strings"
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

// TestStatusAfterFailedStep (CP-10): a reconcile that fails before it has seen the Machines and the API server changes no condition about
// them, neither for the better nor for the worse.
func TestStatusAfterFailedStep(t *testing.T) {
	kinds := []string{clusterv1.AvailableCondition, clusterv1.RollingOutCondition, controlplanev1.UpdatingCondition, clusterv1.RemediatingCondition}
	for _, before := range []metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse} {
		s := running()
		for _, kind := range kinds {
			conditions.Set(s.Object, metav1.Condition{Type: kind, Status: before, Reason: "Before", LastTransitionTime: metav1.Unix(1, 0)})
		}
		setStatus(s, &result{})
		for _, kind := range kinds {
			if c := conditions.Get(s.Object, kind); c.Status != before || c.Reason != "Before" || !c.LastTransitionTime.Equal(ptr.To(metav1.Unix(1, 0))) {
				t.Errorf("%s was %s, and is %v", kind, before, c)
			}
		}
		s.Outdated, s.Readiness = map[string][]string{}, &model.Readiness{Ready: true}
		setStatus(s, &result{})
		for _, kind := range kinds {
			want := metav1.ConditionFalse
			if kind == clusterv1.AvailableCondition {
				want = metav1.ConditionTrue
			}
			if c := conditions.Get(s.Object, kind); c.Status != want || c.Reason == "Before" {
				t.Errorf("%s is %v after the next reconcile", kind, c)
			}
		}
	}
	s := running()
	setStatus(s, &result{})
	for _, kind := range []string{clusterv1.AvailableCondition, clusterv1.ReadyCondition} {
		if c := conditions.Get(s.Object, kind); c == nil || c.Status != metav1.ConditionUnknown {
			t.Errorf("%s is %v before the first request", kind, c)
		}
	}
}

// running returns an initialized control plane with one Machine, before its first step.
func running() *scope {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	for _, kind := range []string{clusterv1.ReadyCondition, clusterv1.MachineUpToDateCondition} {
		conditions.Set(m, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: kind})
	}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Name: "demo", Annotations: map[string]string{controlplanev1.InitializedAnnotation: "true"}}}
	cp.Spec.Version = "v1.36.3"
	return &scope{ControlPlane: &model.ControlPlane{
		Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, Object: cp,
		Workload: model.NotAsked(), Now: time.Now(), Machines: collections.FromMachines(m),
	}}
}

// TestInvalidIsShown: Available names an invalid setting for any number of Machines, before and after the initialization, also when
// other problems exist.
func TestInvalidIsShown(t *testing.T) {
	for name, change := range map[string]func(*scope){
		"running":         func(s *scope) { s.Readiness = &model.Readiness{Ready: true} },
		"silent":          func(s *scope) { s.Readiness = &model.Readiness{Err: model.ErrRefused} },
		"not initialized": func(s *scope) { s.Object.Annotations = nil },
		"no Machine":      func(s *scope) { s.Object.Annotations, s.Machines = nil, nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := running()
			s.Cluster.Spec.ClusterNetwork.Pods.CIDRBlocks, s.Cluster.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"10.0.0.0/8"}, []string{"10.96.0.0/16"}
			change(s)
			setStatus(s, &result{})
			c := conditions.Get(s.Object, clusterv1.AvailableCondition)
			if c.Status != metav1.ConditionFalse || c.Reason != controlplanev1.InvalidConfigurationReason || strings.Count(c.Message, "overlap") != 1 {
				t.Errorf("got %v", c)
			}
			if ready := conditions.Get(s.Object, clusterv1.ReadyCondition); ready.Status != metav1.ConditionFalse {
				t.Errorf("got %v", ready)
			}
		})
	}
}
