package credentials

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/credentials"
	corev1 "k8s.io/api/core/v1"
)

// caKey is the key of the certificate authority in the Secret with a host's credentials. The other keys are Kubernetes' own,
// tls.crt and tls.key.
const caKey = "ca.crt"

// ErrExpired is the error of credentials whose certificate has expired.
var ErrExpired = errors.New(corev1.TLSCertKey + " has expired")

// Client contains the credentials that a manager needs to use a host, PEM encoded.
type Client struct{ CA, Cert, Key []byte }

// FromSecret reads the data of a Secret.
func FromSecret(data map[string][]byte) (Client, error) {
	c := Client{CA: data[caKey], Cert: data[corev1.TLSCertKey], Key: data[corev1.TLSPrivateKeyKey]}
	if len(c.CA) == 0 || len(c.Cert) == 0 || len(c.Key) == 0 {
		return Client{}, fmt.Errorf("must have %s, %s and %s for mutual TLS", caKey, corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	return c, nil
}

// Data returns the data of a Secret that FromSecret reads.
func (c Client) Data() map[string][]byte {
	return map[string][]byte{caKey: c.CA, corev1.TLSCertKey: c.Cert, corev1.TLSPrivateKeyKey: c.Key}
}

// Equal returns whether both credentials are the same.
func (c Client) Equal(o Client) bool {
	return bytes.Equal(c.CA, o.CA) && bytes.Equal(c.Cert, o.Cert) && bytes.Equal(c.Key, o.Key)
}

// Transport returns mutual TLS with a host. An error only names the unusable part of the credentials. If seen is not nil, it
// is called with the host's certificate at each handshake.
func (c Client) Transport(now time.Time, seen func(*x509.Certificate)) (credentials.TransportCredentials, error) {
	config, err := c.config(now)
	if err != nil {
		return nil, err
	}
	return patient{credentials.NewTLS(config), seen}, nil
}

// config returns the TLS configuration of a client.
func (c Client) config(now time.Time) (*tls.Config, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(c.CA) {
		return nil, fmt.Errorf("%s holds no PEM certificate", caKey)
	}
	pair, err := tls.X509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s are not a key pair", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	if now.After(pair.Leaf.NotAfter) {
		return nil, fmt.Errorf("%w on %s", ErrExpired, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, Certificates: []tls.Certificate{pair}}, nil
}

// patient waits, after the handshake, for the first byte of the host's greeting. With TLS 1.3 a server refuses a client's
// certificate only after the client's part of the handshake, and a client that writes before that gets a "broken pipe"
// instead of the reason.
type patient struct {
	credentials.TransportCredentials
	// seen is nil, or is called with the certificate of each host. VerifyConnection of TLS would be too early: at that moment the other
	// side has not proved that it has the key of the certificate.
	seen func(*x509.Certificate)
}

// ClientHandshake implements credentials.TransportCredentials.
func (p patient) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := p.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	if tlsInfo, ok := info.(credentials.TLSInfo); ok && p.seen != nil {
		p.seen(tlsInfo.State.PeerCertificates[0])
	}
	deadline, _ := ctx.Deadline()
	first := make([]byte, 1)
	err = conn.SetReadDeadline(deadline)
	if err == nil {
		_, err = conn.Read(first)
	}
	if err = errors.Join(err, conn.SetReadDeadline(time.Time{})); err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return &begun{Conn: conn, first: first}, info, nil
}

// Clone implements credentials.TransportCredentials.
func (p patient) Clone() credentials.TransportCredentials {
	return patient{p.TransportCredentials.Clone(), p.seen}
}

// begun is a connection whose first byte was read already.
type begun struct {
	net.Conn
	first []byte
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) > 0 && len(p) > 0 {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}
