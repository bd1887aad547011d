package controlplane

import (
	"bytes"
	"crypto/x509"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// TestAuthoritySecret checks the content of the Secret after each step. A client that trusts only the old authority can verify
// certificates of the new one: the old authority has signed a certificate of the new one.
func TestAuthoritySecret(t *testing.T) {
	old, err := newAuthority(controlplanev1.CapstanControlPlaneSpec{}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	data := map[string][]byte{secret.TLSCrtDataName: old.Cert, secret.TLSKeyDataName: old.Key}
	if err := beginRotation(data, controlplanev1.CapstanControlPlaneSpec{}, time.Now()); err != nil {
		t.Fatal(err)
	}
	next := data[model.NextCertName]
	if !bytes.Equal(data[secret.TLSKeyDataName], old.Key) || !sameCerts(t, data[secret.TLSCrtDataName], old.Cert, next) {
		t.Error("the new authority already signs, or it is not trusted")
	}
	if err := signWithNext(data); err != nil {
		t.Fatal(err)
	}
	if !sameCerts(t, data[secret.TLSCrtDataName], next, old.Cert) || len(data[model.NextKeyName])+len(data[model.NextCertName]) > 0 || bytes.Equal(data[secret.TLSKeyDataName], old.Key) {
		t.Error("the new authority does not sign, or the old one is no longer trusted, or its key still exists")
	}
	pair := &certs.KeyPair{Cert: data[secret.TLSCrtDataName], Key: data[secret.TLSKeyDataName]}
	leafPEM, _ := leafOf(t, pair)
	verify := func(roots []byte, cross []byte) error {
		leaf, err := certs.DecodeCertPEM(leafPEM)
		if err != nil {
			t.Fatal(err)
		}
		options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
		options.Roots.AppendCertsFromPEM(roots)
		options.Intermediates.AppendCertsFromPEM(cross)
		_, err = leaf.Verify(options)
		return err
	}
	if err := verify(old.Cert, data[bootstrap.CrossCADataName]); err != nil {
		t.Errorf("verification with the old authority: %v", err)
	}
	if verify(old.Cert, nil) == nil {
		t.Error("the old authority has signed the certificate")
	}
	if err := dropOld(data); err != nil {
		t.Fatal(err)
	}
	if !sameCerts(t, data[secret.TLSCrtDataName], next) {
		t.Error("the old authority is still trusted")
	}
	for _, cross := range [][]byte{nil, data[bootstrap.CrossCADataName]} {
		if err := verify(data[secret.TLSCrtDataName], cross); err != nil {
			t.Errorf("verification with the new authority: %v", err)
		}
	}
}

// TestAuthorityOfClusterAPI: an authority with a path length of zero cannot sign another authority. It is rotated without this
// signature.
func TestAuthorityOfClusterAPI(t *testing.T) {
	old := newCA(t)
	data := map[string][]byte{secret.TLSCrtDataName: old.Cert, secret.TLSKeyDataName: old.Key, bootstrap.CrossCADataName: []byte("former")}
	if err := beginRotation(data, controlplanev1.CapstanControlPlaneSpec{}, time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := signWithNext(data); err != nil {
		t.Fatal(err)
	}
	if data[bootstrap.CrossCADataName] != nil {
		t.Error("the Secret contains a certificate of the new authority that the old one cannot have signed validly")
	}
}

func sameCerts(t *testing.T, bundle []byte, want ...[]byte) bool {
	t.Helper()
	has, err := nodeconfig.Fingerprints(bundle)
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := nodeconfig.Fingerprints(bytes.Join(want, nil))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Equal(has, wanted)
}
