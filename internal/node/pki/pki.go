// Package pki makes the leaf certificates of a machine from the cluster's CAs.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"capstan.dev/capstan/internal/atomicfile"
)

// Leaf is a certificate that a machine makes for itself.
type Leaf struct {
	// Name is the path below the PKI folder, without .crt and .key.
	Name string
	// CA is the path of its authority, likewise.
	CA           string
	CommonName   string
	Organization []string
	DNSNames     []string
	IPs          []net.IP
	Usages       []x509.ExtKeyUsage
}

// Usages of leaves.
var (
	Client = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	Server = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	Both   = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
)

// clockSkew is how far a certificate is valid into the past.
const clockSkew = 5 * time.Minute

// Ensure makes the certificate, if there is none that is what the leaf says, comes from the CA of
// today, is valid already (a clock that was ahead makes some that are not) and has more than a third of its validity
// before it. The key stays the same, so that the
// one file that changes can be replaced while servers read it anew at each handshake. It returns
// when the certificate is to be renewed.
func (l Leaf) Ensure(dir string, validity time.Duration, now time.Time) (renew time.Time, err error) {
	ca, caKey, err := loadCA(dir, l.CA)
	if err != nil {
		return time.Time{}, err
	}
	certPath, keyPath := filepath.Join(dir, l.Name+".crt"), filepath.Join(dir, l.Name+".key")
	key, err := EnsureKey(keyPath)
	if err != nil {
		return time.Time{}, err
	}
	if old, err := readCert(certPath); err == nil && l.satisfiedBy(old, ca, key) && ValidAt(old, now) && now.Before(RenewAt(old)) {
		return RenewAt(old), nil
	}
	made, err := l.sign(ca, caKey, key.Public(), validity, now)
	if err != nil {
		return time.Time{}, fmt.Errorf("signing %s: %w", l.Name, err)
	}
	if err := WriteFile(certPath, append(EncodeCert(made), chain(dir, l.CA, ca)...)); err != nil {
		return time.Time{}, err
	}
	return RenewAt(made), nil
}

// chain is what follows a leaf: after a rotation its authority, signed by the one before, so that who only
// trusts that one can still verify the leaf. Nothing before the first rotation.
func chain(dir, name string, ca *x509.Certificate) []byte {
	cross, err := readCert(filepath.Join(dir, filepath.Dir(name), "cross-"+filepath.Base(name)+".crt"))
	if err != nil || !bytes.Equal(cross.RawSubjectPublicKeyInfo, ca.RawSubjectPublicKeyInfo) {
		return nil
	}
	return EncodeCert(cross)
}

// RenewAt is when two thirds of a certificate's validity are over.
func RenewAt(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) * 2 / 3)
}

// Validity is how long a certificate that this package made was to be valid, without the time before it was made.
func Validity(c *x509.Certificate) time.Duration {
	return max(time.Minute, c.NotAfter.Sub(c.NotBefore)-clockSkew)
}

// ValidAt says whether a certificate is valid already, and still.
func ValidAt(c *x509.Certificate, now time.Time) bool {
	return !now.Before(c.NotBefore) && now.Before(c.NotAfter)
}

func (l Leaf) satisfiedBy(c, ca *x509.Certificate, key crypto.Signer) bool {
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil || !bytes.Equal(public, c.RawSubjectPublicKeyInfo) || c.CheckSignatureFrom(ca) != nil {
		return false
	}
	return c.Subject.CommonName == l.CommonName && sameSet(c.Subject.Organization, l.Organization) &&
		sameSet(c.DNSNames, l.DNSNames) && sameSet(ipStrings(c.IPAddresses), ipStrings(l.IPs)) &&
		slices.Equal(c.ExtKeyUsage, l.Usages)
}

func (l Leaf) sign(ca *x509.Certificate, caKey crypto.Signer, public crypto.PublicKey, validity time.Duration, now time.Time) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, err
	}
	notAfter := now.Add(validity)
	if notAfter.After(ca.NotAfter) {
		notAfter = ca.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: l.CommonName, Organization: l.Organization},
		DNSNames:              l.DNSNames,
		IPAddresses:           l.IPs,
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           l.Usages,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, public, caKey)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Issue makes a key and a certificate in one PEM document, as the kubelet keeps its own.
func (l Leaf) Issue(dir string, validity time.Duration, now time.Time) ([]byte, error) {
	ca, caKey, err := loadCA(dir, l.CA)
	if err != nil {
		return nil, err
	}
	keyPEM, key, err := newKey()
	if err != nil {
		return nil, err
	}
	made, err := l.sign(ca, caKey, key.Public(), validity, now)
	if err != nil {
		return nil, fmt.Errorf("signing %s: %w", l.Name, err)
	}
	return append(EncodeCert(made), keyPEM...), nil
}

// IssueFor signs a certificate for a key that somebody else holds.
func (l Leaf) IssueFor(public crypto.PublicKey, dir string, validity time.Duration, now time.Time) (*x509.Certificate, error) {
	ca, caKey, err := loadCA(dir, l.CA)
	if err != nil {
		return nil, err
	}
	return l.sign(ca, caKey, public, validity, now)
}

// EnsureKey reads the private key, or makes a P-256 one.
func EnsureKey(path string) (crypto.Signer, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		keyPEM, key, err := newKey()
		if err != nil {
			return nil, err
		}
		return key, WriteFile(path, keyPEM)
	}
	if err != nil {
		return nil, err
	}
	return parseKey(path, data)
}

func newKey() ([]byte, crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	data, err := keyutil.MarshalPrivateKeyToPEM(key)
	return data, key, err
}

func parseKey(path string, data []byte) (crypto.Signer, error) {
	key, err := keyutil.ParsePrivateKeyPEM(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: want a private key that can sign, found %T", path, key)
	}
	return signer, nil
}

func loadCA(dir, name string) (*x509.Certificate, crypto.Signer, error) {
	ca, err := readCert(filepath.Join(dir, name+".crt"))
	if err != nil {
		return nil, nil, fmt.Errorf("the CA that the bootstrap data writes: %w", err)
	}
	path := filepath.Join(dir, name+".key")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("the CA's key that the bootstrap data writes: %w", err)
	}
	key, err := parseKey(path, data)
	return ca, key, err
}

func readCert(path string) (*x509.Certificate, error) {
	certs, err := cert.CertsFromFile(path)
	if err != nil {
		return nil, err
	}
	return certs[0], nil
}

// EncodeCert is the certificate as PEM.
func EncodeCert(c *x509.Certificate) []byte {
	data, err := cert.EncodeCertificates(c)
	if err != nil {
		panic(err) // only an encoder that cannot write to memory fails
	}
	return data
}

// WriteFile writes a file whole or not at all, and returns when it is on the disk: the bootstrap's record vouches for
// it. Everybody can read a certificate (.crt); any other file has mode 0600. Folders on the way get 0755.
func WriteFile(path string, data []byte) error {
	mode := fs.FileMode(0o600)
	if filepath.Ext(path) == ".crt" {
		mode = 0o644
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return os.Chmod(path, mode)
	}
	return atomicfile.WriteFile(path, data, mode)
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func ipStrings(ips []net.IP) []string {
	out := make([]string, len(ips))
	for i, ip := range ips {
		out[i] = ip.String()
	}
	return out
}
