package controlplane

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/bootstrap/testcluster"
)

// TestLateWrite writes a status late, as a reconcile does whose API server answers after a pause. The reconcile that
// followed it read the object from before the write, and found nothing to change. The write itself must lead to a
// reconcile, or the status stays wrong until the next resync.
func TestLateWrite(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(nil)
	becomes(t, cluster, cp, "it waits for the endpoint", func() bool { return has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, noEndpoint) })
	testcluster.Rest(t, func() string { _ = cluster.Get(cp); return cp.ResourceVersion })
	before := cp.DeepCopy()
	conditions.Set(cp, metav1.Condition{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Late", Message: "late"})
	if err := env.Client.Status().Patch(context.Background(), cp, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	becomes(t, cluster, cp, "the late write is corrected", func() bool { return has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, noEndpoint) })
}

// TestForeignCondition checks that a condition of another writer survives the status of a reconcile.
func TestForeignCondition(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(nil)
	cluster.ChangeStatus(cp, func() {
		conditions.Set(cp, metav1.Condition{Type: "ExampleChecked", Status: metav1.ConditionTrue, Reason: "Checked"})
	})
	cluster.SetInfraEndpoint(somewhere)
	becomes(t, cluster, cp, "the first Machine exists", func() bool { return cp.Status.Replicas != nil && *cp.Status.Replicas == 1 })
	if !has(cp, "ExampleChecked", metav1.ConditionTrue, "") {
		t.Errorf("the condition of another writer is lost: %v", cp.Status.Conditions)
	}
}

// TestReconcilerRateLimiting checks that the feature gate covers both controllers: Cluster API counts the reconciles that
// it lets through, and counts none without the gate.
func TestReconcilerRateLimiting(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil) // Its first Machine is an event for the controller of certificate requests.
	for _, controller := range []string{"capstancontrolplane", "capstan-csr"} {
		testcluster.Eventually(t, controller+" is limited", func() bool { return limitedReconciles(t, controller) > 0 })
	}
}

func limitedReconciles(t *testing.T, controller string) (n float64) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "capi_reconcile_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			for _, label := range m.GetLabel() {
				if label.GetName() == "controller" && label.GetValue() == controller {
					n += m.GetCounter().GetValue()
				}
			}
		}
	}
	return n
}
