package bootstrap

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// BC-02: the event DataSecretRecreated follows only if the Secret was created. A cache can lack it: it is behind, or the Secret was
// restored without the label of the cluster.
func TestEventOfRecreatedData(t *testing.T) {
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}
	cluster.Spec.ControlPlaneEndpoint = endpoint
	authorities := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := authorities.Generate(); err != nil {
		t.Fatal(err)
	}
	ca := authorities.GetByPurpose(secret.ClusterCA).AsSecret(client.ObjectKeyFromObject(cluster), metav1.OwnerReference{Name: "demo", UID: "1"})
	stored := fake.NewClientBuilder().WithObjects(ca).Build()
	cached := interceptor.NewClient(stored, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if key.Name == "worker" {
				return apierrors.NewNotFound(corev1.Resource("secrets"), key.Name)
			}
			return c.Get(ctx, key, obj, opts...)
		},
	})
	config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "worker", UID: "2"}}
	s := &scope{config: config, owner: &owner{clusterName: "demo", version: "v1.36.3"}, cluster: cluster, controlPlane: &controlplanev1.CapstanControlPlane{}}
	recorder := events.NewFakeRecorder(10)
	r := &Reconciler{Options: reconciling.Options{SecretCachingClient: cached}, Client: stored, recorder: recorder}
	for _, step := range []struct {
		name   string
		before func() error
		events int
	}{
		{"the first data", nil, 0},
		{"the cache lacks the data", func() error { config.Status.DataSecretName = "worker"; return nil }, 0},
		{"the data was deleted", func() error {
			return stored.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "worker"}})
		}, 1},
	} {
		if step.before != nil {
			if err := step.before(); err != nil {
				t.Fatal(err)
			}
		}
		if data, err := r.dataSecret(t.Context(), s); err != nil || len(data) == 0 {
			t.Fatalf("%s: %d bytes, %v", step.name, len(data), err)
		}
		if n := len(recorder.Events); n != step.events {
			t.Errorf("%s: expected %d events, found %d", step.name, step.events, n)
		}
	}
}
