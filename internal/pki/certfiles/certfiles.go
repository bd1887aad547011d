// Package certfiles stores certificates, their keys and other secrets in the files of a folder.
//
// Layer: library. Allowed imports: api.
package certfiles

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/pki"
)

// Leaf is a certificate in a folder that also contains its authority.
type Leaf struct {
	// Name is the path of the certificate and the key below the folder, without .crt and .key.
	Name string
	// CA is the path of the authority, in the same form.
	CA string
	pki.Leaf
}

// Ensure creates the certificate, unless an existing one has the content of the leaf, is signed by the current
// authority, is valid, and has more than a third of its lifetime left. A clock that was ahead creates certificates that
// are not yet valid. The key stays the same, so that only one file changes. Servers read it at each handshake. Ensure
// returns the time of the next renewal. A key that exists keeps its algorithm.
func (l Leaf) Ensure(dir string, validity time.Duration, now time.Time) (renew time.Time, err error) {
	ca, err := loadCA(dir, l.CA)
	if err != nil {
		return time.Time{}, err
	}
	certPath, keyPath := filepath.Join(dir, l.Name+".crt"), filepath.Join(dir, l.Name+".key")
	key, err := ensureKey(keyPath, l.Algorithm)
	if err != nil {
		return time.Time{}, err
	}
	if old, err := pki.ReadCert(certPath); err == nil && l.satisfiedBy(old, ca.Cert, key) && pki.ValidAt(old, now) && now.Before(pki.RenewAt(old)) {
		return pki.RenewAt(old), nil
	}
	made, err := ca.Sign(l.Leaf, key.Public(), validity, now)
	if err != nil {
		return time.Time{}, fmt.Errorf("signing %s: %w", l.Name, err)
	}
	if err := WriteFile(certPath, append(pki.EncodeCert(made), chain(dir, l.CA, ca.Cert)...)); err != nil {
		return time.Time{}, err
	}
	return pki.RenewAt(made), nil
}

// chain returns the certificates after the leaf in its file. After a rotation, this is the authority, signed by the
// previous one, so that clients that trust only the previous one can verify the leaf. Before the first rotation it is
// empty.
func chain(dir, name string, ca *x509.Certificate) []byte {
	cross, err := pki.ReadCert(filepath.Join(dir, filepath.Dir(name), "cross-"+filepath.Base(name)+".crt"))
	if err != nil || !bytes.Equal(cross.RawSubjectPublicKeyInfo, ca.RawSubjectPublicKeyInfo) {
		return nil
	}
	return pki.EncodeCert(cross)
}

func (l Leaf) satisfiedBy(c, ca *x509.Certificate, key crypto.Signer) bool {
	return pki.HasKey(c, key) && c.CheckSignatureFrom(ca) == nil &&
		c.Subject.CommonName == l.CommonName && sameSet(c.Subject.Organization, l.Organization) &&
		sameSet(c.DNSNames, l.DNSNames) && sameSet(ipStrings(c.IPAddresses), ipStrings(l.IPs)) &&
		slices.Equal(c.ExtKeyUsage, l.Usages)
}

// Issue creates a key and a certificate in one PEM document, in the format of the kubelet.
func (l Leaf) Issue(dir string, validity time.Duration, now time.Time) ([]byte, error) {
	ca, err := loadCA(dir, l.CA)
	if err != nil {
		return nil, err
	}
	made, key, err := ca.Issue(l.Leaf, validity, now)
	if err != nil {
		return nil, fmt.Errorf("signing %s: %w", l.Name, err)
	}
	keyPEM, err := pki.EncodeKey(key)
	return append(pki.EncodeCert(made), keyPEM...), err
}

// IssueFor signs a certificate for a key that another process holds.
func (l Leaf) IssueFor(public crypto.PublicKey, dir string, validity time.Duration, now time.Time) (*x509.Certificate, error) {
	ca, err := loadCA(dir, l.CA)
	if err != nil {
		return nil, err
	}
	return ca.Sign(l.Leaf, public, validity, now)
}

// EnsureKey reads the private key, or creates one of the default algorithm.
func EnsureKey(path string) (crypto.Signer, error) { return ensureKey(path, "") }

func ensureKey(path string, algorithm pki.Algorithm) (crypto.Signer, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if data, err = algorithm.NewEncodedKey(); err == nil {
			err = WriteFile(path, data)
		}
	}
	if err != nil {
		return nil, err
	}
	key, err := pki.ParseKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return key, nil
}

// EnsureAuthority creates the certificate (name.crt) and the key (name.key) of an authority, unless the certificate
// exists. It writes the key first, because a certificate without its key would be kept and could not sign.
func EnsureAuthority(dir, name, commonName string, now time.Time) error {
	certPath := filepath.Join(dir, name+".crt")
	if _, err := os.Stat(certPath); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	key, err := EnsureKey(filepath.Join(dir, name+".key"))
	if err != nil {
		return err
	}
	ca, err := pki.NewAuthority(commonName, key, now)
	if err != nil {
		return err
	}
	return WriteFile(certPath, pki.EncodeCert(ca.Cert))
}

func loadCA(dir, name string) (pki.Authority, error) {
	ca, err := pki.ReadCert(filepath.Join(dir, name+".crt"))
	if err != nil {
		return pki.Authority{}, fmt.Errorf("the CA that the bootstrap data writes: %w", err)
	}
	path := filepath.Join(dir, name+".key")
	data, err := os.ReadFile(path)
	if err != nil {
		return pki.Authority{}, fmt.Errorf("the CA's key that the bootstrap data writes: %w", err)
	}
	key, err := pki.ParseKey(data)
	if err != nil {
		return pki.Authority{}, fmt.Errorf("%s: %w", path, err)
	}
	return pki.Authority{Cert: ca, Key: key}, nil
}

// WriteFile replaces a file atomically, and returns when it is on the disk, because the record of the bootstrap depends
// on that. All users can read a certificate (.crt). Other files have mode 0600. New folders have mode 0755.
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
