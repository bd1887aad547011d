// Package pki creates, encodes and checks keys, certificates, certificate requests and kubeconfigs. All of Capstan's
// certificates come from it. Package certfiles reads and writes the files.
//
// Layer: library. Allowed imports: api.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// Algorithm is the type and the size of a private key. The zero value is ECDSAP256.
type Algorithm string

// Algorithms, with the names of kubeadm.
const (
	ECDSAP256 Algorithm = "ECDSA-P256"
	ECDSAP384 Algorithm = "ECDSA-P384"
	RSA2048   Algorithm = "RSA-2048"
	RSA3072   Algorithm = "RSA-3072"
	RSA4096   Algorithm = "RSA-4096"
)

// NewKey creates a private key of this algorithm.
func (a Algorithm) NewKey() (crypto.Signer, error) {
	switch a {
	case "", ECDSAP256:
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case ECDSAP384:
		return ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case RSA2048:
		return rsa.GenerateKey(rand.Reader, 2048)
	case RSA3072:
		return rsa.GenerateKey(rand.Reader, 3072)
	case RSA4096:
		return rsa.GenerateKey(rand.Reader, 4096)
	}
	return nil, fmt.Errorf("unknown algorithm of private keys %q: expected ECDSA-P256, ECDSA-P384, RSA-2048, RSA-3072 or RSA-4096", string(a))
}

// NewKey creates a private key of the default algorithm.
func NewKey() (crypto.Signer, error) { return ECDSAP256.NewKey() }

// EncodeKey returns a private key as PEM.
func EncodeKey(key crypto.Signer) ([]byte, error) { return keyutil.MarshalPrivateKeyToPEM(key) }

// NewEncodedKey creates a private key of the default algorithm and returns it as PEM.
func NewEncodedKey() ([]byte, error) { return ECDSAP256.NewEncodedKey() }

// NewEncodedKey creates a private key of this algorithm and returns it as PEM.
func (a Algorithm) NewEncodedKey() ([]byte, error) {
	key, err := a.NewKey()
	if err != nil {
		return nil, err
	}
	return EncodeKey(key)
}

// ParseKey reads a private key in PEM.
func ParseKey(data []byte) (crypto.Signer, error) {
	if err := CheckKeySize(data); err != nil {
		return nil, err
	}
	key, err := keyutil.ParsePrivateKeyPEM(data)
	if err != nil {
		return nil, err
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("expected a private key that can sign, found %T", key)
	}
	return signer, nil
}

// EncodeCert returns a certificate as PEM. It needs only the certificate's Raw field.
func EncodeCert(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: c.Raw})
}

// ParseCert reads the first certificate of a PEM document.
func ParseCert(data []byte) (*x509.Certificate, error) {
	certs, err := cert.ParseCertsPEM(data)
	if err != nil {
		return nil, err
	}
	return certs[0], nil
}

// ReadCert reads the first certificate of a file.
func ReadCert(path string) (*x509.Certificate, error) {
	certs, err := cert.CertsFromFile(path)
	if err != nil {
		return nil, err
	}
	return certs[0], nil
}

// HasKey reports whether a certificate has this private key.
func HasKey(c *x509.Certificate, key crypto.Signer) bool {
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	return err == nil && bytes.Equal(public, c.RawSubjectPublicKeyInfo)
}

// NewRequest returns a certificate request (DER) for a leaf, signed by its key.
func NewRequest(leaf Leaf, key crypto.Signer) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: leaf.subject(), DNSNames: leaf.DNSNames, IPAddresses: leaf.IPs,
	}, key)
}

// EncodeRequest returns a certificate request as PEM.
func EncodeRequest(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateRequestBlockType, Bytes: der})
}

// ParseRequest reads a certificate request in DER. The key of the request must have signed it.
func ParseRequest(der []byte) (*x509.CertificateRequest, error) {
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("the request cannot be read: %w", err)
	}
	if err := checkPublic(request.PublicKey); err != nil {
		return nil, fmt.Errorf("the request is refused: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed by its own key: %w", err)
	}
	return request, nil
}

// DecodeRequest is ParseRequest for PEM.
func DecodeRequest(data []byte) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != cert.CertificateRequestBlockType {
		return nil, errors.New("the request is not a PEM certificate request")
	}
	return ParseRequest(block.Bytes)
}

// Kubeconfig describes a kubeconfig with one cluster, one user and one context.
type Kubeconfig struct {
	// Names of the three entries.
	ClusterName, UserName, ContextName string

	Cluster clientcmdapi.Cluster
	User    clientcmdapi.AuthInfo
}

// Encode returns the document.
func (k Kubeconfig) Encode() ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[k.ClusterName] = &k.Cluster
	config.AuthInfos[k.UserName] = &k.User
	config.Contexts[k.ContextName] = &clientcmdapi.Context{Cluster: k.ClusterName, AuthInfo: k.UserName}
	config.CurrentContext = k.ContextName
	return clientcmd.Write(*config)
}
