package controlplane

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/expect"
)

func metricsAPI() *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("apiregistration.k8s.io/v1")
	o.SetKind("APIService")
	o.SetName("v1beta1.metrics.k8s.io")
	return o
}

// registration returns the verification of the registered API: its authorities in base64, and whether it is insecure.
func registration(t *testing.T) (bundle string, insecure, found bool) {
	t.Helper()
	o := metricsAPI()
	if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o); apierrors.IsNotFound(err) {
		return "", false, false
	} else if err != nil {
		t.Fatal(err)
	}
	bundle, _, _ = unstructured.NestedString(o.Object, "spec", "caBundle")
	insecure, _, _ = unstructured.NestedBool(o.Object, "spec", "insecureSkipTLSVerify")
	return bundle, insecure, true
}

// TestMetricsRegistration: the API is registered with the cluster's authorities and follows their rotation. Without metrics-server
// the registration is removed, unless it is the user's.
func TestMetricsRegistration(t *testing.T) {
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), metricsAPI()) })
	cp := initializedFor(time.Hour)
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Workload: &model.Workload{}, Now: time.Now()}, client: env.Client}
	r := &metricsServers{}
	step := func(metrics bootstrapv1.ResourceMetrics, authorities string) {
		t.Helper()
		cp.Spec.Config.Cluster.ResourceMetrics = metrics
		s.Authority = &corev1.Secret{Data: map[string][]byte{corev1.TLSCertKey: []byte(authorities)}}
		// The API server writes the status of a registration at the same time, so a deletion can end with a conflict.
		expect.True(t, "the registration is up to date", func() bool {
			again, err := r.reconcile(t.Context(), s)
			expect.NoError(t, err)
			return again.requeueAfter == 0
		})
	}
	foreign := metricsAPI()
	foreign.Object["spec"] = map[string]any{
		"group": "metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": int64(100), "versionPriority": int64(100),
		"insecureSkipTLSVerify": true, "service": map[string]any{"namespace": "default", "name": "own"},
	}
	if err := env.Client.Create(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	step("", "one")
	if _, _, found := registration(t); !found {
		t.Fatal("the user's registration was removed")
	}
	if err := env.Client.Delete(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	for authorities, want := range map[string]string{"one": "b25l", "two": "dHdv"} {
		step(bootstrapv1.ResourceMetricsServer, authorities)
		if bundle, insecure, _ := registration(t); bundle != want || insecure {
			t.Errorf("authorities %q, insecure %v, want %q", bundle, insecure, want)
		}
	}
	step(bootstrapv1.ResourceMetricsNone, "two")
	if _, _, found := registration(t); found {
		t.Error("a cluster without metrics-server has the registration")
	}
}
