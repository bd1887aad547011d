package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/ports"
)

func listenFor(t *testing.T, o options) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "capstand_info 1") })
	return o.serveMetrics(ctx, handler, slog.New(slog.NewTextHandler(t.Output(), nil)))
}

func get(client *http.Client, url string) string {
	res, err := client.Get(url)
	if err != nil {
		return err.Error()
	}
	defer res.Body.Close()
	body, _ := io.ReadAll(res.Body)
	return string(body)
}

// Metrics leave the box over mutual TLS only.
func TestMetricsAddress(t *testing.T) {
	for address, want := range map[string]string{
		"0.0.0.0:9000": "loopback device", "[::]:9000": "loopback device", "192.0.2.1:9000": "loopback device", ":9000": "IP:port", "localhost:9000": "IP:port",
	} {
		if err := listenFor(t, options{metrics: metricsOptions{address: address}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, expected %q", address, err, want)
		}
	}
	local := ports.Address(t)
	if err := listenFor(t, options{metrics: metricsOptions{address: local}}); err != nil {
		t.Fatal(err)
	}
	if got := get(http.DefaultClient, "http://"+local+"/metrics"); got != "capstand_info 1" {
		t.Errorf("found %q", got)
	}
	if got := get(http.DefaultClient, "http://"+local+"/debug/pprof"); !strings.Contains(got, "not found") {
		t.Errorf("another path: %q", got)
	}
}

// Only a client with a certificate of the given authority and with the given name gets metrics, not a manager.
func TestMetricsOverTLS(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	manager, err := credentials.Make(filepath.Join(root, "tls"), []string{"127.0.0.1"}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := certfiles.EnsureAuthority(dir, "ca", "monitoring", time.Now()); err != nil {
		t.Fatal(err)
	}
	pair := func(name string) tls.Certificate {
		leaf := certfiles.Leaf{Name: name, CA: "ca", Leaf: pki.Leaf{CommonName: name, Usages: pki.Client}}
		if _, err := leaf.Ensure(dir, time.Hour, time.Now()); err != nil {
			t.Fatal(err)
		}
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	address := ports.Address(t)
	o := options{root: root, metrics: metricsOptions{address: address, clientCA: filepath.Join(dir, "ca.crt"), clientName: "prometheus"}}
	if err := listenFor(t, o); err != nil {
		t.Fatal(err)
	}
	managers, err := tls.X509KeyPair(manager.Cert, manager.Key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(manager.CA)
	for name, test := range map[string]struct {
		certificates []tls.Certificate
		served       bool
	}{
		"prometheus":     {[]tls.Certificate{pair("prometheus")}, true},
		"another name":   {[]tls.Certificate{pair("grafana")}, false},
		"a manager":      {[]tls.Certificate{managers}, false},
		"no certificate": {nil, false},
	} {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: test.certificates}, ForceAttemptHTTP2: true}
		got := get(&http.Client{Transport: transport}, "https://"+address+"/metrics")
		transport.CloseIdleConnections()
		if (got == "capstand_info 1") != test.served {
			t.Errorf("%s: %q", name, got)
		}
	}
	o.metrics.clientCA = filepath.Join(dir, "missing")
	if err := listenFor(t, o); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("a missing authority: %v", err)
	}
}

// TestCertificates: the metrics have each certificate that a listener uses, and no other.
func TestCertificates(t *testing.T) {
	own := metricsOptions{address: "192.0.2.1:9477", clientCA: "/m/ca.crt"}
	for name, test := range map[string]struct {
		o    options
		want map[string]string
	}{
		"a socket only":       {options{root: "/r", metrics: metricsOptions{address: "127.0.0.1:1"}}, map[string]string{}},
		"--listen":            {options{root: "/r", listen: ":1"}, map[string]string{"server": "/r/tls/server.crt", "client-ca": "/r/tls/ca.crt"}},
		"--dial":              {options{root: "/r", dial: "m:1"}, map[string]string{"server": "/r/tls/server.crt", "client-ca": "/r/tls/ca.crt"}},
		"--metrics-client-ca": {options{root: "/r", metrics: own}, map[string]string{"server": "/r/tls/server.crt", "metrics-client-ca": "/m/ca.crt"}},
		"files of the user": {
			options{root: "/r", listen: ":1", metrics: own, tls: credentials.Server{Cert: "/t/a.crt", ClientCA: "/t/b.crt"}},
			map[string]string{"server": "/t/a.crt", "client-ca": "/t/b.crt", "metrics-client-ca": "/m/ca.crt"},
		},
	} {
		if got := test.o.certificates(); !maps.Equal(got, test.want) {
			t.Errorf("%s: found %v, want %v", name, got, test.want)
		}
	}
}
