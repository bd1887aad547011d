package controlplane

import (
	"context"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// TestLateWrite writes a status late, as after a slow answer of the API server. A later reconcile has read the object from
// before this write and changed nothing. The write itself must cause a reconcile. Otherwise the status stays wrong until the
// next resync.
func TestLateWrite(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "it waits for the endpoint", func() bool {
		return testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, noEndpoint)
	})
	expect.Rest(t, func() string { _ = cluster.Get(cp); return cp.ResourceVersion })
	before := cp.DeepCopy()
	conditions.Set(cp, metav1.Condition{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Late", Message: "late"})
	if err := env.Client.Status().Patch(context.Background(), cp, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	cluster.Becomes(t, cp, "the late write is corrected", func() bool {
		return testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, noEndpoint)
	})
}

// TestForeignCondition checks that a condition of another writer survives the status of a reconcile whose cache is behind.
func TestForeignCondition(t *testing.T) {
	cluster := clusterWithoutManager(t, false)
	cache := &frozenCache{Client: &unpaused{env.Client}}
	r := newReconciler(cache, nil, reconciling.Options{LiveClient: &unpaused{env.Client}, SecretCachingClient: env.Client})
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: cluster.Meta("demo")}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cp)}
	reconcile := func() {
		t.Helper()
		expect.True(t, "a reconcile without a conflict with the controller that reports the pause", func() bool {
			_, err := r.Reconcile(t.Context(), request)
			if err != nil && !apierrors.IsConflict(err) {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	reconcile()
	cluster.Change(cp, func() { cp.Spec.Replicas = ptr.To[int32](3) })
	behind := cp.DeepCopy()
	delete(behind.Annotations, clusterv1.PausedAnnotation)
	conditions.Set(behind, metav1.Condition{Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, Reason: clusterv1.NotPausedReason})
	cache.objects = map[client.ObjectKey]client.Object{request.NamespacedName: behind}
	cluster.ChangeStatus(cp, func() {
		conditions.Set(cp, metav1.Condition{Type: "ExampleChecked", Status: metav1.ConditionTrue, Reason: "Checked"})
	})
	reconcile()
	if err := cluster.Get(cp); err != nil || !testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "to 3 replicas") {
		t.Fatalf("the status was not written: %v, %v", cp.Status.Conditions, err)
	}
	if !testcluster.Has(cp, "ExampleChecked", metav1.ConditionTrue, "") {
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
		expect.True(t, controller+" is limited", func() bool {
			return testmetrics.Sum(t, "capi_reconcile_total", map[string]string{"controller": controller}) > 0
		})
	}
}
