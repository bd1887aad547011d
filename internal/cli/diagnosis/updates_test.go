package diagnosis

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestUpdatesOf: updates that were begun and have not succeeded appear, with what remains of their group.
func TestUpdatesOf(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	waitsSince, runsSince := now.Add(-time.Minute), now.Add(-30*time.Second)
	labels := func(group string) map[string]string {
		out := map[string]string{clusterv1.ClusterNameLabel: "a"}
		if group == "control plane" {
			out[clusterv1.MachineControlPlaneLabel] = ""
		} else {
			out[clusterv1.MachineDeploymentNameLabel] = group
		}
		return out
	}
	var machines, capstan []*unstructured.Unstructured
	add := func(name, group, reason string, upToDate metav1.ConditionStatus) {
		meta := metav1.ObjectMeta{Namespace: "n", Name: name, Labels: labels(group)}
		machine := &clusterv1.Machine{ObjectMeta: meta}
		machine.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineUpToDateCondition, Status: upToDate}}
		m := &infrav1.CapstanMachine{ObjectMeta: *meta.DeepCopy()}
		if reason != "" {
			m.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
			m.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Reason: reason, Message: "kubelet: because", LastTransitionTime: metav1.NewTime(waitsSince)}}
			m.Status.Update = infrav1.MachineUpdateStatus{KubernetesVersion: "v1.36.3", Step: "kubelet", StartTime: metav1.NewTime(runsSince)}
		}
		machines, capstan = append(machines, untyped(t, machine)), append(capstan, untyped(t, m))
	}
	add("md-1", "md", infrav1.WaitingForUpdateReason, metav1.ConditionFalse)
	add("md-2", "md", "", metav1.ConditionTrue)
	add("cp-1", "control plane", infrav1.UpdateRunningReason, metav1.ConditionFalse)
	add("cp-2", "control plane", "", metav1.ConditionFalse)
	add("cp-3", "control plane", infrav1.UpdateSucceededReason, metav1.ConditionTrue)
	want := []Update{
		{Namespace: "n", Cluster: "a", Group: "control plane", Machine: "cp-1", Version: "v1.36.3", State: infrav1.UpdateRunningReason, Step: "kubelet", Message: "kubelet: because", Since: runsSince, Remaining: 2},
		{Namespace: "n", Cluster: "a", Group: "md", Machine: "md-1", State: infrav1.WaitingForUpdateReason, Message: "kubelet: because", Since: waitsSince, Remaining: 1},
	}
	if got := UpdatesOf(machines, capstan); !slices.Equal(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := UpdatesOf(nil, nil); got == nil || len(got) > 0 {
		t.Errorf("without machines: %#v, want an empty list", got)
	}
}

func untyped(t *testing.T, object any) *unstructured.Unstructured {
	t.Helper()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		t.Fatal(err)
	}
	return &unstructured.Unstructured{Object: fields}
}
