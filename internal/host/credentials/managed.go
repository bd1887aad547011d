package credentials

import (
	"bytes"
	"context"
	"crypto/x509"
	"time"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/pki"
)

// Step is the next step of the renewal of a host that joined. After a crash at any point, Next returns the same step again.
// In all states between, the manager and the host trust each other.
type Step int

const (
	// StepNone means that nothing is due.
	StepNone Step = iota
	// StepAuthority creates another authority. Both are trusted.
	StepAuthority
	// StepServer gives the host a certificate of the current authority. The host trusts all authorities of the Secret.
	StepServer
	// StepClient creates a client certificate of the current authority.
	StepClient
	// StepForget removes the previous authority from the host, and then from the Secret.
	StepForget
)

// Next returns the next step. served is the certificate of the host, nil if it is not known. rotate requests another
// authority.
func (m Managed) Next(served *x509.Certificate, rotate bool, now time.Time) Step {
	due := func(c *x509.Certificate) bool { return !now.Before(pki.RenewAt(c)) }
	stale := func(c *x509.Certificate) bool { return due(c) || c.CheckSignatureFrom(m.Authority.Cert) != nil }
	several := m.several()
	client := m.Certificate()
	switch {
	case !several && (rotate || due(m.Authority.Cert)):
		return StepAuthority
	case served == nil:
		return StepNone
	case stale(served):
		return StepServer
	case client == nil || stale(client):
		return StepClient
	case several:
		return StepForget
	}
	return StepNone
}

// several reports whether the managers trust more than one authority.
func (m Managed) several() bool {
	all, err := cert.ParseCertsPEM(m.CA)
	return err == nil && len(all) > 1
}

// WithAuthority returns the credentials with a new authority before the previous one. The client certificate stays.
func (m Managed) WithAuthority(now time.Time) (Managed, error) {
	key, err := pki.NewKey()
	if err != nil {
		return Managed{}, err
	}
	made, err := pki.NewAuthority("capstand", key, now)
	if err != nil {
		return Managed{}, err
	}
	m.CA = bytes.Join([][]byte{pki.EncodeCert(made.Cert), pki.EncodeCert(m.Authority.Cert)}, nil)
	m.Authority = made
	return m, nil
}

// WithClient returns the credentials with a new key and certificate of the managers, valid for as long as the previous one.
func (m Managed) WithClient(now time.Time) (Managed, error) {
	return m.withClient(m.validity(), now)
}

// Settled ends the rotation of a host that joins again: the join gives the host only the current authority, so it must have signed the
// certificate of the managers. changed is false without a rotation.
func (m Managed) Settled(now time.Time) (next Managed, changed bool, err error) {
	if !m.several() {
		return m, false, nil
	}
	next, err = m.WithClient(now)
	return next.Alone(), true, err
}

// Alone returns the credentials with the current authority only.
func (m Managed) Alone() Managed {
	m.CA = pki.EncodeCert(m.Authority.Cert)
	return m
}

// validity of the certificates.
func (m Managed) validity() time.Duration {
	if c := m.Certificate(); c != nil {
		return pki.Validity(c)
	}
	return DefaultValidity
}

// Install signs the certificate of the host again, and installs it together with the authorities of m.
func (m Managed) Install(ctx context.Context, host hostpb.CredentialsClient, now time.Time) error {
	described, err := host.DescribeServer(ctx, &hostpb.DescribeServerRequest{})
	if err != nil {
		return err
	}
	request, err := pki.ParseRequest(described.GetRequest())
	if err != nil {
		return err
	}
	leaf := pki.Leaf{CommonName: "capstand", DNSNames: request.DNSNames, IPs: request.IPAddresses, Usages: pki.Server}
	made, err := m.Authority.Sign(leaf, request.PublicKey, m.validity(), now)
	if err != nil {
		return err
	}
	_, err = host.InstallServer(ctx, &hostpb.InstallServerRequest{Certificate: made.Raw, Authorities: m.CA})
	return err
}
