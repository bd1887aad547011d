// Package credentials implements mutual TLS between capstand and the managers. It creates the certificates of a host and of
// its clients, and reads them for capstand.
//
// Layer: contract. Allowed imports: api, library.
package credentials

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// DefaultValidity of certificates.
const DefaultValidity = 365 * 24 * time.Hour

// ClientName is the common name of the client certificates that Make creates.
const ClientName = "capstan-manager"

// Make creates the certificates of a host in a folder and returns credentials for its clients. The addresses are the IP
// addresses or names that clients dial, or the name of the CapstanHost if the host dials.
//
// The certificate authority (ca.crt, ca.key) is created once and kept. When called again, Make issues new certificates, and earlier ones
// stay valid until they expire. On a host that has joined, which has no key of its authority, Make returns an error and changes nothing.
// Any reader of the folder can use the host, so only root can read it.
func Make(dir string, addresses []string, validity time.Duration, now time.Time) (Client, error) {
	if len(addresses) == 0 || validity <= 0 {
		return Client{}, fmt.Errorf("expected at least one address and a positive validity, found %v and %s", addresses, validity)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return Client{}, err
	}
	if atomicfile.Exists(filepath.Join(dir, "ca.crt")) && !atomicfile.Exists(filepath.Join(dir, "ca.key")) {
		return Client{}, fmt.Errorf("expected a host that has not joined a management cluster, found in %s the authority of one without its key: for other certificates of the same management cluster, join again with a token of `capstan host token create --name NAME`; otherwise leave it first with `capstan host leave`", dir)
	}
	if err := certfiles.EnsureAuthority(dir, "ca", "capstand", now); err != nil {
		return Client{}, err
	}
	server := certfiles.Leaf{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: "capstand", Usages: pki.Server}}
	for _, a := range addresses {
		server.Leaf = server.For(a)
	}
	// Always issue a new certificate, because the validity shall start now.
	if err := atomicfile.Remove(filepath.Join(dir, "server.crt")); err != nil {
		return Client{}, err
	}
	if _, err := server.Ensure(dir, validity, now); err != nil {
		return Client{}, err
	}
	pair, err := certfiles.Leaf{Name: "client", CA: "ca", Leaf: pki.Leaf{CommonName: ClientName, Usages: pki.Client}}.Issue(dir, validity, now)
	if err != nil {
		return Client{}, err
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	return Client{CA: ca, Cert: pair, Key: pair}.split(), err
}

// split separates the certificate from the key.
func (c Client) split() Client {
	leaf, err := pki.ParseCert(c.Cert)
	if err != nil {
		panic(err) // The caller has just encoded it.
	}
	c.Cert = pki.EncodeCert(leaf)
	c.Key = c.Key[len(c.Cert):]
	return c
}

// Server names capstand's certificate files.
type Server struct {
	Cert, Key string
	// ClientCA is the certificate authority that must have signed the certificates of clients.
	ClientCA string
	// ClientName is a common name or DNS name that client certificates must have in addition, because an authority may have
	// signed other certificates than those of managers, and each client has root access to the host. The default is the
	// package's ClientName.
	ClientName string
}

// In returns the server files of a folder that Make created.
func In(dir string) Server {
	return Server{Cert: filepath.Join(dir, "server.crt"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.crt")}
}

// Config returns mutual TLS with the files for an application protocol. It reads the files at each handshake, so that certificates
// can be renewed without a restart. While they are unusable, for example half-written, the last good ones stay in use. It calls warn
// with the reason, and with the refusal of a client that the right authority has signed.
func (s Server) Config(protocol string, warn func(error)) (*tls.Config, error) {
	last, err := s.load(protocol, warn)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, getFiles)
	}
	var mu sync.Mutex
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			config, err := s.load(protocol, warn)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				warn(fmt.Errorf("the old certificates stay in use: %w", err))
				return last, nil
			}
			last = config
			return config, nil
		},
	}, nil
}

// getFiles is the advice for missing or unusable files.
const getFiles = "join a management cluster with `capstan host join`, or make them with `capstan host credentials`"

// read reads the certificate and the authority of clients.
func (s Server) read() (pair tls.Certificate, clients *x509.CertPool, err error) {
	if pair, err = tls.LoadX509KeyPair(s.Cert, s.Key); err != nil {
		return pair, nil, fmt.Errorf("expected a certificate in %s and its key in %s: %w", s.Cert, s.Key, err)
	}
	if clients, err = cert.NewPool(s.ClientCA); err != nil {
		return pair, nil, fmt.Errorf("expected the certificate authority of clients in %s: %w", s.ClientCA, err)
	}
	return pair, clients, nil
}

func (s Server) load(protocol string, warn func(error)) (*tls.Config, error) {
	pair, roots, err := s.read()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{protocol},
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    roots,
		VerifyConnection: func(state tls.ConnectionState) error {
			err := s.checkName(state.PeerCertificates[0])
			if err != nil {
				warn(err)
			}
			return err
		},
	}, nil
}

// checkName refuses clients whose certificate was signed for another purpose.
func (s Server) checkName(client *x509.Certificate) error {
	want := cmp.Or(s.ClientName, ClientName)
	if client.Subject.CommonName == want || slices.Contains(client.DNSNames, want) {
		return nil
	}
	return fmt.Errorf("refused a client: expected a certificate with the common name or DNS name %q, found %q and %q; issue such a certificate, or set another name with --client-name",
		want, client.Subject.CommonName, client.DNSNames)
}
