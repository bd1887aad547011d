package manager

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"capstan.dev/capstan/internal/pki"
)

// recorded records the handlers of a server.
type recorded struct {
	webhook.Server
	handlers map[string]http.Handler
}

func (r recorded) Register(path string, handler http.Handler) { r.handlers[path] = handler }

// Only Cluster API core can call hooks if a client authority is configured. Webhooks stay open for the API server, which has
// no certificate.
func TestGuardedHooks(t *testing.T) {
	r := recorded{handlers: map[string]http.Handler{}}
	trusted, other := newAuthority(t), newAuthority(t)
	clients := x509.NewCertPool()
	clients.AddCert(trusted.Cert)
	g := guarded{Server: r, clients: clients, name: "core", slots: make(chan struct{}, 1)}
	const hook, validation = "/hooks.runtime.cluster.x-k8s.io/v1alpha1/updatemachine/x", "/validate"
	for _, path := range []string{hook, validation} {
		g.Register(path, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }))
	}
	client := func(by pki.Authority, name string, usages []x509.ExtKeyUsage) *tls.ConnectionState {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := by.Sign(pki.Leaf{CommonName: name, Usages: usages}, key.Public(), time.Hour, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}}
	}
	for name, test := range map[string]struct {
		path  string
		state *tls.ConnectionState
		want  int
	}{
		"core":                            {hook, client(trusted, "core", pki.Client), http.StatusOK},
		"another client":                  {hook, client(trusted, "other", pki.Client), http.StatusForbidden},
		"a certificate of nobody":         {hook, client(other, "core", pki.Client), http.StatusForbidden},
		"a certificate of a server":       {hook, client(trusted, "core", pki.Server), http.StatusForbidden},
		"no certificate":                  {hook, &tls.ConnectionState{}, http.StatusForbidden},
		"no TLS":                          {hook, nil, http.StatusForbidden},
		"a webhook without a certificate": {validation, &tls.ConnectionState{}, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			w, request := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, test.path, nil)
			request.TLS = test.state
			r.handlers[test.path].ServeHTTP(w, request)
			if w.Code != test.want {
				t.Errorf("status %d, want %d", w.Code, test.want)
			}
		})
	}
}

func newAuthority(t *testing.T) pki.Authority {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	authority, err := pki.NewAuthority("test", key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return authority
}

// TestBoundedHooks: a hook that is called too often at the same time, or with too large a request, is an error. Webhooks have no
// limit. The slot of an ended request is free again.
func TestBoundedHooks(t *testing.T) {
	r := recorded{handlers: map[string]http.Handler{}}
	g := guarded{Server: r, slots: make(chan struct{}, 1)}
	const hook, validation = "/hooks.runtime.cluster.x-k8s.io/v1alpha1/updatemachine/x", "/validate"
	entered, leave := make(chan struct{}), make(chan struct{})
	for _, path := range []string{hook, validation} {
		g.Register(path, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Wait") != "" {
				entered <- struct{}{}
				<-leave
			}
			if _, err := io.ReadAll(r.Body); err != nil {
				http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
			}
		}))
	}
	call := func(path, wait string, size int) int {
		w, request := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, path, bytes.NewReader(make([]byte, size)))
		request.Header.Set("Wait", wait)
		r.handlers[path].ServeHTTP(w, request)
		return w.Code
	}
	var first sync.WaitGroup
	first.Go(func() {
		if code := call(hook, "yes", maxHookBody); code != http.StatusOK {
			t.Errorf("the first one: %d", code)
		}
	})
	<-entered
	if code := call(hook, "", 1); code != http.StatusServiceUnavailable {
		t.Errorf("the second one: %d", code)
	}
	if code := call(validation, "", maxHookBody+1); code != http.StatusOK {
		t.Errorf("a webhook: %d", code)
	}
	close(leave)
	first.Wait()
	if code := call(hook, "", 1); code != http.StatusOK {
		t.Errorf("after the first one: %d", code)
	}
	if code := call(hook, "", maxHookBody+1); code != http.StatusRequestEntityTooLarge {
		t.Errorf("a large request: %d", code)
	}
}

// TestConversions: a conversion that is too large is an error, and one whose client does not read the answer ends.
func TestConversions(t *testing.T) {
	r := recorded{handlers: map[string]http.Handler{}}
	guarded{Server: r}.Register(conversionPath, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(w, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		}
	}))
	for size, want := range map[int64]int{1: http.StatusOK, maxConversionBody: http.StatusOK, maxConversionBody + 1: http.StatusRequestEntityTooLarge} {
		w := &deadlines{ResponseWriter: httptest.NewRecorder()}
		code := http.StatusOK
		w.status = func(c int) { code = c }
		r.handlers[conversionPath].ServeHTTP(w, httptest.NewRequest(http.MethodPost, conversionPath, io.LimitReader(zeros{}, size)))
		if code != want || w.read.IsZero() || w.written.IsZero() {
			t.Errorf("%d bytes: status %d, want %d; deadlines %s and %s", size, code, want, w.read, w.written)
		}
	}
}

// deadlines is a writer that records its deadlines, and throws the answer away.
type deadlines struct {
	http.ResponseWriter
	read, written time.Time
	status        func(int)
}

func (d *deadlines) Write(p []byte) (int, error)        { return len(p), nil }
func (d *deadlines) WriteHeader(code int)               { d.status(code) }
func (d *deadlines) SetReadDeadline(t time.Time) error  { d.read = t; return nil }
func (d *deadlines) SetWriteDeadline(t time.Time) error { d.written = t; return nil }

// zeros is an endless reader.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
