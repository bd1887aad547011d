package credentials

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"golang.org/x/time/rate"
)

const (
	// HandshakeTimeout limits the TLS handshake of a peer.
	HandshakeTimeout = 10 * time.Second
	// MaxHandshakes bounds the handshakes at once. When all places are taken, a new peer displaces the oldest handshake of the source that
	// has most of them, so peers without a certificate keep no other out.
	MaxHandshakes = 256
	// acceptPause follows on a failure to accept, for example without a free file descriptor.
	acceptPause = 100 * time.Millisecond
	// refusalPause is the shortest time between two reports of refused peers.
	refusalPause = 10 * time.Second
)

// Gate authenticates the peers of a listener, a bounded number at a time.
type Gate struct {
	// Timeout of a handshake.
	Timeout time.Duration
	// Handshake authenticates a peer. The returned function takes its connection.
	Handshake func(context.Context, net.Conn) (take func(), err error)
	// Refused gets the address of a peer that was not accepted, and the reason, at a low rate. The address is empty if the listener failed.
	Refused func(peer string, reason error)

	handshakes handshakes
	refusals   rate.Sometimes
}

// Serve accepts connections until ctx ends. It closes the listener.
func (g *Gate) Serve(ctx context.Context, listener net.Listener) {
	g.refusals.Interval = refusalPause
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	for {
		conn, err := listener.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return
		case err != nil:
			g.refused("", err)
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		h := g.handshakes.begin(conn)
		go func() {
			take, err := g.handshake(ctx, conn)
			g.handshakes.end(h)
			if err != nil {
				_ = conn.Close()
				g.refused(conn.RemoteAddr().String(), err)
				return
			}
			take()
		}()
	}
}

func (g *Gate) handshake(ctx context.Context, conn net.Conn) (take func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	return g.Handshake(ctx, conn)
}

func (g *Gate) refused(peer string, reason error) {
	g.refusals.Do(func() { g.Refused(peer, reason) })
}

// Listen returns a listener with the authenticated connections of another one, after mutual TLS as in Config. Handshaken is their transport.
func (s Server) Listen(raw net.Listener, warn func(error)) (net.Listener, error) {
	return s.listen(raw, HandshakeTimeout, warn)
}

func (s Server) listen(raw net.Listener, timeout time.Duration, warn func(error)) (net.Listener, error) {
	config, err := s.Config("h2", warn)
	if err != nil {
		return nil, err
	}
	l := &authenticating{Listener: raw, passed: make(chan net.Conn)}
	l.ctx, l.stop = context.WithCancel(context.Background())
	gate := Gate{
		Timeout: timeout,
		Handshake: func(ctx context.Context, conn net.Conn) (func(), error) {
			c := tls.Server(conn, config)
			return func() { l.pass(c) }, c.HandshakeContext(ctx)
		},
		Refused: func(peer string, reason error) {
			if peer == "" { // Config has warned of clients that are worth it.
				warn(reason)
			}
		},
	}
	go gate.Serve(l.ctx, raw)
	return l, nil
}

// authenticating is a listener behind a Gate.
type authenticating struct {
	net.Listener

	passed chan net.Conn
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
}

func (l *authenticating) pass(conn *tls.Conn) {
	select {
	case l.passed <- conn:
	case <-l.ctx.Done():
		_ = conn.NetConn().Close()
	}
}

// Accept implements net.Listener.
func (l *authenticating) Accept() (net.Conn, error) {
	select {
	case conn := <-l.passed:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *authenticating) Close() error {
	l.stop()
	return l.Listener.Close()
}
