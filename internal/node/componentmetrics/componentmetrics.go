// Package componentmetrics serves the metrics of the components of a machine that listen on loopback only: kube-proxy, and on
// control plane machines etcd, the scheduler and the controller manager. It serves them as the kubelet serves its own: with the
// kubelet's certificate, to clients that may get nodes/metrics of the machine's Node.
//
// Layer: node. Allowed imports: api, library, contract.
package componentmetrics

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	// Port on the addresses of the machine.
	Port = 10253
	// maxConnections and maxScrapes bound the load by clients. Three servers of Prometheus scrape four components each.
	maxConnections, maxScrapes = 64, 12
	headerTimeout              = 5 * time.Second
	scrapeTimeout              = 30 * time.Second
	// remembered is the time for which a client that was allowed is not reviewed again.
	remembered = 30 * time.Second
)

// Component is one component of the machine.
type Component struct {
	// URL of its metrics on loopback.
	URL string
	// Authenticates is true if the component itself authenticates its clients. It gets the client's token.
	Authenticates bool
}

// Components returns the components of a machine by their names.
func Components(config *nodeconfig.NodeConfiguration) map[string]Component {
	all := map[string]Component{}
	if config.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		all["kube-proxy"] = Component{URL: "http://127.0.0.1:10249/metrics"}
	}
	if config.Role == nodeconfig.RoleWorker {
		return all
	}
	all["kube-controller-manager"] = Component{URL: "https://127.0.0.1:10257/metrics", Authenticates: true}
	all["kube-scheduler"] = Component{URL: "https://127.0.0.1:10259/metrics", Authenticates: true}
	if config.ControlPlane.ExternalEtcd == nil {
		all["etcd"] = Component{URL: "http://127.0.0.1:2381/metrics"}
	}
	return all
}

// ErrRefused is the error for a token of nobody, or of a client without the right.
var ErrRefused = errors.New("refused")

// Server serves the metrics of the components at /metrics/NAME.
type Server struct {
	Components map[string]Component
	// CAFile contains the authority of the components' certificates.
	CAFile string
	// Certificate is the file with certificate and key of the server.
	Certificate string
	// Review returns ErrRefused unless the client with the token may get the metrics of the machine.
	Review func(ctx context.Context, token string) error
	Log    *slog.Logger

	mu      sync.Mutex
	allowed map[[sha256.Size]byte]time.Time
}

// Serve serves on the listener until ctx ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout, WriteTimeout: scrapeTimeout, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, GetCertificate: s.certificate},
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	err := server.ServeTLS(netutil.LimitListener(listener, maxConnections), "", "")
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// certificate reads the file for each handshake, because the kubelet renews it.
func (s *Server) certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(s.Certificate, s.Certificate)
	return &pair, err
}

// Handler answers GET /metrics/NAME.
func (s *Server) Handler() http.Handler {
	scrapes := make(chan struct{}, maxScrapes)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics/{component}", func(w http.ResponseWriter, r *http.Request) {
		select {
		case scrapes <- struct{}{}:
			defer func() { <-scrapes }()
		default:
			http.Error(w, fmt.Sprintf("%d scrapes run already", maxScrapes), http.StatusServiceUnavailable)
			return
		}
		if code, err := s.authorize(r); err != nil {
			http.Error(w, err.Error(), code)
			return
		}
		component, found := s.Components[r.PathValue("component")]
		if !found {
			http.NotFound(w, r)
			return
		}
		s.forward(component).ServeHTTP(w, r)
	})
	return mux
}

// authorize returns the status and the error for a client that must not read metrics.
func (s *Server) authorize(r *http.Request) (int, error) {
	token, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !found || token == "" {
		return http.StatusUnauthorized, errors.New("expected a bearer token")
	}
	if s.remembers(token) {
		return http.StatusOK, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), headerTimeout)
	defer cancel()
	switch err := s.Review(ctx, token); {
	case errors.Is(err, ErrRefused):
		return http.StatusForbidden, errors.New("expected a client with the right to get nodes/metrics of this Node: see the ClusterRole capstan:metrics-reader")
	case err != nil:
		s.Log.Warn("Cannot review a client of metrics", "error", err)
		return http.StatusServiceUnavailable, errors.New("the API server does not answer")
	}
	s.remember(token)
	return http.StatusOK, nil
}

func (s *Server) remembers(token string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.allowed[sha256.Sum256([]byte(token))])
}

func (s *Server) remember(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.allowed == nil || len(s.allowed) >= maxConnections {
		s.allowed = map[[sha256.Size]byte]time.Time{}
	}
	s.allowed[sha256.Sum256([]byte(token))] = time.Now().Add(remembered)
}

// forward returns a proxy to a component. Only a component that authenticates gets the token.
func (s *Server) forward(c Component) *httputil.ReverseProxy {
	target, err := url.Parse(c.URL)
	pool := x509.NewCertPool()
	if data, readErr := os.ReadFile(s.CAFile); readErr == nil { // read each time: the authority rotates
		pool.AppendCertsFromPEM(data)
	}
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL, r.Out.Host = target, ""
			if !c.Authenticates {
				r.Out.Header.Del("Authorization")
			}
		},
		Transport: &http.Transport{
			DisableKeepAlives: true, ResponseHeaderTimeout: scrapeTimeout,
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
		},
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, failed error) {
			http.Error(w, fmt.Sprintf("the component does not answer: %v", errors.Join(err, failed)), http.StatusBadGateway)
		},
	}
}
