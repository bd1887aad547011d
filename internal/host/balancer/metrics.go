package balancer

import (
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"capstan.dev/capstan/internal/atomicfile"
)

// MetricsSocket is the socket in the balancer's folder that answers GET /metrics in Prometheus' text format.
const MetricsSocket = "metrics.sock"

// Results of connections.
const (
	served    = "served"
	refused   = "refused"
	noHello   = "no_hello"
	noBackend = "no_backend"
)

type metrics struct {
	registry    *prometheus.Registry
	connections *prometheus.CounterVec
	parked      prometheus.Gauge
}

var (
	backendUp          = prometheus.NewDesc("capstan_balancer_backend_up", "1 if the API server is ready, else 0.", []string{"backend"}, nil)
	backendConnections = prometheus.NewDesc("capstan_balancer_backend_connections", "Open connections to the backend.", []string{"backend"}, nil)
)

// backends collects the metrics of the backends that the configuration has now.
type backends struct{ *pool }

// Describe implements prometheus.Collector.
func (backends) Describe(descs chan<- *prometheus.Desc) {
	descs <- backendUp
	descs <- backendConnections
}

// Collect implements prometheus.Collector.
func (b backends) Collect(metrics chan<- prometheus.Metric) {
	b.load(func(address string, healthy bool, open int64) {
		up := 0.0
		if healthy {
			up = 1
		}
		metrics <- prometheus.MustNewConstMetric(backendUp, prometheus.GaugeValue, up, address)
		metrics <- prometheus.MustNewConstMetric(backendConnections, prometheus.GaugeValue, float64(open), address)
	})
}

func newMetrics(g *gate, p *pool) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		connections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capstan_balancer_connections_total",
			Help: "Connections by result: served, refused (the source reached its share), no_hello (no TLS handshake in time), no_backend.",
		}, []string{"result"}),
		parked: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "capstan_balancer_parked_connections", Help: "Connections of clients that wait for a backend.",
		}),
	}
	for _, result := range []string{served, refused, noHello, noBackend} {
		m.connections.WithLabelValues(result)
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	m.registry.MustRegister(m.connections, m.parked, backends{p},
		gauge("capstan_balancer_connections", "Open connections.", func() float64 { open, _, _ := g.load(); return float64(open) }),
		gauge("capstan_balancer_connections_limit", "Largest number of open connections.", func() float64 { return float64(g.most) }),
		gauge("capstan_balancer_sources", "Addresses (IPv4) and networks (IPv6, /64) with open connections.", func() float64 { _, sources, _ := g.load(); return float64(sources) }),
		gauge("capstan_balancer_healthy_backends", "Backends whose API server is ready.", func() float64 { return float64(len(p.healthy())) }),
	)
	return m
}

// serve answers requests until the listener is closed.
func (m *metrics) serve(listener net.Listener) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	_ = server.Serve(listener)
}

// listenUnix listens on a socket that only its owner can open. It replaces the socket of a previous balancer.
func listenUnix(path string) (*net.UnixListener, error) {
	if err := atomicfile.Remove(path); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	// When this listener is closed, the path may belong to the next balancer.
	listener.SetUnlinkOnClose(false)
	return listener, os.Chmod(path, 0o600)
}
