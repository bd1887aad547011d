//go:build e2e

package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// The hosts outside the cluster. Only the proxy knows the names.
const (
	registryAddress = gateway + ":5000"
	outsideRegistry = "registry.outside.test"
	outsideWebhook  = "webhook.outside.test"
	// distrustedRegistry is the same registry. The machines have another authority for it.
	distrustedRegistry = "distrusted.outside.test"
	proxyAddress       = gateway + ":3128"
	// secureProxyAddress is the address of the proxy for clients that connect to it with TLS.
	secureProxyAddress = gateway + ":3129"
	// plainMirror is a mirror without TLS: the proxy gives its clients the registry that issues tokens.
	plainMirror     = "mirror.outside.test"
	upstreamAddress = gateway + ":5301"
	stubAddress     = gateway + ":5302"

	registryUser     = "puller"
	registryPassword = `pull"me-4f9c2e7a`
	// registryHash is the bcrypt hash of the password.
	registryHash = "$2a$04$PLOR4bq1bvALWAf/SaSZnOkrh0eppXwxPiS3Iv4i32IYiSCc6CwY6"
)

// outside are the services outside the cluster: a registry with TLS and users, one that issues tokens, a hostile one, a forward proxy, and
// DNS servers.
type outside struct {
	// dir contains the files of the registries.
	dir string
	ca  []byte
	// otherCA has signed nothing.
	otherCA []byte
	// addedCA has signed the certificate of the proxy and of the token server. A file of the worker adds it to the trusted authorities.
	addedCA                       []byte
	certificate, addedCertificate tls.Certificate
	proxy                         *forwardProxy
	tokens                        tokenServer
	hostile                       hostileRegistry
}

func newOutside(w *testNetwork) *outside {
	w.t.Helper()
	o := &outside{dir: filepath.Join(w.dir, "registry")}
	o.makeCertificates(w.t)
	o.startRegistry(w)
	o.startTokens(w)
	o.proxy = &forwardProxy{w: w, plain: o.plainMirror(w)}
	w.serve(proxyAddress, nil, o.proxy)
	w.serve(secureProxyAddress, &o.addedCertificate, o.proxy)
	answerDNS(w, upstreamAddress, netip.MustParseAddr("192.0.2.1"))
	answerDNS(w, stubAddress, netip.MustParseAddr("192.0.2.2"))
	return o
}

// serve starts an HTTP server in the network of the machines' gateway, with TLS if it has a certificate.
func (w *testNetwork) serve(address string, certificate *tls.Certificate, handler http.Handler) {
	w.t.Helper()
	var listener net.Listener
	var err error
	w.inside(w.bridge, func() { listener, err = net.Listen("tcp", address) })
	expect.NoError(w.t, err)
	if certificate != nil {
		listener = tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{*certificate}})
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	w.t.Cleanup(func() { expect.NoError(w.t, server.Close()) })
}

// serving returns the certificate of the services outside, and its key.
func serving(t *testing.T, authority pki.Authority) (certificate, key []byte) {
	t.Helper()
	leaf, private, err := authority.Issue(pki.Leaf{
		CommonName: "outside", DNSNames: []string{"*.outside.test"}, IPs: []net.IP{net.ParseIP(gateway)}, Usages: pki.Server,
	}, time.Hour, time.Now())
	expect.NoError(t, err)
	key, err = pki.EncodeKey(private)
	expect.NoError(t, err)
	return pki.EncodeCert(leaf), key
}

// makeCertificates creates the authorities and the certificates, and writes those for the registries.
func (o *outside) makeCertificates(t *testing.T) {
	t.Helper()
	authority, added := newAuthority(t), newAuthority(t)
	o.ca, o.addedCA, o.otherCA = pki.EncodeCert(authority.Cert), pki.EncodeCert(added.Cert), pki.EncodeCert(newAuthority(t).Cert)
	var err error
	o.addedCertificate, err = tls.X509KeyPair(serving(t, added))
	expect.NoError(t, err)
	certificate, key := serving(t, authority)
	o.certificate, err = tls.X509KeyPair(certificate, key)
	expect.NoError(t, err)
	expect.NoError(t, os.MkdirAll(o.dir, 0o700))
	for name, content := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "added.crt": o.addedCA} {
		expect.NoError(t, os.WriteFile(filepath.Join(o.dir, name), content, 0o600))
	}
}

// startRegistry starts the registry in the network of the machines' gateway.
func (o *outside) startRegistry(w *testNetwork) {
	w.t.Helper()
	expect.NoError(w.t, os.WriteFile(filepath.Join(o.dir, "users"), []byte(registryUser+":"+registryHash+"\n"), 0o600))
	o.runRegistry(w, "registry", registryAddress, "{htpasswd: {realm: test, path: "+o.dir+"/users}}")
}

