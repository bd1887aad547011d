package componentmetrics

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

// fixture has a component that trusts everybody, one that authenticates, and one that does not answer.
func fixture(t *testing.T) *Server {
	t.Helper()
	tells := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.URL.String()+" token="+r.Header.Get("Authorization"))
	})
	plain, secure := httptest.NewServer(tells), httptest.NewTLSServer(tells)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	ca := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return &Server{
		Components: map[string]Component{
			"etcd": {URL: plain.URL + "/metrics"}, "kube-scheduler": {URL: secure.URL + "/metrics", Authenticates: true}, "kube-proxy": {URL: "http://127.0.0.1:1/metrics"},
		},
		CAFile: ca, Log: slog.New(slog.DiscardHandler),
		Review: func(_ context.Context, token string) error {
			switch token {
			case "reader":
				return nil
			case "lost":
				return errors.New("no API server")
			}
			return ErrRefused
		},
	}
}

func TestHandler(t *testing.T) {
	handler := fixture(t).Handler()
	for name, test := range map[string]struct {
		method, path, authorization string
		code                        int
		body                        string
	}{
		"etcd without the token":      {"GET", "/metrics/etcd?x=1", "Bearer reader", 200, "/metrics token="},
		"a component that asks":       {"GET", "/metrics/kube-scheduler", "Bearer reader", 200, "/metrics token=Bearer reader"},
		"a component that is away":    {"GET", "/metrics/kube-proxy", "Bearer reader", 502, "does not answer"},
		"unknown component":           {"GET", "/metrics/kubelet", "Bearer reader", 404, "not found"},
		"other paths":                 {"GET", "/metrics/etcd/../../v3/kv", "Bearer reader", 307, ""},
		"profile":                     {"GET", "/debug/pprof", "Bearer reader", 404, ""},
		"no token":                    {"GET", "/metrics/etcd", "", 401, "expected a bearer token"},
		"basic authentication":        {"GET", "/metrics/etcd", "Basic cmVhZGVy", 401, ""},
		"no right":                    {"GET", "/metrics/etcd", "Bearer stranger", 403, "capstan:metrics-reader"},
		"no right, unknown component": {"GET", "/metrics/kubelet", "Bearer stranger", 403, ""},
		"API server away":             {"GET", "/metrics/etcd", "Bearer lost", 503, "does not answer"},
		"writes":                      {"POST", "/metrics/etcd", "Bearer reader", 405, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(test.method, test.path, nil)
			r.Header.Set("Authorization", test.authorization)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			if body := w.Body.String(); w.Code != test.code || !strings.Contains(body, test.body) || strings.HasPrefix(test.body, "/") && body != test.body {
				t.Errorf("%d %q, expected %d %q", w.Code, body, test.code, test.body)
			}
		})
	}
}

// A client is reviewed once for several scrapes. A refused one is reviewed each time.
func TestReviewsAreRemembered(t *testing.T) {
	s := fixture(t)
	reviews, review := 0, s.Review
	s.Review = func(ctx context.Context, token string) error { reviews++; return review(ctx, token) }
	handler := s.Handler()
	for _, token := range []string{"reader", "reader", "stranger", "stranger", "reader"} {
		r := httptest.NewRequest(http.MethodGet, "/metrics/etcd", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		handler.ServeHTTP(httptest.NewRecorder(), r)
	}
	if reviews != 3 {
		t.Errorf("%d reviews, expected 3", reviews)
	}
	s.allowed = map[[32]byte]time.Time{}
	for i := range maxConnections + 1 {
		s.remember(string(rune('a' + i)))
	}
	if len(s.allowed) > maxConnections {
		t.Errorf("%d tokens are remembered", len(s.allowed))
	}
}

// Scrapes that wait for a component do not add up.
func TestScrapesAreBounded(t *testing.T) {
	s := fixture(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s.Review = func(context.Context, string) error { entered <- struct{}{}; <-leave; return ErrRefused }
	handler, done := s.Handler(), make(chan struct{})
	scrape := func() int {
		r := httptest.NewRequest(http.MethodGet, "/metrics/etcd", nil)
		r.Header.Set("Authorization", "Bearer stranger")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code
	}
	for range maxScrapes {
		go func() { scrape(); done <- struct{}{} }()
		<-entered
	}
	if code := scrape(); code != http.StatusServiceUnavailable {
		t.Errorf("one scrape too many: %d", code)
	}
	close(leave)
	for range maxScrapes {
		<-done
	}
}

// The server uses the certificate that the file has at the time of the connection, and ends connections that send nothing.
func TestServe(t *testing.T) {
	s := fixture(t)
	s.Certificate = filepath.Join(t.TempDir(), "kubelet-server-current.pem")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx, listener) }()
	names := []string{}
	for _, name := range []string{"first", "second"} {
		writePair(t, s.Certificate, name)
		conn, err := tls.Dial("tcp", listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
		if err != nil {
			t.Fatal(err)
		}
		state := conn.ConnectionState()
		names = append(names, state.PeerCertificates[0].Subject.CommonName, state.NegotiatedProtocol)
		_ = conn.Close()
	}
	if want := []string{"first", "http/1.1", "second", "http/1.1"}; !slices.Equal(names, want) {
		t.Errorf("found %q, expected %q", names, want)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func writePair(t *testing.T, path, name string) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	authority, err := pki.NewAuthority(name, key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := pki.EncodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, slices.Concat(pki.EncodeCert(authority.Cert), encoded), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestComponents(t *testing.T) {
	names := func(c nodeconfig.NodeConfiguration) string {
		var all []string
		for name := range Components(&c) {
			all = append(all, name)
		}
		slices.Sort(all)
		return strings.Join(all, " ")
	}
	proxy := nodeconfig.Network{KubeProxy: nodeconfig.KubeProxyNFTables}
	external := &nodeconfig.ControlPlane{ExternalEtcd: &nodeconfig.ExternalEtcd{}}
	for want, c := range map[string]nodeconfig.NodeConfiguration{
		"":           {Role: nodeconfig.RoleWorker},
		"kube-proxy": {Role: nodeconfig.RoleWorker, Network: proxy},
		"etcd kube-controller-manager kube-proxy kube-scheduler": {Role: nodeconfig.RoleInit, Network: proxy, ControlPlane: &nodeconfig.ControlPlane{}},
		"kube-controller-manager kube-scheduler":                 {Role: nodeconfig.RoleInit, ControlPlane: external},
	} {
		if got := names(c); got != want {
			t.Errorf("%q, expected %q", got, want)
		}
	}
}
