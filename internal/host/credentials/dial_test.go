package credentials_test

import (
	"crypto/tls"
	"net"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/credentials"
)

// shake makes a TLS handshake. It returns the error of each side: with TLS 1.3 the client finds the server's refusal at its first read.
func shake(t *testing.T, host, manager *tls.Config) (hostErr, managerErr error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	a, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	_, _ = a.SetDeadline(deadline), b.SetDeadline(deadline)
	done := make(chan error, 1)
	go func() {
		defer b.Close()
		server := tls.Server(b, manager)
		err := server.Handshake()
		if err == nil {
			_, err = server.Write([]byte("x"))
		}
		done <- err
	}()
	client := tls.Client(a, host)
	_, hostErr = client.Read(make([]byte, 1)) // It makes the handshake.
	_ = a.Close()
	return hostErr, <-done
}

// A host that dials and its manager accept each other, and nobody else.
func TestDial(t *testing.T) {
	now := time.Now()
	dir := t.TempDir()
	client := issue(t, dir, time.Hour, now, "h", "192.0.2.1")
	files := credentials.In(dir)
	strangers := t.TempDir()
	stranger := issue(t, strangers, time.Hour, now, "h")

	good := func() *tls.Config { return dialConfig(t, files, "h") }
	accept := func(c credentials.Client, name string) *tls.Config {
		config, err := c.AcceptConfig(name, now)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}
	// The pair of a host in the role of the manager, and the pair of a manager in the role of the host.
	pair := func(cert, key []byte) []tls.Certificate {
		made, err := tls.X509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		return []tls.Certificate{made}
	}
	with := func(c *tls.Config, change func(*tls.Config)) *tls.Config {
		change(c)
		return c
	}
	managers := pair(client.Cert, client.Key)
	for name, c := range map[string]struct {
		host, manager         *tls.Config
		wantHost, wantManager string
	}{
		"both right":                                {host: good(), manager: accept(client, "h")},
		"an IP address as the name":                 {host: dialConfig(t, files, "192.0.2.1"), manager: accept(client, "192.0.2.1")},
		"a host of another authority":               {host: with(good(), func(c *tls.Config) { c.Certificates = dialConfig(t, credentials.In(strangers), "h").Certificates }), manager: accept(client, "h"), wantManager: "unknown authority"},
		"another host of the same authority":        {host: good(), manager: accept(client, "other"), wantManager: "not other"},
		"the certificate of a manager as a host":    {host: with(good(), func(c *tls.Config) { c.Certificates = managers }), manager: accept(client, "h"), wantManager: "incompatible key usage"},
		"a host without a certificate":              {host: with(good(), func(c *tls.Config) { c.Certificates = nil }), manager: accept(client, "h"), wantManager: "didn't provide a certificate"},
		"a host without the protocol":               {host: with(good(), func(c *tls.Config) { c.NextProtos = nil }), manager: accept(client, "h"), wantHost: "capstan-dial"},
		"a host with another protocol":              {host: with(good(), func(c *tls.Config) { c.NextProtos = []string{"h2"} }), manager: accept(client, "h"), wantManager: "unsupported application protocols"},
		"a manager of another authority":            {host: good(), manager: accept(stranger, "h"), wantHost: "unknown authority"},
		"the certificate of a host as a manager":    {host: good(), manager: with(accept(client, "h"), func(c *tls.Config) { c.Certificates = dialConfig(t, files, "h").Certificates }), wantHost: "incompatible key usage"},
		"another client of the manager's authority": {host: dialConfig(t, credentials.Server{Cert: files.Cert, Key: files.Key, ClientCA: files.ClientCA, ClientName: "else"}, "h"), manager: accept(client, "h"), wantHost: `"else"`},
	} {
		t.Run(name, func(t *testing.T) {
			hostErr, managerErr := shake(t, c.host, c.manager)
			if c.wantHost == "" && c.wantManager == "" {
				if hostErr != nil || managerErr != nil {
					t.Fatalf("host: %v, manager: %v", hostErr, managerErr)
				}
				return
			}
			if hostErr == nil || managerErr == nil {
				t.Fatalf("expected that both sides fail, found host: %v, manager: %v", hostErr, managerErr)
			}
			if !strings.Contains(hostErr.Error(), c.wantHost) || !strings.Contains(managerErr.Error(), c.wantManager) {
				t.Errorf("host: %v, manager: %v; expected %q and %q", hostErr, managerErr, c.wantHost, c.wantManager)
			}
		})
	}
}

func dialConfig(t *testing.T, files credentials.Server, name string) *tls.Config {
	t.Helper()
	config, err := files.DialConfig(name)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// A host finds out before it dials that its certificate is for another name.
func TestDialName(t *testing.T) {
	dir := t.TempDir()
	issue(t, dir, time.Hour, time.Now(), "rack-1")
	_, err := credentials.In(dir).DialConfig("rack-2")
	if err == nil || !strings.Contains(err.Error(), "capstan host credentials rack-2") {
		t.Errorf("found %v", err)
	}
	for serverName, want := range map[string]string{credentials.DialServerName("rack-1"): "rack-1", credentials.DialServerName("192.0.2.1"): "192.0.2.1", "rack-1": "", ".host.capstan": "", "": ""} {
		if name := credentials.DialHostName(serverName); name != want {
			t.Errorf("%q: found %q", serverName, name)
		}
	}
}
