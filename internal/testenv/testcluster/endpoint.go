package testcluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"

	"capstan.dev/capstan/internal/testenv/expect"
)

// Endpoint is a control plane endpoint on loopback. Until Serve is called it holds connections,
// as a load balancer does while no API server is healthy.
type Endpoint struct {
	clusterv1.APIEndpoint
	listener net.Listener
	server   *http.Server
}

// NewEndpoint opens an endpoint; it is closed when the test ends.
func NewEndpoint(t *testing.T) *Endpoint {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	out := &Endpoint{listener: listener}
	out.Host, out.Port = "127.0.0.1", int32(listener.Addr().(*net.TCPAddr).Port)
	t.Cleanup(out.Close)
	return out
}

// Asked waits for a client before Serve is called, and ends its connection.
func (e *Endpoint) Asked(t *testing.T) {
	t.Helper()
	_ = e.listener.(*net.TCPListener).SetDeadline(time.Now().Add(expect.Patience))
	conn, err := e.listener.Accept()
	if err != nil {
		t.Fatalf("no client of the endpoint: %v", err)
	}
	_ = conn.Close()
}

// Close ends the endpoint.
func (e *Endpoint) Close() {
	if e.server != nil {
		_ = e.server.Close()
	}
	_ = e.listener.Close()
}

// Serve connects the endpoint to a real API server. The serving certificate is from the cluster's authority, and
// clients need a certificate of it as well.
func (e *Endpoint) Serve(t *testing.T, ca *corev1.Secret, backend *rest.Config) {
	t.Helper()
	cert, err := ServingCertificate(ca, e.Host)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(ca.Data[corev1.TLSCertKey])
	target, err := url.Parse(backend.Host)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1 // Watches.
	if proxy.Transport, err = rest.TransportFor(backend); err != nil {
		t.Fatal(err)
	}
	e.server = &http.Server{Handler: proxy, ReadHeaderTimeout: time.Minute, TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12,
	}}
	go func() { _ = e.server.ServeTLS(e.listener, "", "") }()
}

// ServingCertificate returns a certificate for an API server at an address, signed by the authority in a Secret.
func ServingCertificate(ca *corev1.Secret, host string) (tls.Certificate, error) {
	caCert, err := certs.DecodeCertPEM(ca.Data[corev1.TLSCertKey])
	if err != nil {
		return tls.Certificate{}, err
	}
	caKey, err := certs.DecodePrivateKeyPEM(ca.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	config := certs.Config{CommonName: "kube-apiserver", AltNames: certs.AltNames{IPs: []net.IP{net.ParseIP(host)}}, Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	cert, err := config.NewSignedCert(key, caCert, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}, nil
}
