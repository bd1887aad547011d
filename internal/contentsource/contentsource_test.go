package contentsource

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

func TestRead(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "team", Name: "a"}
	c := fake.NewClientBuilder().WithObjects(
		&corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"key": []byte("secret")}},
		&corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"key": "text"}, BinaryData: map[string][]byte{"binary": {0xff}}},
	).Build()
	for _, test := range []struct{ namespace, name, key, secret, configMap string }{
		{"team", "a", "key", "secret", "text"},
		{"team", "a", "binary", `the Secret a has no key "binary"`, "\xff"},
		{"team", "a", "other", `the Secret a has no key "other"`, `the ConfigMap a has no key "other"`},
		{"team", "b", "key", "the Secret b does not exist", "the ConfigMap b does not exist"},
		{"other", "a", "key", "the Secret a does not exist", "the ConfigMap a does not exist"},
	} {
		content, err := Secret(t.Context(), c, test.namespace, bootstrapv1.SecretKeyReference{Name: test.name, Key: test.key})
		if got := result(t, content, err); got != test.secret {
			t.Errorf("%v: the Secret has %q", test, got)
		}
		content, err = ConfigMap(t.Context(), c, test.namespace, bootstrapv1.ConfigMapKeyReference{Name: test.name, Key: test.key})
		if got := result(t, content, err); got != test.configMap {
			t.Errorf("%v: the ConfigMap has %q", test, got)
		}
	}
}

// result is the content, or the text of the error that callers recognize.
func result(t *testing.T, content []byte, err error) string {
	if missing := (*MissingError)(nil); errors.As(err, &missing) {
		return missing.Error()
	}
	if err != nil {
		t.Error(err)
	}
	return string(content)
}
