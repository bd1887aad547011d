package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/host/credentials"
)

// metricsOptions describe the listener of metrics.
type metricsOptions struct{ address, clientCA, clientName string }

func (o *metricsOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.address, "metrics-address", "", "address, IP:port, for metrics in Prometheus' format; an address other than of the loopback device needs --metrics-client-ca (default: none)")
	f.StringVar(&o.clientCA, "metrics-client-ca", "", "certificate authority of the clients of --metrics-address; the server certificate is --tls-cert")
	f.StringVar(&o.clientName, "metrics-client-name", "prometheus", "common name or DNS name that the certificates of these clients must have")
}

// serveMetrics serves metrics until the context ends. It returns an error if it cannot listen.
func (o options) serveMetrics(ctx context.Context, handler http.Handler, log *slog.Logger) error {
	if o.metrics.address == "" {
		return nil
	}
	listener, err := o.listenMetrics(ctx, log)
	if err != nil {
		return fmt.Errorf("--metrics-address %s: %w", o.metrics.address, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", handler)
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: credentials.HandshakeTimeout, WriteTimeout: time.Minute, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	log.Info("serving metrics", "address", listener.Addr(), "clientCA", o.metrics.clientCA)
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() { _ = server.Serve(listener) }()
	return nil
}

// listenMetrics uses mutual TLS on each address that other hosts can reach.
func (o options) listenMetrics(ctx context.Context, log *slog.Logger) (net.Listener, error) {
	address, err := netip.ParseAddrPort(o.metrics.address)
	if err != nil {
		return nil, fmt.Errorf("expected IP:port: %w", err)
	}
	var config *tls.Config
	switch {
	case o.metrics.clientCA != "":
		files := o.tlsFiles()
		files.ClientCA, files.ClientName = o.metrics.clientCA, o.metrics.clientName
		if config, err = files.Config("http/1.1", func(err error) { log.Warn("TLS of metrics", "error", err) }); err != nil {
			return nil, err
		}
	case !address.Addr().IsLoopback():
		return nil, fmt.Errorf("expected an address of the loopback device, or --metrics-client-ca for mutual TLS")
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.metrics.address)
	if err != nil || config == nil {
		return listener, err
	}
	return tls.NewListener(listener, config), nil
}

// certificates returns the paths of the certificates in use, by their names in the metrics.
func (o options) certificates() map[string]string {
	paths, files := map[string]string{}, o.tlsFiles()
	if o.listen != "" || o.dial != "" {
		paths["server"], paths["client-ca"] = files.Cert, files.ClientCA
	}
	if o.metrics.address != "" && o.metrics.clientCA != "" {
		paths["server"], paths["metrics-client-ca"] = files.Cert, o.metrics.clientCA
	}
	return paths
}
