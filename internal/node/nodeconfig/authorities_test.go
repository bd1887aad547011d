package nodeconfig

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"testing"

	"k8s.io/client-go/util/cert"
)

// authority creates a certificate authority with a key.
func authority(t *testing.T, key crypto.Signer) *x509.Certificate {
	t.Helper()
	made, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "ca"}, key)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func ecdsaKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// TestVerifyAuthorities: a bundle is accepted only with a trusted authority's signature for this challenge.
func TestVerifyAuthorities(t *testing.T) {
	key, stranger := ecdsaKey(t), ecdsaKey(t)
	trusted := []*x509.Certificate{authority(t, ecdsaKey(t)), authority(t, key)}
	sign := func(key crypto.Signer, bundle, challenge string) string {
		signature, err := SignAuthorities(key, []byte(bundle), challenge)
		if err != nil {
			t.Fatal(err)
		}
		return signature
	}
	good := sign(key, "bundle", "challenge")
	for name, c := range map[string]struct {
		bundle, challenge, signature string
		accepted                     bool
	}{
		"signed":                              {"bundle", "challenge", good, true},
		"unsigned":                            {"bundle", "challenge", "", false},
		"signed by a stranger":                {"bundle", "challenge", sign(stranger, "bundle", "challenge"), false},
		"another bundle":                      {"bundle and more", "challenge", good, false},
		"another challenge":                   {"bundle", "another", good, false},
		"nonsense":                            {"bundle", "challenge", "%", false},
		"part of the bundle in the challenge": {"evil\nbundle", "challenge", sign(key, "bundle", "challenge\nevil"), false},
		"part of the challenge in the bundle": {"lenge\nbundle", "chal", good, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := VerifyAuthorities(trusted, []byte(c.bundle), c.challenge, c.signature); (err == nil) != c.accepted {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestSignAuthorities: the user's authority can have any type of key.
func TestSignAuthorities(t *testing.T) {
	ofRSA, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	_, ofEd25519, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]crypto.Signer{"RSA": ofRSA, "ECDSA": ecdsaKey(t), "Ed25519": ofEd25519} {
		t.Run(name, func(t *testing.T) {
			signature, err := SignAuthorities(key, []byte("bundle"), "challenge")
			if err != nil {
				t.Fatal(err)
			}
			if err := VerifyAuthorities([]*x509.Certificate{authority(t, key)}, []byte("bundle"), "challenge", signature); err != nil {
				t.Error(err)
			}
		})
	}
}
