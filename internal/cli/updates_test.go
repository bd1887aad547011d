package cli

import (
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestUpdates: updates that were begun and have not succeeded appear, with what remains of their group.
func TestUpdates(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	labels := func(group string) map[string]string {
		out := map[string]string{clusterv1.ClusterNameLabel: "a"}
		if group == "control plane" {
			out[clusterv1.MachineControlPlaneLabel] = ""
		} else {
			out[clusterv1.MachineDeploymentNameLabel] = group
		}
		return out
	}
	var machines []clusterv1.Machine
	var capstan []infrav1.CapstanMachine
	add := func(name, group, reason string, upToDate metav1.ConditionStatus) {
		meta := metav1.ObjectMeta{Namespace: "n", Name: name, Labels: labels(group)}
		machine := clusterv1.Machine{ObjectMeta: meta}
		machine.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineUpToDateCondition, Status: upToDate}}
		m := infrav1.CapstanMachine{ObjectMeta: *meta.DeepCopy()}
		if reason != "" {
			m.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
			m.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Reason: reason, Message: "kubelet: because", LastTransitionTime: metav1.NewTime(now.Add(-time.Minute))}}
			m.Status.Update = infrav1.MachineUpdateStatus{KubernetesVersion: "v1.36.3", Step: "kubelet", StartTime: metav1.NewTime(now.Add(-30 * time.Second))}
		}
		machines, capstan = append(machines, machine), append(capstan, m)
	}
	add("cp-1", "control plane", infrav1.UpdateRunningReason, metav1.ConditionFalse)
	add("cp-2", "control plane", "", metav1.ConditionFalse)
	add("cp-3", "control plane", infrav1.UpdateSucceededReason, metav1.ConditionTrue)
	add("md-1", "md", infrav1.WaitingForUpdateReason, metav1.ConditionFalse)
	add("md-2", "md", "", metav1.ConditionTrue)
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	printUpdates(w, updatesOf(machines, capstan), now)
	_ = w.Flush()
	want := []string{
		"UPDATE OF GROUP REMAINING TO STATE STEP SINCE MESSAGE",
		"n/cp-1 control plane of a 2 v1.36.3 " + infrav1.UpdateRunningReason + " kubelet 30s because",
		"n/md-1 md of a 1 - " + infrav1.WaitingForUpdateReason + " - 60s kubelet: because",
	}
	var got []string
	for line := range strings.Lines(strings.TrimSpace(out.String())) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	out.Reset()
	printUpdates(&out, updatesOf(machines[4:], capstan[4:]), now)
	if out.Len() > 0 {
		t.Errorf("without updates: %q", out.String())
	}
}
