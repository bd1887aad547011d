package manager

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	runtimecatalog "sigs.k8s.io/cluster-api/api/runtime/catalog"
	runtimehooksv1 "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
	"sigs.k8s.io/cluster-api/exp/runtime/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
)

// webhookServer returns the server of the webhooks. Providers can add hooks of Cluster API's runtime SDK to it.
func webhookServer(flags *Flags, tlsOptions []func(*tls.Config)) (webhook.Server, error) {
	catalog := runtimecatalog.New()
	if err := runtimehooksv1.AddToCatalog(catalog); err != nil {
		return nil, err
	}
	hooks := guarded{name: flags.HookClientName, slots: make(chan struct{}, maxHooks)}
	if flags.HookClientCA != "" {
		ca, err := os.ReadFile(flags.HookClientCA)
		if err != nil {
			return nil, fmt.Errorf("--runtime-extension-client-ca-file: %w", err)
		}
		hooks.clients = x509.NewCertPool()
		if !hooks.clients.AppendCertsFromPEM(ca) {
			return nil, fmt.Errorf("--runtime-extension-client-ca-file: %s contains no certificate", flags.HookClientCA)
		}
	}
	// Three kinds of clients use the port: the API server, without a certificate for webhooks, and with that of its front proxy
	// for the API of machines; and Cluster API core. Each handler verifies the certificates of its own clients.
	tlsOptions = append(slices.Clone(tlsOptions), func(c *tls.Config) { c.ClientAuth = tls.RequestClientCert })
	s, err := server.New(server.Options{
		Catalog: catalog,
		Host:    flags.WebhookHost, Port: flags.WebhookPort, CertDir: flags.WebhookCertDir,
		CertName: flags.WebhookCertName, KeyName: flags.WebhookKeyName, TLSOpts: tlsOptions,
	})
	if err != nil {
		return nil, err
	}
	hooks.Server = s.Server
	s.Server = hooks
	return s, nil
}

// Limits of requests. Without an authority every client that reaches the port can call hooks.
const (
	// maxHooks is the number of requests at the same time. Further ones get an error, after which core asks again.
	maxHooks = 16
	// maxHookBody is the size of a request in bytes. The largest one has two MachineSets with their templates, each of which the
	// API server limits to 1.5 MiB.
	maxHookBody = 10 << 20
	// sendTimeout bounds the time in which a client sends its request, and answerTimeout that until it has read the answer.
	sendTimeout, answerTimeout = 10 * time.Second, 30 * time.Second

	// conversionPath is the path of the conversion webhook in all CRDs.
	conversionPath = "/convert"
	// maxConversionBody is the size of a conversion request in bytes. It contains all objects of a page: most clients ask for 500. The number of
	// requests has no limit: the API server has no client certificate, and other clients would take its place.
	maxConversionBody = 64 << 20
)

// guarded limits the hooks, and answers them only to a client with a verified certificate if there is an authority.
type guarded struct {
	webhook.Server

	// clients are the authorities of the clients; nil without an authority.
	clients *x509.CertPool
	// name is the required common name; any if empty.
	name  string
	slots chan struct{}
}

// Register implements webhook.Server.
func (g guarded) Register(path string, handler http.Handler) {
	if strings.HasPrefix(path, "/"+runtimehooksv1.GroupVersion.Group+"/") {
		handler = g.bounded(handler)
		if g.clients != nil {
			handler = g.verified(handler)
		}
	}
	if path == conversionPath {
		handler = limited(handler, maxConversionBody)
	}
	g.Server.Register(path, handler)
}

func (g guarded) verified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !g.admits(r.TLS) {
			http.Error(w, "the hooks require the client certificate of Cluster API core", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// admits reports whether the client of a connection has a certificate of the authority, with the required name.
func (g guarded) admits(state *tls.ConnectionState) bool {
	if state == nil || len(state.PeerCertificates) == 0 {
		return false
	}
	own, intermediates := state.PeerCertificates[0], x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err := own.Verify(x509.VerifyOptions{Roots: g.clients, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil && (g.name == "" || own.Subject.CommonName == g.name)
}

func (g guarded) bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case g.slots <- struct{}{}:
			defer func() { <-g.slots }()
		default:
			http.Error(w, fmt.Sprintf("more than %d hooks at the same time: try again later", cap(g.slots)), http.StatusServiceUnavailable)
			return
		}
		limited(next, maxHookBody).ServeHTTP(w, r)
	})
}

// limited limits the size of a request in bytes, and the time in which the client sends it and reads the answer.
func limited(next http.Handler, size int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Not every writer has deadlines; those of the server have.
		control, now := http.NewResponseController(w), time.Now()
		_ = control.SetReadDeadline(now.Add(sendTimeout))
		_ = control.SetWriteDeadline(now.Add(answerTimeout))
		r.Body = http.MaxBytesReader(w, r.Body, size)
		next.ServeHTTP(w, r)
	})
}
