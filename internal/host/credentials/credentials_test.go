package credentials_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

func issue(t *testing.T, dir string, validity time.Duration, now time.Time, addresses ...string) credentials.Client {
	t.Helper()
	c, err := credentials.Make(dir, addresses, validity, now)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// serve starts a server with the credentials in a folder.
func serve(t *testing.T, dir string) (address string, warnings *atomic.Int32) {
	t.Helper()
	return serveFiles(t, credentials.In(dir))
}

func serveFiles(t *testing.T, files credentials.Server) (address string, warnings *atomic.Int32) {
	t.Helper()
	warnings = &atomic.Int32{}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := files.Listen(raw, func(error) { warnings.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.Handshaken()))
	healthpb.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return l.Addr().String(), warnings
}

// call makes one call over a new connection.
func call(t *testing.T, address string, transport grpccredentials.TransportCredentials) error {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(transport))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

// transport of a client whose clock is an hour late.
func transport(t *testing.T, c credentials.Client, serverName string) grpccredentials.TransportCredentials {
	t.Helper()
	transport, err := c.Transport(time.Now().Add(-time.Hour), nil)
	if err != nil {
		t.Fatal(err)
	}
	if serverName != "" {
		if err := transport.OverrideServerName(serverName); err != nil { // deprecated; there is no other way
			t.Fatal(err)
		}
	}
	return transport
}

// sameAuthority returns another folder with the same authority.
func sameAuthority(t *testing.T, dir string) string {
	t.Helper()
	other := t.TempDir()
	for _, name := range []string{"ca.crt", "ca.key"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(other, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return other
}

// Only clients with a valid certificate of the host's authority can connect. Clients verify the server's certificate.
func TestTransport(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	now := time.Now()
	good := issue(t, dir, time.Hour, now, "127.0.0.1", "rack-1.example.org")
	address, _ := serve(t, dir)
	other := issue(t, filepath.Join(t.TempDir(), "tls"), time.Hour, now, "127.0.0.1")
	old := issue(t, sameAuthority(t, dir), time.Minute, now.Add(-time.Hour), "x")
	stranger, deceived := other, good
	stranger.CA, deceived.CA = good.CA, other.CA
	anonymous := grpccredentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	tls12 := grpccredentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
	for name, test := range map[string]struct {
		client grpccredentials.TransportCredentials
		want   string
	}{
		"right":                  {transport(t, good, ""), ""},
		"by name":                {transport(t, good, "rack-1.example.org"), ""},
		"of another authority":   {transport(t, stranger, ""), "unknown certificate authority"},
		"expired":                {transport(t, old, ""), "expired certificate"},
		"a host that is no host": {transport(t, deceived, ""), "signed by unknown authority"},
		"a host of another name": {transport(t, good, "rack-2.example.org"), "not rack-2.example.org"},
		"no certificate":         {anonymous, "Unavailable"},
		"an old version of TLS":  {tls12, "protocol version"},
	} {
		t.Run(name, func(t *testing.T) {
			err := call(t, address, test.client)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// The user's authority also signs certificates for other purposes. The host accepts only certificates with a manager's name.
func TestClientName(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	made := issue(t, dir, time.Hour, now, "127.0.0.1")
	signed := func(commonName string, dnsNames ...string) credentials.Client {
		pair, err := certfiles.Leaf{Name: "other", CA: "ca", Leaf: pki.Leaf{CommonName: commonName, DNSNames: dnsNames, Usages: pki.Client}}.Issue(dir, time.Hour, now)
		if err != nil {
			t.Fatal(err)
		}
		return credentials.Client{CA: made.CA, Cert: pair, Key: pair}
	}
	for name, test := range map[string]struct {
		want    string
		client  credentials.Client
		refused bool
	}{
		"Capstan's own":               {"", made, false},
		"another's":                   {"", signed("web-7", "web-7.example.org"), true},
		"without a name":              {"", signed(""), true},
		"the name that was asked for": {"managers.example.org", signed("managers.example.org"), false},
		"among others":                {"managers.example.org", signed("x", "a.example.org", "managers.example.org"), false},
		"Capstan's is another's then": {"managers.example.org", made, true},
	} {
		t.Run(name, func(t *testing.T) {
			files := credentials.In(dir)
			files.ClientName = test.want
			address, warnings := serveFiles(t, files)
			err := call(t, address, transport(t, test.client, ""))
			if test.refused != (err != nil && strings.Contains(err.Error(), "bad certificate")) || test.refused != (warnings.Load() > 0) || !test.refused && err != nil {
				t.Errorf("got %v and %d warnings, refused should be %t", err, warnings.Load(), test.refused)
			}
		})
	}
}

// The server uses new certificates without a restart, and issued certificates still work. With damaged files, the server
// still accepts clients.
func TestRenewal(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	first := issue(t, dir, time.Hour, now, "127.0.0.1")
	address, warnings := serve(t, dir)
	before, err := os.ReadFile(filepath.Join(dir, "server.crt"))
	if err != nil {
		t.Fatal(err)
	}
	second := issue(t, dir, time.Hour, now, "127.0.0.1")
	after, err := os.ReadFile(filepath.Join(dir, "server.crt"))
	if err != nil || bytes.Equal(before, after) {
		t.Errorf("the server still uses the old certificate, %v", err)
	}
	for _, c := range []credentials.Client{first, second} {
		if err := call(t, address, transport(t, c, "")); err != nil {
			t.Error(err)
		}
	}
	if warnings.Load() != 0 {
		t.Error("the server logged a warning")
	}
	if err := os.WriteFile(filepath.Join(dir, "server.crt"), before[:len(before)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := call(t, address, transport(t, second, "")); err != nil || warnings.Load() == 0 {
		t.Errorf("%v, %d warnings", err, warnings.Load())
	}
	if _, err := credentials.In(dir).Config("h2", nil); err == nil || !strings.Contains(err.Error(), "capstan host credentials") {
		t.Errorf("started with damaged files: %v", err)
	}
}

// Errors name the problem with a Secret and do not contain its data.
func TestClient(t *testing.T) {
	now := time.Now()
	good := issue(t, t.TempDir(), time.Hour, now, "x")
	other := issue(t, t.TempDir(), time.Hour, now, "x")
	for want, change := range map[string]func(map[string][]byte){
		"":                                       func(map[string][]byte) {},
		"must have ca.crt, tls.crt and tls.key":  func(d map[string][]byte) { delete(d, "tls.key") },
		"ca.crt holds no PEM certificate":        func(d map[string][]byte) { d["ca.crt"] = []byte("x") },
		"tls.crt and tls.key are not a key pair": func(d map[string][]byte) { d["tls.key"] = other.Key },
		"tls.crt has expired on": func(d map[string][]byte) {
			old := issue(t, t.TempDir(), time.Minute, now.Add(-time.Hour), "x")
			d["tls.crt"], d["tls.key"] = old.Cert, old.Key
		},
	} {
		data := good.Data()
		change(data)
		c, err := credentials.FromSecret(data)
		if err == nil {
			_, err = c.Transport(now, nil)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// Only root can read keys.
func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	issue(t, dir, time.Hour, time.Now(), "127.0.0.1")
	for _, name := range []string{"", "ca.key", "server.key"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
	if _, err := credentials.Make(dir, nil, time.Hour, time.Now()); err == nil {
		t.Error("created a certificate without an address")
	}
}

// A certificate counts as seen only if the other side has its key: everybody can read certificates during a handshake.
func TestSeen(t *testing.T) {
	dir := t.TempDir()
	client := issue(t, dir, time.Hour, time.Now(), "127.0.0.1")
	files := credentials.In(dir)
	own, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	issue(t, other, time.Hour, time.Now(), "127.0.0.1")
	foreign, err := tls.LoadX509KeyPair(credentials.In(other).Cert, credentials.In(other).Key)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		served tls.Certificate
		seen   int32
	}{
		"with its key":        {own, 1},
		"with another key":    {tls.Certificate{Certificate: own.Certificate, PrivateKey: foreign.PrivateKey}, 0},
		"another certificate": {foreign, 0},
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{test.served}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			go func() {
				if conn, err := listener.Accept(); err == nil {
					_, _ = conn.Write([]byte("x"))
					_, _ = conn.Read(make([]byte, 1))
					_ = conn.Close()
				}
			}()
			var seen atomic.Int32
			transport, err := client.Transport(time.Now(), func(*x509.Certificate) { seen.Add(1) })
			if err != nil {
				t.Fatal(err)
			}
			raw, err := net.Dial("tcp", listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, _, err = transport.ClientHandshake(ctx, listener.Addr().String(), raw)
			if seen.Load() != test.seen || (err == nil) != (test.seen == 1) {
				t.Errorf("seen %d times, expected %d: %v", seen.Load(), test.seen, err)
			}
		})
	}
}
