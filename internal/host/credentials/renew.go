package credentials

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// ErrNoAuthority is the error of a host that cannot sign certificates, because Make did not create them, or the key of the
// authority was removed.
var ErrNoAuthority = errors.New("the host does not have the key of its certificate authority (ca.key in the folder of ca.crt)")

// renewMax bounds the pause before a renewal, because clocks can jump and machines can sleep.
const renewMax = time.Hour

// authority returns the certificate authority in the folder of Make, if the server still uses it.
func (s Server) authority() (dir string, err error) {
	dir = filepath.Dir(s.ClientCA)
	if made := In(dir); s.Cert != made.Cert || s.Key != made.Key || s.ClientCA != made.ClientCA {
		return "", ErrNoAuthority
	}
	if _, err := os.Stat(filepath.Join(dir, "ca.key")); errors.Is(err, fs.ErrNotExist) {
		return "", ErrNoAuthority
	}
	return dir, nil
}

// Renew signs the server's certificate again, for the same names and validity, when two thirds of its validity are over. It
// returns the time of the next check.
func (s Server) Renew(now time.Time) (next time.Time, err error) {
	old, errRead := pki.ReadCert(s.Cert)
	dir, err := s.authority()
	// The managers of a host that joined renew its certificate.
	if errors.Is(err, ErrNoAuthority) && errRead == nil && now.Before(pki.RenewAt(old)) {
		return pki.RenewAt(old), nil
	}
	if err := errors.Join(err, errRead); err != nil {
		return time.Time{}, err
	}
	leaf := certfiles.Leaf{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: old.Subject.CommonName, DNSNames: old.DNSNames, IPs: old.IPAddresses, Usages: pki.Server}}
	return leaf.Ensure(dir, pki.Validity(old), now)
}

// KeepRenewed renews the server's certificate until ctx ends. Servers read it at each handshake. KeepRenewed calls warn with
// each failure.
func (s Server) KeepRenewed(ctx context.Context, warn func(error)) {
	for ctx.Err() == nil {
		next, err := s.Renew(time.Now())
		if err != nil {
			warn(fmt.Errorf("cannot renew the server's certificate: %w", err))
			next = time.Now().Add(renewMax)
		}
		select {
		case <-ctx.Done():
		case <-time.After(max(time.Second, min(renewMax, time.Until(next)))):
		}
	}
}

// SignClient signs a client's next certificate. It has the key of the request, the name that clients must have, and the
// validity of the certificate that the client presented.
func (s Server) SignClient(request []byte, shown *x509.Certificate, now time.Time) (*x509.Certificate, error) {
	dir, err := s.authority()
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s: make new credentials in the place where the key is", err)
	}
	parsed, err := pki.ParseRequest(request)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "expected a certificate request that its own key has signed: %s", err)
	}
	leaf := certfiles.Leaf{Name: "client", CA: "ca", Leaf: pki.Leaf{CommonName: cmp.Or(s.ClientName, ClientName), Usages: pki.Client}}
	return leaf.IssueFor(parsed.PublicKey, dir, pki.Validity(shown), now)
}

// Service answers the calls of host.v1.Credentials.
type Service struct {
	hostpb.UnimplementedCredentialsServer
	Server Server
}

// RenewClient implements hostpb.CredentialsServer.
func (s *Service) RenewClient(ctx context.Context, r *hostpb.RenewClientRequest) (*hostpb.RenewClientResponse, error) {
	caller, err := certificateOf(ctx)
	if err != nil {
		return nil, err
	}
	made, err := s.Server.SignClient(r.GetRequest(), caller, time.Now())
	if err != nil {
		return nil, err
	}
	return &hostpb.RenewClientResponse{Certificate: made.Raw}, nil
}

// Renew requests a certificate for a new key from the host, and checks the answer.
func (c Client) Renew(ctx context.Context, host hostpb.CredentialsClient) (Client, error) {
	key, err := pki.NewKey()
	if err != nil {
		return Client{}, err
	}
	request, err := pki.NewRequest(pki.Leaf{}, key)
	if err != nil {
		return Client{}, err
	}
	response, err := host.RenewClient(ctx, &hostpb.RenewClientRequest{Request: request})
	if err != nil {
		return Client{}, err
	}
	made, err := x509.ParseCertificate(response.GetCertificate())
	if err != nil {
		return Client{}, fmt.Errorf("the host's answer is not a certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.CA)
	if _, err := made.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return Client{}, fmt.Errorf("the certificate that the host issued is not usable: %w", err)
	}
	if !pki.HasKey(made, key) {
		return Client{}, errors.New("the certificate that the host issued is for another key")
	}
	data, err := pki.EncodeKey(key)
	return Client{CA: c.CA, Cert: pki.EncodeCert(made), Key: data}, err
}

// Certificate is the client's own; nil if it cannot be read.
func (c Client) Certificate() *x509.Certificate {
	leaf, err := pki.ParseCert(c.Cert)
	if err != nil {
		return nil
	}
	return leaf
}
