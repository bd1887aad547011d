package hostjoin

import (
	"bytes"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/reconciling"
)

// A host that chooses its name replaces no Secret of other programs in the namespace of the provider. A Secret that can be one of
// `capstan host credentials` gets an authority.
func TestForeignSecretStays(t *testing.T) {
	for kind, refused := range map[corev1.SecretType]bool{corev1.SecretTypeOpaque: true, corev1.SecretTypeTLS: false} {
		secret := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "provider", Name: "s3-credentials"}, Type: kind, Data: map[string][]byte{"key": []byte("theirs")},
		}
		r := &Reconciler{namespace: "provider", Options: reconciling.Options{LiveClient: fake.NewClientBuilder().WithObjects(secret).Build()}}
		j, admitted := joiner{}, token{}
		j.Name, admitted.terms.Validity.Duration = "s3", credentials.DefaultValidity
		if _, err := r.ensureCredentials(t.Context(), j, admitted); errors.Is(err, errForeignSecret) != refused || err != nil && !refused {
			t.Errorf("%s: %v", kind, err)
		}
		if err := r.LiveClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil || bytes.Equal(secret.Data["key"], []byte("theirs")) != refused {
			t.Errorf("%s: the data is %v, %v", kind, secret.Data, err)
		}
		if managed, err := credentials.AuthorityFromSecret(secret.Data); (err == nil && managed.Usable(time.Now())) == refused {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
