// Package dialing lets capstand serve a manager that cannot reach the host: the host opens the connections.
//
// Layer: host. Allowed imports: api, library, contract.
package dialing

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"capstan.dev/capstan/internal/backoff"
)

const (
	// timeout of the connection, and of the TLS handshake.
	timeout = 10 * time.Second
	// maxUsed bounds the connections that the manager uses at once: one for its reconcilers, one for each shell, log or upload. A
	// manager admits 128 of the latter (package machineaccess), so its users cannot keep the reconcilers out.
	maxUsed = 256

	// DefaultSpare is the longest life of a spare connection. A middlebox may have forgotten it, and the certificate may be renewed.
	DefaultSpare = time.Minute

	minPause = 100 * time.Millisecond
	maxPause = 5 * time.Second
)

// keepAlive keeps the entry of a spare connection in the tables of NAT, and finds out that the manager has gone silently. gRPC does
// both for a connection in use.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Dialer connects a host to its manager.
type Dialer struct {
	// Address of the manager, host:port.
	Address string
	// Config returns the TLS configuration. It is called for each connection, so that certificates can be renewed.
	Config func() (*tls.Config, error)
	// Spare is the longest life of a spare connection.
	Spare time.Duration
	Log   *slog.Logger
}

// Listener dials a manager, and accepts the connections that the manager uses. It keeps one spare connection: as soon as the manager
// uses it, the listener opens the next one.
type Listener struct {
	Dialer

	ctx    context.Context
	stop   context.CancelFunc
	used   chan net.Conn
	places chan struct{}
}

// Listen begins to dial. It stops with ctx, or with Close.
func (d Dialer) Listen(ctx context.Context) *Listener {
	l := &Listener{Dialer: d, used: make(chan net.Conn), places: make(chan struct{}, maxUsed)}
	l.ctx, l.stop = context.WithCancel(ctx)
	go l.keep()
	return l
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.used:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It closes the spare connection. Those in use remain.
func (l *Listener) Close() error {
	l.stop()
	return nil
}

// Addr implements net.Listener: the address of the manager.
func (l *Listener) Addr() net.Addr { return address(l.Address) }

type address string

// Network implements net.Addr.
func (address) Network() string { return "tcp" }

// String implements net.Addr.
func (a address) String() string { return string(a) }

// keep keeps one spare connection until the listener is closed.
func (l *Listener) keep() {
	pause, last := backoff.Jittered(minPause, maxPause), ""
	for {
		select {
		case l.places <- struct{}{}:
		case <-l.ctx.Done():
			return
		}
		begun := time.Now()
		conn, err := l.spare()
		if err == nil {
			pause, last = backoff.Jittered(minPause, maxPause), ""
			select {
			case l.used <- conn:
			case <-l.ctx.Done():
				_ = conn.Close()
				return
			}
			continue
		}
		<-l.places
		if errors.Is(err, os.ErrDeadlineExceeded) && time.Since(begun) >= l.Spare {
			continue // The spare connection was old.
		}
		if time.Since(begun) > maxPause {
			pause = backoff.Jittered(minPause, maxPause)
		}
		if text := reason(err); l.ctx.Err() == nil && text != last {
			l.Log.Warn("No connection to the manager. The host dials again. Check that a CapstanHost with the name of this host and with connection FromHost exists, and that the manager has --host-listen-address", "manager", l.Address, "error", err)
			last = text
		}
		select {
		case <-l.ctx.Done():
			return
		case <-time.After(pause.Step()):
		}
	}
}

// reason is the text of an error without the port of the host, which differs with each connection.
func reason(err error) string {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Op + " " + op.Err.Error()
	}
	return err.Error()
}

// spare opens a connection, and returns it when the manager uses it.
func (l *Listener) spare() (net.Conn, error) {
	config, err := l.Config()
	if err != nil {
		return nil, err
	}
	raw, err := (&net.Dialer{Timeout: timeout, KeepAliveConfig: keepAlive}).DialContext(l.ctx, "tcp", l.Address)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, config)
	first, err := l.firstByte(conn)
	if err != nil {
		_ = raw.Close()
		return nil, err
	}
	return &used{Conn: conn, first: first, release: sync.OnceFunc(func() { <-l.places })}, nil
}

// firstByte makes the handshake and waits for the first byte of the manager. The manager refuses the certificate of a host before
// that, and after the host's part of the handshake.
func (l *Listener) firstByte(conn *tls.Conn) ([]byte, error) {
	ctx, cancel := context.WithTimeout(l.ctx, timeout)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("TLS handshake: %w", err)
	}
	l.Log.Debug("A spare connection is open", "manager", l.Address)
	defer context.AfterFunc(l.ctx, func() { _ = conn.NetConn().Close() })()
	first := make([]byte, 1)
	if err := conn.SetReadDeadline(time.Now().Add(l.Spare)); err != nil {
		return nil, err
	}
	if _, err := conn.Read(first); errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("the manager closed a connection before its use: %w", err)
	}
	return first, conn.SetReadDeadline(time.Time{})
}

// used is a connection whose first byte was read already.
type used struct {
	*tls.Conn
	first   []byte
	release func()
}

// Read implements net.Conn.
func (u *used) Read(p []byte) (int, error) {
	if len(u.first) > 0 && len(p) > 0 {
		n := copy(p, u.first)
		u.first = u.first[n:]
		return n, nil
	}
	return u.Conn.Read(p)
}

// Close implements net.Conn.
func (u *used) Close() error {
	u.release()
	return u.Conn.Close()
}