// runRegistry runs a registry with its own folder of images. It returns when the registry listens.
func (o *outside) runRegistry(w *testNetwork, name, address, auth string) {
	w.t.Helper()
	config := filepath.Join(o.dir, name+".yaml")
	expect.NoError(w.t, os.WriteFile(config, []byte(`version: "0.1"
log: {level: warn}
storage: {filesystem: {rootdirectory: `+o.dir+`/`+name+`}}
http: {addr: "`+address+`", tls: {certificate: `+o.dir+`/tls.crt, key: `+o.dir+`/tls.key}}
auth: `+auth+"\n"), 0o600))
	log, err := os.Create(filepath.Join(o.dir, name+".log"))
	expect.NoError(w.t, err)
	cmd := exec.Command(filepath.Join(w.assets, "tools/registry"), "serve", config)
	cmd.Stdout, cmd.Stderr = log, log
	w.inside(w.bridge, func() { err = cmd.Start() })
	if err != nil {
		w.t.Fatalf("%v: run `make registry`", err)
	}
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
		if data, _ := os.ReadFile(log.Name()); w.t.Failed() {
			w.t.Logf("=== %s ===\n%s", name, tail(data, 3000))
		}
	})
	harness.Wait(w.t, "the server of "+name+" answers", time.Minute, func() error {
		conn, err := w.dial(address)
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
}

func newAuthority(t *testing.T) pki.Authority {
	t.Helper()
	key, err := pki.NewKey()
	expect.NoError(t, err)
	authority, err := pki.NewAuthority("registry authority", key, time.Now())
	expect.NoError(t, err)
	return authority
}

// dial connects from the network of the machines' gateway.
func (w *testNetwork) dial(address string) (conn net.Conn, err error) {
	w.inside(w.bridge, func() { conn, err = net.DialTimeout("tcp", address, 10*time.Second) })
	return conn, err
}

// plainMirror returns the registry that issues tokens for clients without TLS.
func (o *outside) plainMirror(w *testNetwork) http.Handler {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(o.ca)
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "https", Host: tokenRegistryAddress}) },
		Transport: &http.Transport{
			DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots},
			DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return w.dial(address) },
		},
	}
}

// forwardProxy is an HTTP proxy. TLS connections to the token server lead to it, and all others to the registry. Requests without TLS get
// the plain mirror.
type forwardProxy struct {
	w     *testNetwork
	plain http.Handler
	// targets are the hosts and ports to which clients have connected.
	targets seen
}

func (p *forwardProxy) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	p.targets.add(r.Host)
	if r.Method != http.MethodConnect {
		p.plain.ServeHTTP(out, r)
		return
	}
	address := registryAddress
	if r.Host == tokenServerName+":443" {
		address = tokenServerAddress
	}
	server, err := p.w.dial(address)
	if err != nil {
		http.Error(out, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = server.Close() }()
	client, buffered, err := http.NewResponseController(out).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = client.Close() }()
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	var wait sync.WaitGroup
	wait.Go(func() { _, _ = io.Copy(server, buffered); _ = server.Close() })
	_, _ = io.Copy(client, server)
	_ = client.Close()
	wait.Wait()
}

// answerDNS starts a DNS server that answers every question for an IPv4 address with the same one.
func answerDNS(w *testNetwork, address string, ip netip.Addr) {
	w.t.Helper()
	var conn net.PacketConn
	var err error
	w.inside(w.bridge, func() { conn, err = net.ListenPacket("udp", address) })
	expect.NoError(w.t, err)
	ended := make(chan struct{})
	w.t.Cleanup(func() { _ = conn.Close(); <-ended })
	go func() {
		defer close(ended)
		for buffer := make([]byte, 1500); ; {
			n, client, err := conn.ReadFrom(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = conn.WriteTo(dnsAnswer(buffer[:n], ip), client)
			}
		}
	}()
}

// dnsAnswer returns the answer to a query with one question (RFC 1035, section 4).
func dnsAnswer(query []byte, ip netip.Addr) []byte {
	const header = 12
	end := header
	for end < len(query) && query[end] != 0 {
		end += int(query[end]) + 1
	}
	end += 5 // the root label, the type and the class
	if end > len(query) {
		return nil
	}
	out := slices.Clone(query[:end])
	binary.BigEndian.PutUint16(out[2:], 0x8180) // a response, recursion desired and available
	clear(out[6:header])
	if binary.BigEndian.Uint16(query[end-4:]) == 1 { // type A
		out[7] = 1
		out = append(out, 0xc0, header, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4) // name of the question, type, class, TTL, length
		out = append(out, ip.AsSlice()...)
	}
	return out
}

// get sends a request from the network of the machines' gateway.
func (w *testNetwork) get(t *testing.T, url string) (string, error) {
	t.Helper()
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, Dial: func(_, address string) (net.Conn, error) { return w.dial(address) },
	}}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(body), err
}
