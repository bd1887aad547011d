package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"time"
)

const (
	// Backdate is the time by which the validity of certificates starts in the past, because the clocks of machines
	// differ.
	Backdate = 5 * time.Minute
	// AuthorityValidity is the default validity of authorities.
	AuthorityValidity = 3650 * 24 * time.Hour
)

// Usages of leaves.
var (
	Client = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	Server = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	Both   = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
)

// Leaf describes a certificate that cannot sign others.
type Leaf struct {
	CommonName   string
	Organization []string
	DNSNames     []string
	IPs          []net.IP
	Usages       []x509.ExtKeyUsage
	// Algorithm of the key that Issue creates.
	Algorithm Algorithm
}

// For adds the name of a server: an IP address or a DNS name.
func (l Leaf) For(name string) Leaf {
	if ip := net.ParseIP(name); ip != nil {
		l.IPs = append(l.IPs, ip)
	} else {
		l.DNSNames = append(l.DNSNames, name)
	}
	return l
}

func (l Leaf) subject() pkix.Name {
	return pkix.Name{CommonName: l.CommonName, Organization: l.Organization}
}

// Authority is a certificate authority with its private key.
type Authority struct {
	Cert *x509.Certificate
	Key  crypto.Signer
}

// NewAuthority creates the certificate of an authority with this key and the default validity. It may sign other authorities.
func NewAuthority(commonName string, key crypto.Signer, now time.Time) (Authority, error) {
	return NewAuthorityFor(commonName, key, AuthorityValidity, now)
}

// NewAuthorityFor is NewAuthority with another validity.
func NewAuthorityFor(commonName string, key crypto.Signer, validity time.Duration, now time.Time) (Authority, error) {
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: commonName},
		NotBefore: now.Add(-Backdate), NotAfter: now.Add(validity),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageCertSign,
		BasicConstraintsValid: true, IsCA: true, MaxPathLen: -1,
	}
	made, err := create(template, template, key.Public(), key)
	return Authority{made, key}, err
}

// ParseAuthority reads an authority from PEM. The first certificate is the signing one.
func ParseAuthority(certPEM, keyPEM []byte) (Authority, error) {
	c, err := ParseCert(certPEM)
	if err != nil {
		return Authority{}, fmt.Errorf("the certificate: %w", err)
	}
	key, err := ParseKey(keyPEM)
	if err != nil {
		return Authority{}, fmt.Errorf("the private key: %w", err)
	}
	return Authority{c, key}, nil
}

// Sign creates the certificate of a leaf for a public key. It ends after validity, with the authority, or after the
// longest lifetime of this build, whichever is first.
func (a Authority) Sign(l Leaf, public crypto.PublicKey, validity time.Duration, now time.Time) (*x509.Certificate, error) {
	notAfter := now.Add(Life(validity))
	if notAfter.After(a.Cert.NotAfter) {
		notAfter = a.Cert.NotAfter
	}
	return create(&x509.Certificate{
		Subject:               l.subject(),
		DNSNames:              l.DNSNames,
		IPAddresses:           l.IPs,
		NotBefore:             now.Add(-Backdate),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           l.Usages,
		BasicConstraintsValid: true,
	}, a.Cert, public, a.Key)
}

// Issue creates a key and the certificate of a leaf for it.
func (a Authority) Issue(l Leaf, validity time.Duration, now time.Time) (*x509.Certificate, crypto.Signer, error) {
	key, err := l.Algorithm.NewKey()
	if err != nil {
		return nil, nil, err
	}
	made, err := a.Sign(l, key.Public(), validity, now)
	return made, key, err
}

// SignAuthority creates a certificate with the name and the key of another authority. Clients that trust only this
// authority can verify the leaves of the other one with it.
func (a Authority) SignAuthority(other *x509.Certificate) (*x509.Certificate, error) {
	template := *other
	if template.NotAfter.After(a.Cert.NotAfter) {
		template.NotAfter = a.Cert.NotAfter
	}
	template.AuthorityKeyId = nil // CreateCertificate sets the key id of this authority.
	return create(&template, a.Cert, other.PublicKey, a.Key)
}

func create(template, parent *x509.Certificate, public crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	var err error
	// RFC 5280 allows at most 20 octets and no negative number.
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
