// Package credentials is mutual TLS between capstand and the managers: it makes the certificates of a host and
// of those who use it, and reads them on capstand's side.
//
// Layer: contract.
package credentials

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// DefaultValidity of certificates.
const DefaultValidity = 365 * 24 * time.Hour

// ClientName is the common name of the certificates that Make gives to clients.
const ClientName = "capstan-manager"

// Make makes the certificates of a host in a folder and returns credentials for its clients. The addresses, IP
// addresses or names, are those that clients dial.
//
// The authority (ca.crt, ca.key) is made once and kept: called again, Make issues new certificates, and those that are
// out go on until they expire. Whoever has the folder can use the host: it is root's.
func Make(dir string, addresses []string, validity time.Duration, now time.Time) (Client, error) {
	if len(addresses) == 0 || validity <= 0 {
		return Client{}, fmt.Errorf("wanted an address and a validity, found %v and %s", addresses, validity)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return Client{}, err
	}
	if err := certfiles.EnsureAuthority(dir, "ca", "capstand", now); err != nil {
		return Client{}, err
	}
	server := certfiles.Leaf{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: "capstand", Usages: pki.Server}}
	for _, a := range addresses {
		if ip := net.ParseIP(a); ip != nil {
			server.IPs = append(server.IPs, ip)
		} else {
			server.DNSNames = append(server.DNSNames, a)
		}
	}
	// A new one in any case: whoever calls wants the time to start over.
	if err := os.Remove(filepath.Join(dir, "server.crt")); err != nil && !errors.Is(err, fs.ErrNotExist) {
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

// split parts the certificate from the key.
func (c Client) split() Client {
	leaf, err := pki.ParseCert(c.Cert)
	if err != nil {
		panic(err) // it was encoded a moment ago
	}
	c.Cert = pki.EncodeCert(leaf)
	c.Key = c.Key[len(c.Cert):]
	return c
}

// Server names the files of capstand's side.
type Server struct {
	Cert, Key string
	// ClientCA is the authority of the certificates that clients must have.
	ClientCA string
	// ClientName is the common name, or a DNS name, that they must have beside: an authority may have signed more than the
	// certificates of managers, and who may use capstand is root on its host. The package's ClientName if empty.
	ClientName string
}

// In is the server of a folder that Make made.
func In(dir string) Server {
	return Server{Cert: filepath.Join(dir, "server.crt"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.crt")}
}

// Transport is mutual TLS with the files as they are at each handshake, so that certificates can be renewed without a
// restart. Files that are unusable later, half-written for example, leave the last good ones in use. Warn is
// told why, and what is wrong with a client of the right authority.
func (s Server) Transport(warn func(error)) (credentials.TransportCredentials, error) {
	last, err := s.load(warn)
	if err != nil {
		return nil, fmt.Errorf("%w: make them with `capstan host credentials`", err)
	}
	var mu sync.Mutex
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			config, err := s.load(warn)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				warn(fmt.Errorf("the old certificates stay in use: %w", err))
				return last, nil
			}
			last = config
			return config, nil
		},
	}), nil
}

func (s Server) load(warn func(error)) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
	if err != nil {
		return nil, fmt.Errorf("wanted a certificate in %s and its key in %s: %w", s.Cert, s.Key, err)
	}
	roots, err := cert.NewPool(s.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("wanted the authority of clients in %s: %w", s.ClientCA, err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{"h2"},
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

// checkName refuses clients that the authority has signed for something else.
func (s Server) checkName(client *x509.Certificate) error {
	want := cmp.Or(s.ClientName, ClientName)
	if client.Subject.CommonName == want || slices.Contains(client.DNSNames, want) {
		return nil
	}
	return fmt.Errorf("refused a client: wanted a certificate with the common name or DNS name %q, found %q and %q; give it one, or name another with --client-name",
		want, client.Subject.CommonName, client.DNSNames)
}
