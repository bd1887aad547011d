package bootstrap

import (
	"bytes"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// CP-23: the encryption key of a user is found without the label of the cluster, so not in the cache. No event reports such a Secret, and a
// config that waits for it is tried again.
func TestEncryptionKeyOfUser(t *testing.T) {
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}
	key, other := bytes.Repeat([]byte("k"), render.EncryptionKeySize), bytes.Repeat([]byte("o"), render.EncryptionKeySize)
	stored := func(content []byte) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-encryption"}, Data: map[string][]byte{"value": content}}
	}
	for name, tc := range map[string]struct {
		cached, live *corev1.Secret
		want         []byte
	}{
		"in the cache":  {stored(key), stored(other), key},
		"not labelled":  {nil, stored(key), key},
		"missing":       {nil, nil, nil},
		"broken":        {nil, stored(key[1:]), nil},
		"broken, known": {stored(key[1:]), stored(key[1:]), nil},
	} {
		t.Run(name, func(t *testing.T) {
			cached, live := fake.NewClientBuilder(), fake.NewClientBuilder()
			if tc.cached != nil {
				cached.WithObjects(tc.cached)
			}
			if tc.live != nil {
				live.WithObjects(tc.live)
			}
			r := &Reconciler{Options: reconciling.Options{SecretCachingClient: cached.Build()}, Client: live.Build()}
			got, err := r.encryptionKey(t.Context(), cluster)
			waits, ok := errors.AsType[*notYet](err)
			if !bytes.Equal(got, tc.want) || ok != (tc.want == nil) || err != nil && !ok {
				t.Fatalf("got %d bytes, %v", len(got), err)
			}
			if ok && (!waits.unseen || waits.reason != bootstrapv1.CertificatesMissingReason) {
				t.Errorf("it is not tried again, or has another reason: %+v", waits)
			}
		})
	}
}

// TestAuthorityOfUser: the certificate authority of a user is found without the label of the cluster. No event reports such a Secret, and a
// config that waits for it is tried again.
func TestAuthorityOfUser(t *testing.T) {
	s := &scope{config: &bootstrapv1.CapstanConfig{}, cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}}
	ca := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-ca"}, Data: map[string][]byte{"tls.crt": []byte("certificate"), "tls.key": []byte("key")},
	}
	r := &Reconciler{Options: reconciling.Options{SecretCachingClient: fake.NewFakeClient()}, Client: fake.NewFakeClient()}
	_, err := r.certificates(t.Context(), s, nodeconfig.RoleWorker)
	if waits, ok := errors.AsType[*notYet](err); !ok || !waits.unseen || waits.reason != bootstrapv1.CertificatesMissingReason {
		t.Errorf("it is not tried again, or has another reason: %v", err)
	}
	if err := r.Client.Create(t.Context(), ca); err != nil {
		t.Fatal(err)
	}
	files, err := r.certificates(t.Context(), s, nodeconfig.RoleWorker)
	if err != nil || len(files) != 1 || string(files[0].Content) != "certificate" {
		t.Errorf("got %v, %v, want the certificate of the user", files, err)
	}
}
