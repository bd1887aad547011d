package capstanhost

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// The Secret of a host is read until the cache shows that the host owns it, also after it has lost its owner.
func TestOwnCredentials(t *testing.T) {
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "h", UID: "1"}}
	host.Spec.CredentialsRef = infrav1.SecretReference{Namespace: "ns", Name: "creds"}
	fresh := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "creds"}}
	reads := 0
	live := fake.NewClientBuilder().WithObjects(fresh).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			reads++
			return c.Get(ctx, key, obj, opts...)
		},
	}).Build()
	r := &Reconciler{Options: reconciling.Options{LiveClient: live}, Client: live}

	stored := func() *corev1.Secret {
		secret := &corev1.Secret{}
		if err := live.Get(t.Context(), client.ObjectKeyFromObject(fresh), secret); err != nil {
			t.Fatal(err)
		}
		return secret
	}
	lost := func() *corev1.Secret {
		secret := stored()
		secret.OwnerReferences = nil
		return secret
	}
	for _, tt := range []struct {
		name   string
		cached func() *corev1.Secret
		reads  int
	}{
		{"not in the cache yet", func() *corev1.Secret { return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "other"}} }, 1},
		{"owned", stored, 0},
		{"without its owner in the cache", lost, 1},
	} {
		cached := tt.cached()
		cached.ResourceVersion = ""
		r.secrets = fake.NewClientBuilder().WithObjects(cached).Build()
		reads = 0
		if err := r.ownCredentials(t.Context(), host); err != nil || reads != tt.reads {
			t.Errorf("%s: %v, %d reads, want %d", tt.name, err, reads, tt.reads)
		}
		if secret := stored(); len(secret.OwnerReferences) != 1 || len(secret.Labels) != 1 {
			t.Errorf("%s: owners %v, labels %v", tt.name, secret.OwnerReferences, secret.Labels)
		}
	}
}
