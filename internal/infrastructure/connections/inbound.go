package connections

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/host/credentials"
)

const (
	// maxIdle bounds the unused connections of a host. The oldest one is closed.
	maxIdle = 8
)

var (
	errNotListening = errors.New("this manager does not listen for hosts with connection FromHost: start it with --host-listen-address")
	errNotDialled   = errors.New("expected capstand of the host to dial this manager, found no connection of it: start capstand with --dial and the address of the manager's --host-listen-address, and see its log")
	errNotFollowed  = errors.New("this manager is not the leader, and hosts with connection FromHost connect to the leader only: send the request to the leader")
)

// Inbound are the connections of hosts that dial the manager. A peer chooses the name of a host in its first message. It reaches
// the place of this host only after a handshake with a certificate for the name, of the host's own authority.
type Inbound struct {
	// Address is the address at which the manager listens; empty if it does not listen. Set it before the first host.
	Address string

	timeout time.Duration // of a handshake
	mu      sync.Mutex
	slots   map[string]*slot
}

// NewInbound returns connections without a host.
func NewInbound() *Inbound {
	return &Inbound{timeout: credentials.HandshakeTimeout, slots: map[string]*slot{}}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: the leader uses the hosts.
func (*Inbound) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable.
func (i *Inbound) Start(ctx context.Context) error {
	listener, err := (&net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}}).Listen(ctx, "tcp", i.Address)
	if err != nil {
		return fmt.Errorf("--host-listen-address: %w", err)
	}
	return i.Serve(ctx, listener)
}

// Serve accepts connections until ctx ends.
func (i *Inbound) Serve(ctx context.Context, listener net.Listener) error {
	gate := credentials.Gate{Timeout: i.timeout, Handshake: i.handshake, Refused: func(peer string, reason error) {
		ctrl.LoggerFrom(ctx).Info("Refused a connection at --host-listen-address", "peer", peer, "reason", reason.Error())
	}}
	gate.Serve(ctx, listener)
	i.closeIdle()
	return nil
}

// handshake authenticates a peer. The returned function gives the connection to the host of this name.
func (i *Inbound) handshake(ctx context.Context, raw net.Conn) (add func(), err error) {
	var s *slot
	conn := tls.Server(raw, &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if s = i.find(credentials.DialHostName(hello.ServerName)); s == nil {
			return nil, fmt.Errorf("expected the name of a CapstanHost with connection FromHost, found %.64q", hello.ServerName)
		}
		return s.config, nil
	}})
	return func() { s.add(conn) }, conn.HandshakeContext(ctx)
}

func (i *Inbound) find(name string) *slot {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.slots[name]
}

func (i *Inbound) closeIdle() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.slots {
		s.closeIdle()
	}
}

// open makes the place of a host, instead of the one before. seen is called with the certificate of each connection of the host.
func (i *Inbound) open(name string, creds credentials.Client, seen func(*x509.Certificate)) (*slot, error) {
	config, err := creds.AcceptConfig(name, time.Now())
	if err != nil {
		return nil, err
	}
	s := &slot{listening: i.Address != "", config: config, seen: seen, arrived: make(chan struct{}), closed: make(chan struct{})}
	i.mu.Lock()
	defer i.mu.Unlock()
	if before := i.slots[name]; before != nil {
		before.close()
	}
	i.slots[name] = s
	return s, nil
}

// remove removes the place of a host.
func (i *Inbound) remove(name string, s *slot) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.slots[name] == s {
		delete(i.slots, name)
	}
	s.close()
}

// slot holds the unused connections of one host.
type slot struct {
	listening bool
	config    *tls.Config
	// seen is called with the certificate of each connection of the host.
	seen   func(*x509.Certificate)
	closed chan struct{}

	mu      sync.Mutex
	idle    []*idle
	arrived chan struct{} // is closed and replaced with each connection
}

// idle is an unused connection. A host sends nothing over it.
type idle struct {
	*tls.Conn
	done  chan struct{}
	alive bool // after done
}

// add takes a connection of the host. Its handshake has proved that the host has the key of its certificate.
func (s *slot) add(conn *tls.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		_ = conn.NetConn().Close()
		return
	default:
	}
	if len(s.idle) == maxIdle {
		_ = s.idle[0].NetConn().Close()
		s.idle = s.idle[1:]
	}
	c := &idle{Conn: conn, done: make(chan struct{})}
	s.seen(conn.ConnectionState().PeerCertificates[0])
	s.idle = append(s.idle, c)
	close(s.arrived)
	s.arrived = make(chan struct{})
	go s.watch(c)
}

// watch removes a connection that the host closes.
func (s *slot) watch(c *idle) {
	defer close(c.done)
	_, err := c.Read(make([]byte, 1))
	if c.alive = errors.Is(err, os.ErrDeadlineExceeded); c.alive {
		return
	}
	_ = c.NetConn().Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = slices.DeleteFunc(s.idle, func(other *idle) bool { return other == c })
}

// wake ends the watch. It returns false if the connection is closed.
func (c *idle) wake() bool {
	_ = c.SetReadDeadline(time.Unix(1, 0))
	<-c.done
	return c.alive && c.SetReadDeadline(time.Time{}) == nil
}

// newest takes the newest connection, or returns nil and the channel of the next arrival. After a silent loss of the host, the older
// connections may be dead.
func (s *slot) newest() (*idle, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.idle) - 1
	if last < 0 {
		return nil, s.arrived
	}
	c := s.idle[last]
	s.idle = s.idle[:last]
	return c, nil
}

// dial waits for a connection of the host.
func (s *slot) dial(ctx context.Context, _ string) (net.Conn, error) {
	if !s.listening {
		return nil, errNotListening
	}
	for {
		c, arrived := s.newest()
		if c != nil {
			if c.wake() {
				return c.Conn, nil
			}
			continue
		}
		select {
		case <-arrived:
		case <-s.closed:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, errNotDialled
		}
	}
}

// refresh closes the unused connections, and waits for the next one: the host shows its current certificate with it.
func (s *slot) refresh(ctx context.Context) error {
	s.mu.Lock()
	arrived := s.arrived
	s.mu.Unlock()
	s.closeIdle()
	select {
	case <-arrived:
		return nil
	case <-s.closed:
		return net.ErrClosed
	case <-ctx.Done():
		return errNotDialled
	}
}

func (s *slot) closeIdle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.idle {
		_ = c.NetConn().Close()
	}
	s.idle = nil
}

func (s *slot) close() {
	s.mu.Lock()
	select {
	case <-s.closed:
	default:
		close(s.closed)
	}
	s.mu.Unlock()
	s.closeIdle()
}

// route of the calls over the connections of the host.
func (s *slot) route(name string) route {
	return route{target: "passthrough:///" + name, transport: credentials.Handshaken(), options: []grpc.DialOption{grpc.WithContextDialer(s.dial)}}
}
