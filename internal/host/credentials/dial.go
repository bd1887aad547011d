package credentials

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
)

// A host behind NAT dials the manager. Then the host is the client of TLS, and the manager is the server. The certificates are those
// of the other direction: each side requires the usage that the other side's certificate has there, so no certificate serves in
// both roles.

const (
	// dialProtocol is the application protocol of TLS. It separates these connections from those that a manager opens.
	dialProtocol = "capstan-dial"
	// dialSuffix makes a server name of a host's name. A name that looks like an IP address could not be one.
	dialSuffix = ".host.capstan"
)

// DialServerName is the server name of TLS with which a host names itself to the manager.
func DialServerName(host string) string { return host + dialSuffix }

// DialHostName is the name of the host in a server name of TLS, or empty if it contains none.
func DialHostName(serverName string) string {
	name, found := strings.CutSuffix(serverName, dialSuffix)
	if !found {
		return ""
	}
	return name
}

// DialConfig returns mutual TLS with the files for a host that dials its manager. name is that of the CapstanHost.
func (s Server) DialConfig(name string) (*tls.Config, error) {
	pair, roots, err := s.read()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, getFiles)
	}
	if err := pair.Leaf.VerifyHostname(name); err != nil {
		return nil, fmt.Errorf("expected a certificate for %s, the name of the CapstanHost, in %s: %w: set the name with --name, or make a certificate with `capstan host credentials %s --dials`", name, s.Cert, err, name)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: DialServerName(name), NextProtos: []string{dialProtocol}, Certificates: []tls.Certificate{pair},
		// The manager's certificate is that of a client, which the default verification refuses. VerifyConnection replaces it.
		InsecureSkipVerify: true, //nolint:gosec // See above.
		VerifyConnection: func(state tls.ConnectionState) error {
			if err := verifyDialled(state, roots, x509.ExtKeyUsageClientAuth); err != nil {
				return err
			}
			return s.checkName(state.PeerCertificates[0])
		},
	}, nil
}

// AcceptConfig returns mutual TLS for a manager that the host of this name dials.
func (c Client) AcceptConfig(name string, now time.Time) (*tls.Config, error) {
	config, err := c.config(now)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{dialProtocol}, Certificates: config.Certificates, SessionTicketsDisabled: true,
		// VerifyConnection verifies the certificate: it is that of a server, which the default verification refuses.
		ClientAuth: tls.RequireAnyClientCert,
		VerifyConnection: func(state tls.ConnectionState) error {
			if err := verifyDialled(state, config.RootCAs, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			// Several hosts may have one authority.
			return state.PeerCertificates[0].VerifyHostname(name)
		},
	}, nil
}

// verifyDialled verifies the certificate of the other side.
func verifyDialled(state tls.ConnectionState, roots *x509.CertPool, usage x509.ExtKeyUsage) error {
	if state.NegotiatedProtocol != dialProtocol || len(state.PeerCertificates) == 0 {
		return fmt.Errorf("expected a certificate and the protocol %q, found %d certificates and %q", dialProtocol, len(state.PeerCertificates), state.NegotiatedProtocol)
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{usage}})
	return err
}

// Handshaken is the transport of connections whose TLS handshake is complete: gRPC gets the certificates of the other side.
func Handshaken() credentials.TransportCredentials { return handshaken{} }

type handshaken struct{}

// ClientHandshake implements credentials.TransportCredentials.
func (handshaken) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return authenticated(conn)
}

// ServerHandshake implements credentials.TransportCredentials.
func (handshaken) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return authenticated(conn)
}

func authenticated(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
	if !ok || !c.ConnectionState().HandshakeComplete {
		return nil, nil, errors.New("expected a connection after its TLS handshake")
	}
	return conn, credentials.TLSInfo{
		State: c.ConnectionState(), CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// Info implements credentials.TransportCredentials.
func (handshaken) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (h handshaken) Clone() credentials.TransportCredentials { return h }

// OverrideServerName implements credentials.TransportCredentials. The handshake is over.
func (handshaken) OverrideServerName(string) error { return nil }
