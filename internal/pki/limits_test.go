package pki

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"
)

// hugeKey is an RSA public key of 24 KB. A check of a signature with it takes seconds.
func hugeKey() *rsa.PublicKey {
	n := new(big.Int).Lsh(big.NewInt(1), 200_000)
	return &rsa.PublicKey{N: n.SetBit(n, 0, 1), E: 1<<31 - 1}
}

// A request with a huge key is refused before its signature is checked.
func TestHugeRequest(t *testing.T) {
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := NewRequest(Leaf{CommonName: "a"}, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseRequest(der); err != nil {
		t.Error(err)
	}
	if _, err := ParseRequest(hugeRequest(t, der)); err == nil || !strings.Contains(err.Error(), "at most 8192 bits, found 200001") {
		t.Errorf("found %v, expected a refusal of the size", err)
	}
}

// hugeRequest returns a request with a huge key and a signature of its size.
func hugeRequest(t *testing.T, der []byte) []byte {
	t.Helper()
	public, err := x509.MarshalPKIXPublicKey(hugeKey())
	if err != nil {
		t.Fatal(err)
	}
	type info struct {
		Version    int
		Subject    asn1.RawValue
		PublicKey  asn1.RawValue
		Attributes asn1.RawValue
	}
	var whole struct {
		Info      info
		Algorithm pkix.AlgorithmIdentifier
		Signature asn1.BitString
	}
	if _, err := asn1.Unmarshal(der, &whole); err != nil {
		t.Fatal(err)
	}
	whole.Info.PublicKey = asn1.RawValue{FullBytes: public}
	whole.Algorithm = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, Parameters: asn1.NullRawValue}
	whole.Signature = asn1.BitString{Bytes: make([]byte, hugeKey().Size()), BitLength: 8 * hugeKey().Size()}
	out, err := asn1.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// An authority with a huge key is refused, wherever it is among others.
func TestHugeAuthority(t *testing.T) {
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	small, err := NewAuthority("small", key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, SubjectKeyId: []byte{1}}
	der, err := x509.CreateCertificate(rand.Reader, template, small.Cert, hugeKey(), small.Key)
	if err != nil {
		t.Fatal(err)
	}
	good, huge := EncodeCert(small.Cert), EncodeCert(&x509.Certificate{Raw: der})
	unread := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})
	for name, tc := range map[string]struct {
		parts   [][]byte
		refused bool
	}{
		"none":        {},
		"a small one": {parts: [][]byte{good}},
		"other parts": {parts: [][]byte{[]byte("text\n"), unread, good}},
		"a huge one":  {parts: [][]byte{huge}, refused: true},
		"the last":    {parts: [][]byte{[]byte("text\n"), unread, good, huge}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			var data []byte
			for _, part := range tc.parts {
				data = append(data, part...)
			}
			if err := CheckAuthorities(data); (err != nil) != tc.refused {
				t.Errorf("found %v, expected an error: %v", err, tc.refused)
			}
		})
	}
}

// A private key that is too large is not read. Its size is checked as text, because the check of the numbers takes long.
func TestHugePrivateKey(t *testing.T) {
	huge := make([]byte, maxKeyBytes+1)
	if _, err := ParseKey(huge); err == nil || !strings.Contains(err.Error(), "at most 8192 bytes") {
		t.Errorf("ParseKey: %v", err)
	}
	if _, err := KeyPair(nil, huge); err == nil || !strings.Contains(err.Error(), "at most 8192 bytes") {
		t.Errorf("KeyPair: %v", err)
	}
}
