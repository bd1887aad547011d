package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"capstan.dev/capstan/internal/host"
	"capstan.dev/capstan/internal/host/credentials"
)

// addListenFlags adds the flags of the TCP listener.
func (o *options) addListenFlags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", "", "address, host:port, to serve on over TCP with mutual TLS, beside the socket (default none)")
	f.StringVar(&o.tls.Cert, "tls-cert", "", "certificate for --listen (default <root>/tls/server.crt, as `capstan host credentials` makes it)")
	f.StringVar(&o.tls.Key, "tls-key", "", "private key of --tls-cert (default <root>/tls/server.key)")
	f.StringVar(&o.tls.ClientCA, "client-ca", "", "authority of the certificates that clients must have (default <root>/tls/ca.crt)")
	f.StringVar(&o.tls.ClientName, "client-name", credentials.ClientName, "common name, or DNS name, that the certificates of clients must have; who has one is root on this host")
}

// handshakeTimeout bounds how long a connection may take to say who it is.
const handshakeTimeout = 10 * time.Second

// server answers on a listener until the context is done.
type server interface {
	Serve(context.Context, net.Listener, ...grpc.ServerOption) error
}

// serve answers on the socket and, if asked to, on TCP. One that cannot go on ends the other one.
func (o options) serve(ctx context.Context, socket host.Socket, s server, log *slog.Logger) error {
	local, err := socket.Listen()
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	if o.listen != "" {
		remote, transport, err := o.listenTCP(ctx, log)
		if err != nil {
			_ = local.Close()
			return err
		}
		log.Info("serving over TCP with mutual TLS", "address", remote.Addr())
		g.Go(func() error { return s.Serve(ctx, remote, transport, grpc.ConnectionTimeout(handshakeTimeout)) })
	}
	g.Go(func() error { return s.Serve(ctx, local) })
	return g.Wait()
}

// tlsFiles are those of the TCP listener.
func (o options) tlsFiles() credentials.Server {
	files := credentials.In(filepath.Join(o.root, "tls"))
	files.ClientName = o.tls.ClientName
	files.Cert, files.Key, files.ClientCA = cmp.Or(o.tls.Cert, files.Cert), cmp.Or(o.tls.Key, files.Key), cmp.Or(o.tls.ClientCA, files.ClientCA)
	return files
}

func (o options) listenTCP(ctx context.Context, log *slog.Logger) (net.Listener, grpc.ServerOption, error) {
	files, warn := o.tlsFiles(), func(err error) { log.Warn("TLS", "error", err) }
	transport, err := files.Transport(warn)
	if err != nil {
		return nil, nil, fmt.Errorf("--listen %s: %w", o.listen, err)
	}
	go files.KeepRenewed(ctx, warn)
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.listen)
	return listener, grpc.Creds(transport), err
}
