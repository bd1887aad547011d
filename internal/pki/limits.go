package pki

import (
	"crypto"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"

	"k8s.io/client-go/util/cert"
)

// Tenants provide keys and certificates. The time to check or to use an RSA key grows much faster than its size: the check of a signature
// with a key of 24 KB takes seconds, and nothing can interrupt it.

const (
	// maxRSABits is the limit of TLS in Go.
	maxRSABits = 8192
	// maxKeyBytes is the maximum size of a private key in PEM. One with maxRSABits has 6.4 KiB.
	maxKeyBytes = 8 << 10
)

// CheckKeySize returns an error for a private key in PEM that takes too long to read.
func CheckKeySize(key []byte) error {
	if len(key) > maxKeyBytes {
		return fmt.Errorf("expected a private key of at most %d bytes, found %d", maxKeyBytes, len(key))
	}
	return nil
}

// KeyPair reads a certificate and its key in PEM.
func KeyPair(certificate, key []byte) (tls.Certificate, error) {
	if err := CheckKeySize(key); err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(certificate, key)
}

// CheckAuthorities returns an error for a certificate in PEM with a key that takes too long to verify a signature. A pool of authorities
// ignores other content, and so does this function.
func CheckAuthorities(data []byte) error {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != cert.CertificateBlockType {
			continue
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil {
			if err := checkPublic(c.PublicKey); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkPublic(key crypto.PublicKey) error {
	if k, ok := key.(*rsa.PublicKey); ok && k.N.BitLen() > maxRSABits {
		return fmt.Errorf("expected an RSA key of at most %d bits, found %d", maxRSABits, k.N.BitLen())
	}
	return nil
}
