package hostjoin

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestForeign: a host that joins gets only a Secret of its own, because it chooses the name.
func TestForeign(t *testing.T) {
	const name = "s3-credentials"
	hosts := []infrav1.CapstanHost{{ObjectMeta: metav1.ObjectMeta{Name: "s3"}}, {ObjectMeta: metav1.ObjectMeta{Name: "given"}}}
	hosts[1].Spec.CredentialsRef = infrav1.SecretReference{Namespace: "provider", Name: "given-credentials"}
	meta := func(name string, labelled bool, owners ...string) metav1.ObjectMeta {
		m := metav1.ObjectMeta{Namespace: "provider", Name: name}
		if labelled {
			m.Labels = map[string]string{infrav1.HostCredentialsLabel: ""}
		}
		for _, owner := range owners {
			kind, of, _ := strings.Cut(owner, " ")
			m.OwnerReferences = append(m.OwnerReferences, metav1.OwnerReference{Kind: kind, Name: of})
		}
		return m
	}
	for why, c := range map[string]struct {
		secret *corev1.Secret
		host   string
		want   bool
	}{
		"none":                       {nil, "s3", false},
		"of an earlier join":         {&corev1.Secret{ObjectMeta: meta(name, true, "CapstanHost s3"), Type: corev1.SecretTypeTLS}, "s3", false},
		"of an interrupted join":     {&corev1.Secret{ObjectMeta: meta(name, true), Type: corev1.SecretTypeTLS}, "s3", false},
		"that a CapstanHost names":   {&corev1.Secret{ObjectMeta: meta("given-credentials", false), Type: corev1.SecretTypeTLS}, "given", false},
		"a certificate of another":   {&corev1.Secret{ObjectMeta: meta(name, false), Type: corev1.SecretTypeTLS}, "s3", true},
		"another type":               {&corev1.Secret{ObjectMeta: meta(name, true), Type: corev1.SecretTypeOpaque}, "s3", true},
		"of another owner":           {&corev1.Secret{ObjectMeta: meta(name, true, "Certificate s3"), Type: corev1.SecretTypeTLS}, "s3", true},
		"of another host":            {&corev1.Secret{ObjectMeta: meta(name, true, "CapstanHost s3", "CapstanHost s4"), Type: corev1.SecretTypeTLS}, "s3", true},
		"that another host's refers": {&corev1.Secret{ObjectMeta: meta("given-credentials", false), Type: corev1.SecretTypeTLS}, "s3", true},
	} {
		if got := foreign(c.secret, c.host, hosts); (got != "") != c.want {
			t.Errorf("%s: %q", why, got)
		}
	}
}
