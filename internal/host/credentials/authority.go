package credentials

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// authorityKey is the key of the authority's private key in the Secret of a host that joined with `capstan host join`. The
// Secret of another host does not have it: such a host keeps its authority to itself.
const authorityKey = "ca.key"

// Managed are the credentials of a host that joined, and its authority. The first certificate of CA is that of the authority.
type Managed struct {
	Client
	Authority pki.Authority
}

// NewAuthority creates the authority of a host, and the certificate of its managers.
func NewAuthority(validity time.Duration, now time.Time) (Managed, error) {
	key, err := pki.NewKey()
	if err != nil {
		return Managed{}, err
	}
	authority, err := pki.NewAuthority("capstand", key, now)
	if err != nil {
		return Managed{}, err
	}
	return Managed{Client: Client{CA: pki.EncodeCert(authority.Cert)}, Authority: authority}.withClient(validity, now)
}

// withClient returns the credentials with a new key and certificate of the managers.
func (m Managed) withClient(validity time.Duration, now time.Time) (Managed, error) {
	made, key, err := m.Authority.Issue(pki.Leaf{CommonName: ClientName, Usages: pki.Client}, validity, now)
	if err != nil {
		return Managed{}, err
	}
	m.Cert = pki.EncodeCert(made)
	m.Key, err = pki.EncodeKey(key)
	return m, err
}

// AuthorityFromSecret reads the data of the Secret of a host that joined. For another host, the error is ErrNoAuthority.
func AuthorityFromSecret(data map[string][]byte) (Managed, error) {
	if len(data[authorityKey]) == 0 {
		return Managed{}, ErrNoAuthority
	}
	c, err := FromSecret(data)
	if err != nil {
		return Managed{}, err
	}
	authority, err := pki.ParseAuthority(c.CA, data[authorityKey])
	if err != nil {
		return Managed{}, err
	}
	if !pki.HasKey(authority.Cert, authority.Key) {
		return Managed{}, fmt.Errorf("%s and %s are not a key pair", caKey, authorityKey)
	}
	return Managed{Client: c, Authority: authority}, nil
}

// Data returns the data of a Secret that AuthorityFromSecret reads.
func (m Managed) Data() map[string][]byte {
	data := m.Client.Data()
	if key, err := pki.EncodeKey(m.Authority.Key); err == nil {
		data[authorityKey] = key
	}
	return data
}

// Usable reports whether the credentials are valid and belong together.
func (m Managed) Usable(now time.Time) bool {
	_, err := m.config(now)
	c := m.Certificate()
	return err == nil && c != nil && pki.ValidAt(c, now) && pki.ValidAt(m.Authority.Cert, now) && trusted(m.CA, c, x509.ExtKeyUsageClientAuth, now) == nil
}

// trusted returns nil if one of the authorities has signed the certificate for this usage.
func trusted(authorities []byte, c *x509.Certificate, usage x509.ExtKeyUsage, now time.Time) error {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authorities) {
		return errors.New("expected authorities in PEM")
	}
	_, err := c.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: now})
	return err
}

// joined returns the files of a host that joined.
func (s Server) joined() (dir string, err error) {
	dir = filepath.Dir(s.ClientCA)
	if In(dir).Cert != s.Cert || In(dir).Key != s.Key || In(dir).ClientCA != s.ClientCA {
		return "", errors.New("capstand uses certificates of the user (--tls-cert, --tls-key or --client-ca)")
	}
	if _, err := os.Stat(filepath.Join(dir, "ca.key")); !errors.Is(err, fs.ErrNotExist) {
		return "", errors.New("the host has an authority of its own (`capstan host credentials`), and renews its certificate itself")
	}
	return dir, nil
}

// Request returns the certificate request of a host that joined: for its key, and the names of its certificate.
func (s Server) Request() (request, authorities []byte, err error) {
	if _, err := s.joined(); err != nil {
		return nil, nil, err
	}
	old, err := pki.ReadCert(s.Cert)
	if err != nil {
		return nil, nil, err
	}
	data, err := os.ReadFile(s.Key)
	if err != nil {
		return nil, nil, err
	}
	key, err := pki.ParseKey(data)
	if err != nil {
		return nil, nil, err
	}
	if authorities, err = os.ReadFile(s.ClientCA); err != nil {
		return nil, nil, err
	}
	request, err = pki.NewRequest(pki.Leaf{CommonName: old.Subject.CommonName, DNSNames: old.DNSNames, IPs: old.IPAddresses}, key)
	return request, authorities, err
}

// Install replaces the certificate of a host that joined, and the authorities of its clients. A caller with the certificate
// client must be able to connect afterwards; nil is no caller.
func (s Server) Install(made, client *x509.Certificate, authorities []byte, now time.Time) error {
	dir, err := s.joined()
	if err != nil {
		return err
	}
	data, err := os.ReadFile(s.Key)
	if err != nil {
		return err
	}
	key, err := pki.ParseKey(data)
	if err != nil {
		return err
	}
	if !pki.HasKey(made, key) {
		return errInvalid{errors.New("expected a certificate for the key of this host, found one for another key")}
	}
	if err := trusted(authorities, made, x509.ExtKeyUsageServerAuth, now); err != nil {
		return errInvalid{fmt.Errorf("expected a server's certificate of one of the authorities: %w", err)}
	}
	if client != nil {
		if err := trusted(authorities, client, x509.ExtKeyUsageClientAuth, now); err != nil {
			return errInvalid{fmt.Errorf("expected authorities that admit the caller: %w", err)}
		}
	}
	// The authorities first: a client of a new one may connect as soon as it sees the certificate.
	if err := certfiles.WriteFile(filepath.Join(dir, "ca.crt"), authorities); err != nil {
		return err
	}
	return certfiles.WriteFile(s.Cert, pki.EncodeCert(made))
}

// errInvalid is the error of a request that can never succeed.
type errInvalid struct{ error }

// DescribeServer implements hostpb.CredentialsServer.
func (s *Service) DescribeServer(context.Context, *hostpb.DescribeServerRequest) (*hostpb.DescribeServerResponse, error) {
	request, authorities, err := s.Server.Request()
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &hostpb.DescribeServerResponse{Request: request, Authorities: authorities}, nil
}

// InstallServer implements hostpb.CredentialsServer.
func (s *Service) InstallServer(ctx context.Context, r *hostpb.InstallServerRequest) (*hostpb.InstallServerResponse, error) {
	caller, err := certificateOf(ctx)
	if err != nil {
		return nil, err
	}
	made, err := x509.ParseCertificate(r.GetCertificate())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "expected a certificate: %s", err)
	}
	err = s.Server.Install(made, caller, r.GetAuthorities(), time.Now())
	if invalid := (errInvalid{}); errors.As(err, &invalid) {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	} else if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &hostpb.InstallServerResponse{}, nil
}

// certificateOf returns the certificate of a caller.
func certificateOf(ctx context.Context) (*x509.Certificate, error) {
	caller, ok := peer.FromContext(ctx)
	if !ok {
		return nil, status.Error(codes.FailedPrecondition, "the call has no peer information")
	}
	info, ok := caller.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return nil, status.Error(codes.FailedPrecondition, "expected a call over TCP with mutual TLS, found another connection; clients of the socket need no certificate")
	}
	return info.State.PeerCertificates[0], nil
}
