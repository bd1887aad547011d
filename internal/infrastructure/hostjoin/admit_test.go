package hostjoin

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/pki"
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

// TestJoinsAgainDuringRotation: a host trusts only the authority that it gets at its join. That authority has to sign the certificate of the
// managers, at each step of a rotation.
func TestJoinsAgainDuringRotation(t *testing.T) {
	now := time.Now()
	first, _, err := nextCredentials(nil, time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	rotated, err1 := first.WithAuthority(now)
	renewed, err2 := rotated.WithClient(now)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for step, c := range map[string]struct {
		before  credentials.Managed
		changed bool
	}{"no rotation": {first, false}, "another authority": {rotated, true}, "another certificate of the managers": {renewed, true}} {
		after, changed, err := nextCredentials(&corev1.Secret{Data: c.before.Data()}, time.Hour, now)
		if err != nil || changed != c.changed {
			t.Errorf("%s: changed is %t, %v", step, changed, err)
			continue
		}
		if !bytes.Equal(after.CA, pki.EncodeCert(c.before.Authority.Cert)) {
			t.Errorf("%s: the managers do not trust exactly the authority of the host", step)
		}
		if err := after.Certificate().CheckSignatureFrom(c.before.Authority.Cert); err != nil {
			t.Errorf("%s: the host refuses the managers: %v", step, err)
		}
	}
	if after, changed, err := nextCredentials(&corev1.Secret{Data: first.Data()}, time.Hour, now.Add(2*time.Hour)); err != nil || !changed || bytes.Equal(after.CA, first.CA) {
		t.Errorf("after the expiry: %v, %v", changed, err)
	}
}

// A host that joins again gets what its user has set, and keeps the rest.
func TestRejoin(t *testing.T) {
	ref := infrav1.SecretReference{Namespace: "provider", Name: "rack-1-credentials"}
	before := infrav1.CapstanHostSpec{Address: "10.0.0.4:7443", TunnelAddress: "10.0.0.4", FailureDomain: "row-1"}
	spec := func(tunnel, domain string) infrav1.CapstanHostSpec {
		return infrav1.CapstanHostSpec{Address: properties.Address, CredentialsRef: ref, TunnelAddress: tunnel, FailureDomain: domain}
	}
	for name, test := range map[string]struct {
		tunnel string
		set    bool
		domain string
		want   infrav1.CapstanHostSpec
	}{
		"defaults":          {"10.0.0.5", false, "", spec("10.0.0.4", "row-1")},
		"a tunnel address":  {"10.0.0.5", true, "", spec("10.0.0.5", "row-1")},
		"no tunnel address": {"", true, "", spec("", "row-1")},
		"a failure domain":  {"10.0.0.5", false, "row-2", spec("10.0.0.4", "row-2")},
	} {
		j, got := joiner{Request: properties}, before
		j.TunnelAddress, j.TunnelSet, j.FailureDomain = test.tunnel, test.set, test.domain
		if rejoin(&got, j, ref); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
