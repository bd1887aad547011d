package connections

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
)

// readSecret reads the Secret with the credentials of a host. The result is empty for a unix socket: the permissions of its file control
// access.
func readSecret(ctx context.Context, secrets client.Reader, host *infrav1.CapstanHost) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	if local(host.Spec.Address) {
		return secret, nil
	}
	ref := host.Spec.CredentialsRef
	if err := secrets.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return nil, fmt.Errorf("cannot read the credentials of host %s: %w", host.Name, err)
	}
	return secret, nil
}

// credentialsOf returns the credentials of a host in its Secret. They are empty for a unix socket.
func credentialsOf(secret *corev1.Secret, host *infrav1.CapstanHost) (credentials.Client, error) {
	if local(host.Spec.Address) {
		return credentials.Client{}, nil
	}
	ref := host.Spec.CredentialsRef
	c, err := credentials.FromSecret(secret.Data)
	if err == nil {
		_, err = c.Transport(time.Now(), nil)
	}
	if errors.Is(err, credentials.ErrExpired) {
		err = fmt.Errorf("%w: %s", err, replacement(secret, host.Name))
	}
	if err != nil {
		return credentials.Client{}, fmt.Errorf("the Secret %s/%s with the credentials of host %s: %w", ref.Namespace, ref.Name, host.Name, err)
	}
	return c, nil
}

// replacement is the way to new credentials of a host. A host that joined has no key of its authority, so it cannot make them.
func replacement(secret *corev1.Secret, host string) string {
	if _, err := credentials.AuthorityFromSecret(secret.Data); errors.Is(err, credentials.ErrNoAuthority) {
		return "make another one with `capstan host credentials`"
	}
	return fmt.Sprintf("create a token with `capstan host token create --name %s`, and let the host join again", host)
}

func loadCredentials(ctx context.Context, secrets client.Reader, host *infrav1.CapstanHost) (credentials.Client, error) {
	secret, err := readSecret(ctx, secrets, host)
	if err != nil {
		return credentials.Client{}, err
	}
	return credentialsOf(secret, host)
}

func local(address string) bool { return strings.HasPrefix(address, "unix:") }

func transport(address string, c credentials.Client, seen func(*x509.Certificate)) (grpccredentials.TransportCredentials, error) {
	if local(address) {
		return insecure.NewCredentials(), nil
	}
	return c.Transport(time.Now(), seen)
}

// Certificates are the certificates of the connection: the manager's own, the host's as it was at the last handshake, and
// the authority. A unix socket has none.
func (h *Host) Certificates() []expiry.Certificate {
	own := h.credentials.Certificate()
	if own == nil {
		return nil
	}
	out := []expiry.Certificate{expiry.Of("client", own)}
	if served := h.served.Load(); served != nil {
		out = append(out, expiry.Of("server", served))
	}
	if authorities, err := cert.ParseCertsPEM(h.credentials.CA); err == nil {
		out = append(out, expiry.Of("authority", authorities[0]))
	}
	return out
}

// Look makes a handshake, if the host's certificate was due when it was last seen: the connection may be older than the
// certificate that the host shows now.
func (h *Host) Look(ctx context.Context, now time.Time) error {
	served := h.served.Load()
	if served == nil || now.Before(expiry.Of("server", served).Due()) {
		return nil
	}
	return h.Handshake(ctx, now)
}

// Handshake makes a handshake, to see the certificate that the host shows now.
func (h *Host) Handshake(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if h.slot != nil {
		return h.slot.refresh(ctx)
	}
	conn, err := (&net.Dialer{Timeout: callTimeout}).DialContext(ctx, "tcp", h.address)
	if err != nil {
		return err
	}
	defer conn.Close()
	transport, err := h.credentials.Transport(now, h.served.Store)
	if err != nil {
		return err
	}
	_, _, err = transport.ClientHandshake(ctx, h.address, conn)
	return err
}

// Served is the certificate of the host at the last handshake, nil before the first one.
func (h *Host) Served() *x509.Certificate { return h.served.Load() }

// Credentials are the calls for the certificates of the connection.
func (h *Host) Credentials() hostpb.CredentialsClient { return hostpb.NewCredentialsClient(h.conn) }

// Renewed are other credentials, which the host has signed.
func (h *Host) Renewed(ctx context.Context) (credentials.Client, error) {
	return h.credentials.Renew(ctx, hostpb.NewCredentialsClient(h.conn))
}
