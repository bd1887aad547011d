package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"capstan.dev/capstan/internal/host"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/dialing"
)

// addListenFlags adds the flags of the TCP listener.
func (o *options) addListenFlags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", "", "address, host:port, for TCP with mutual TLS, in addition to the socket (default: none)")
	f.StringVar(&o.dial, "dial", "", "address, host:port, of a manager (its --host-listen-address) that capstand dials, with mutual TLS, for a host that the manager does not reach: a CapstanHost with the name of --name and with connection FromHost (default: none)")
	f.StringVar(&o.tls.Cert, "tls-cert", "", "certificate for --listen and --dial; 'capstan host credentials' creates it (default: <root>/tls/server.crt)")
	f.StringVar(&o.tls.Key, "tls-key", "", "private key of --tls-cert (default: <root>/tls/server.key)")
	f.StringVar(&o.tls.ClientCA, "client-ca", "", "certificate authority of clients (default: <root>/tls/ca.crt)")
	f.StringVar(&o.tls.ClientName, "client-name", credentials.ClientName, "common name or DNS name that client certificates must have; any client with such a certificate has root access to this host")
}

// server answers requests on a listener until the context ends.
type server interface {
	Serve(context.Context, net.Listener, ...grpc.ServerOption) error
}

// serve answers requests on the socket, with --listen on TCP, and with --dial on connections to a manager. An error of one listener
// ends all.
func (o options) serve(ctx context.Context, socket host.Socket, s server, log *slog.Logger) error {
	local, err := socket.Listen()
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	if o.dial != "" {
		dialled, err := o.dialManager(ctx, log)
		if err != nil {
			_ = local.Close()
			return err
		}
		log.Info("dialling the manager with mutual TLS", "address", o.dial)
		g.Go(func() error {
			return s.Serve(ctx, dialled, grpc.Creds(credentials.Handshaken()), grpc.ConnectionTimeout(credentials.HandshakeTimeout))
		})
	}
	if o.listen != "" {
		remote, err := o.listenTCP(ctx, log)
		if err != nil {
			_ = local.Close()
			return err
		}
		log.Info("serving over TCP with mutual TLS", "address", remote.Addr())
		g.Go(func() error {
			return s.Serve(ctx, remote, grpc.Creds(credentials.Handshaken()), grpc.ConnectionTimeout(credentials.HandshakeTimeout))
		})
	}
	if o.listen != "" || o.dial != "" {
		go o.tlsFiles().KeepRenewed(ctx, func(err error) { log.Warn("TLS", "error", err) })
	}
	g.Go(func() error { return s.Serve(ctx, local) })
	return g.Wait()
}

// tlsFiles are the certificate files of the TCP listener.
func (o options) tlsFiles() credentials.Server {
	files := credentials.In(filepath.Join(o.root, "tls"))
	files.ClientName = o.tls.ClientName
	files.Cert, files.Key, files.ClientCA = cmp.Or(o.tls.Cert, files.Cert), cmp.Or(o.tls.Key, files.Key), cmp.Or(o.tls.ClientCA, files.ClientCA)
	return files
}

// listenTCP returns a listener with the connections of authenticated clients.
func (o options) listenTCP(ctx context.Context, log *slog.Logger) (net.Listener, error) {
	raw, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return nil, err
	}
	listener, err := o.tlsFiles().Listen(raw, func(err error) { log.Warn("TLS", "error", err) })
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("--listen %s: %w", o.listen, err)
	}
	return listener, nil
}

// dialManager begins to dial the manager. It reads the certificates for each connection.
func (o options) dialManager(ctx context.Context, log *slog.Logger) (net.Listener, error) {
	if _, _, err := net.SplitHostPort(o.dial); err != nil {
		return nil, fmt.Errorf("expected --dial host:port, found %q", o.dial)
	}
	config := func() (*tls.Config, error) { return o.tlsFiles().DialConfig(o.name) }
	if _, err := config(); err != nil {
		return nil, fmt.Errorf("--dial %s: %w", o.dial, err)
	}
	return dialing.Dialer{Address: o.dial, Config: config, Spare: dialing.DefaultSpare, Log: log}.Listen(ctx), nil
}
