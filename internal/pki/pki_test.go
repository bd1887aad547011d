package pki

import (
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"testing"
	"time"
)

// A certificate is valid from its start to its end. A clock that is ahead creates certificates that are not yet valid.
func TestValidAt(t *testing.T) {
	begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(time.Hour)}
	for after, want := range map[time.Duration]bool{-time.Second: false, 0: true, time.Minute: true, time.Hour: false} {
		if got := ValidAt(c, begin.Add(after)); got != want {
			t.Errorf("%s after its start: %v", after, got)
		}
	}
}

func TestAlgorithm(t *testing.T) {
	for algorithm, want := range map[Algorithm]string{
		"": "ECDSA 256", ECDSAP256: "ECDSA 256", ECDSAP384: "ECDSA 384", RSA2048: "RSA 2048", RSA3072: "RSA 3072", RSA4096: "RSA 4096", "DSA": "error",
	} {
		t.Run(string(algorithm), func(t *testing.T) {
			got := "error"
			key, err := algorithm.NewKey()
			switch key := key.(type) {
			case *ecdsa.PrivateKey:
				got = fmt.Sprint("ECDSA ", key.Params().BitSize)
			case *rsa.PrivateKey:
				got = fmt.Sprint("RSA ", key.N.BitLen())
			}
			if got != want || (err == nil) != (want != "error") {
				t.Errorf("got %s, %v, want %s", got, err, want)
			}
			if err != nil {
				return
			}
			data, err := EncodeKey(key)
			if err != nil {
				t.Fatal(err)
			}
			again, err := ParseKey(data)
			if err != nil {
				t.Fatal(err)
			}
			if made, err := NewAuthority("ca", key, time.Now()); err != nil || !HasKey(made.Cert, again) {
				t.Errorf("another key was read from PEM: %v", err)
			}
		})
	}
}
