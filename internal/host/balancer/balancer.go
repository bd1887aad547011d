package balancer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/cidr"
	"capstan.dev/capstan/internal/host/proc"
)

// Balancer forwards connections to the backends of its configuration.
type Balancer struct {
	// dir holds ConfigFile and StatusFile.
	dir    string
	timing Timing
	log    *slog.Logger
	pool   *pool
	gate   *gate
	self   proc.Ref

	metrics *metrics
	// complaints limits the log lines that clients can cause, also by using up the descriptors.
	complaints *rate.Limiter
	// succeeded is closed when another balancer has taken over.
	succeeded chan struct{}

	mu        sync.Mutex
	listeners map[string]net.Listener
	// inherited are the listeners of the previous balancer that no address uses yet.
	inherited map[string]net.Listener
	message   string
	// ended balancers write no more reports. A health check can end after the balancer.
	ended bool
}

// New returns the balancer of a folder.
func New(dir string, timing Timing, log *slog.Logger) *Balancer {
	b := &Balancer{
		dir: dir, timing: timing, log: log, pool: newPool(), gate: newGate(connectionLimit()),
		complaints: rate.NewLimiter(1, 20), succeeded: make(chan struct{}),
		listeners: map[string]net.Listener{}, inherited: map[string]net.Listener{},
	}
	b.metrics = newMetrics(b.gate, b.pool)
	return b
}

// Run serves until ctx is done and follows changes of the configuration. If another balancer serves the folder, Run takes
// over from it. If a later balancer takes over from this one, Run serves the open connections to their end.
func (b *Balancer) Run(ctx context.Context) (err error) {
	if b.self, err = proc.Find(os.Getpid()); err != nil {
		return err
	}
	changed := changes.Of(ctx, filepath.Join(b.dir, ConfigFile))
	defer b.close()
	unlock, err := lock(b.dir)
	if err != nil {
		unlock, err = b.takeOver(ctx, err)
	}
	if err != nil {
		return err
	}
	stop, err := b.openSockets()
	if err == nil {
		b.follow(ctx, changed)
		stop()
	}
	if err != nil || ctx.Err() != nil {
		unlock()
		return err
	}
	b.listenNoMore()
	unlock()
	return b.drain(ctx, changed)
}

// takeOver replaces the balancer that holds the lock. A balancer of a version without handover refuses.
func (b *Balancer) takeOver(ctx context.Context, locked error) (unlock func(), err error) {
	p, err := b.inherit()
	if err != nil {
		return nil, fmt.Errorf("%w, and it does not hand over its sockets: %w", locked, err)
	}
	b.apply()
	return p.replace(ctx, b.dir)
}

// openSockets opens the sockets for metrics and for the next balancer.
func (b *Balancer) openSockets() (stop func(), err error) {
	m, err := listenUnix(filepath.Join(b.dir, MetricsSocket))
	if err != nil {
		return nil, err
	}
	h, err := listenUnix(filepath.Join(b.dir, handoverSocket))
	if err != nil {
		_ = m.Close()
		return nil, err
	}
	go b.metrics.serve(m)
	go b.give(h)
	return func() { _, _ = m.Close(), h.Close() }, nil
}

// follow applies the configuration until ctx is done or another balancer has taken over.
func (b *Balancer) follow(ctx context.Context, changed <-chan struct{}) {
	for {
		retry := b.apply()
		b.waitForChange(ctx, changed, retry)
		if ctx.Err() != nil || b.hasSuccessor() {
			return
		}
	}
}

func (b *Balancer) hasSuccessor() bool {
	select {
	case <-b.succeeded:
		return true
	default:
		return false
	}
}

// listenNoMore closes the listeners. The successor has the same sockets, so no client is refused.
func (b *Balancer) listenNoMore() {
	if err := b.listen(nil, ""); err != nil {
		b.log.Error("Cannot close the listeners", "error", err)
	}
}

// drain waits until all connections have ended, at most for timing.Drain. Connections to removed backends are ended as
// usual.
func (b *Balancer) drain(ctx context.Context, changed <-chan struct{}) error {
	timeout := time.After(b.timing.Drain)
	open, _, empty := b.gate.load()
	b.log.Info("Another balancer has taken over", "openConnections", open, "drainTimeout", b.timing.Drain)
	for ; open > 0; open, _, empty = b.gate.load() {
		select {
		case <-ctx.Done():
			return nil
		case <-timeout:
			return nil
		case <-empty:
		case <-changed:
			var config Config
			if atomicfile.ReadJSON(filepath.Join(b.dir, ConfigFile), &config) == nil {
				b.pool.set(config.Backends)
			}
		}
	}
	return nil
}

// lock allows one balancer per folder. A capstand that was killed after it had started a balancer starts a second one.
func lock(dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("another balancer serves %s: %w", dir, err)
	}
	return func() { _ = file.Close() }, nil
}

// waitForChange returns when the configuration was replaced. It returns after a second if a listen address must be tried
// again, because the kernel reports no event when an address becomes free.
func (b *Balancer) waitForChange(ctx context.Context, changed <-chan struct{}, retry bool) {
	var again <-chan time.Time
	if retry {
		again = time.After(time.Second)
	}
	select {
	case <-ctx.Done():
	case <-b.succeeded:
	case <-again:
	case <-changed:
	}
}

// apply applies the configuration and writes a report. It returns whether an address must be tried again soon.
func (b *Balancer) apply() (retry bool) {
	var config Config
	if err := atomicfile.ReadJSON(filepath.Join(b.dir, ConfigFile), &config); err != nil {
		b.log.Error("Invalid configuration: the previous one stays in force", "error", err)
		return true
	}
	err := b.listen(config.Listen, config.Roaming)
	for _, backend := range b.pool.set(config.Backends) {
		go b.watchHealth(backend)
	}
	b.mu.Lock()
	b.message = ""
	if err != nil {
		b.message = err.Error()
	}
	b.mu.Unlock()
	b.report()
	return err != nil
}

// listen opens and closes listeners. It does not end connections. The host has the roaming address at times only.
func (b *Balancer) listen(addresses []string, roaming string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for address, listener := range b.listeners {
		if !slices.Contains(addresses, address) {
			_ = listener.Close()
			delete(b.listeners, address)
		}
	}
	var errs error
	for _, address := range addresses {
		if b.listeners[address] != nil {
			continue
		}
		listener, err := b.open(address, address == roaming)
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		b.listeners[address] = listener
		go b.accept(listener)
	}
	for address, listener := range b.inherited {
		_ = listener.Close()
		delete(b.inherited, address)
	}
	return errs
}

// open listens on an address, with the socket of the previous balancer if it had one.
func (b *Balancer) open(address string, roaming bool) (net.Listener, error) {
	if listener := b.inherited[address]; listener != nil {
		delete(b.inherited, address)
		return listener, nil
	}
	return Listen(address, roaming)
}

// Listen opens a socket. The host need not have a roaming address.
func Listen(address string, roaming bool) (net.Listener, error) {
	var config net.ListenConfig
	if roaming {
		config.Control = func(_, _ string, conn syscall.RawConn) (err error) {
			if e := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1) }); e != nil {
				return e
			}
			return err
		}
	}
	return config.Listen(context.Background(), "tcp", address)
}

func (b *Balancer) close() {
	b.mu.Lock()
	b.ended = true
	b.mu.Unlock()
	b.pool.set(nil)
	_ = b.listen(nil, "")
}

// report writes the status for capstand, unless another balancer writes it.
func (b *Balancer) report() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended || b.hasSuccessor() {
		return
	}
	status := Status{
		Process: b.self, Healthy: b.pool.healthy(), Message: b.message, Listening: []string{},
	}
	for address := range b.listeners {
		status.Listening = append(status.Listening, address)
	}
	slices.Sort(status.Listening)
	if err := atomicfile.WriteJSON(filepath.Join(b.dir, StatusFile), status, 0o644); err != nil {
		b.log.Error("Cannot write the status", "error", err)
	}
}

func (b *Balancer) accept(listener net.Listener) {
	for {
		conn, err := acceptFrom(listener)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if b.complaints.Allow() {
				b.log.Error("Cannot accept connections", "error", err)
			}
			time.Sleep(50 * time.Millisecond) // Files or memory are exhausted: an immediate retry fails too.
			continue
		}
		leave := b.gate.enter(cidr.OfPeer(conn.RemoteAddr()))
		if leave == nil {
			b.complain(conn, refused, errShare)
			_ = conn.Close()
			continue
		}
		go func() {
			defer leave()
			defer func() { _ = conn.Close() }()
			if result, err := b.serve(conn); err != nil {
				b.complain(conn, result, err)
			}
		}()
	}
}

// acceptFrom accepts a connection with keepAlive. The listener may be one of the previous balancer, which has no settings for its connections.
func acceptFrom(listener net.Listener) (*net.TCPConn, error) {
	accepted, err := listener.Accept()
	if err != nil {
		return nil, err
	}
	conn := accepted.(*net.TCPConn)
	if err := conn.SetKeepAliveConfig(keepAlive); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

var errShare = errors.New("the source has reached its share of the connections")

// complain counts a connection that was not served, and logs it unless clients caused too many lines lately.
func (b *Balancer) complain(conn net.Conn, result string, err error) {
	b.metrics.connections.WithLabelValues(result).Inc()
	if b.complaints.Allow() {
		b.log.Warn("Connection was not served", "client", conn.RemoteAddr().String(), "result", result, "error", err)
	}
}

// serve connects a client to a backend and copies bytes in both directions until both have ended.
func (b *Balancer) serve(client *net.TCPConn) (result string, err error) {
	hello, err := readHello(client, b.timing.Hello)
	if err != nil {
		return noHello, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), b.timing.Park)
	defer cancel()
	b.metrics.parked.Inc()
	backend, conn, err := b.connect(ctx)
	b.metrics.parked.Dec()
	if err != nil {
		return noBackend, err
	}
	defer func() { _ = conn.Close() }()
	backend.open.Add(1)
	defer backend.open.Add(-1)
	b.metrics.connections.WithLabelValues(served).Inc()
	stop := context.AfterFunc(b.pool.connected(backend), func() { _, _ = conn.Close(), client.Close() })
	defer stop()
	if _, err := conn.Write(hello); err != nil {
		return noBackend, err
	}
	var both sync.WaitGroup
	both.Go(func() { carry(conn, client) })
	both.Go(func() { carry(client, conn) })
	both.Wait()
	return served, nil
}

// connect waits, until ctx is done, for a healthy backend that accepts the connection.
func (b *Balancer) connect(ctx context.Context) (*backend, *net.TCPConn, error) {
	var tried []*backend
	for {
		backend, changed := b.pool.pick(tried)
		if backend == nil {
			// All healthy backends were tried: wait until another one becomes healthy, or for the next check.
			select {
			case <-ctx.Done():
				return nil, nil, fmt.Errorf("no healthy API server within %s", b.timing.Park)
			case <-changed:
			case <-b.recheck(tried):
			}
			tried = nil
			continue
		}
		dialer := net.Dialer{Timeout: b.timing.Dial, KeepAliveConfig: keepAlive}
		conn, err := dialer.DialContext(ctx, "tcp", backend.Address)
		if err == nil {
			return backend, conn.(*net.TCPConn), nil
		}
		tried = append(tried, backend)
	}
}

// recheck fires when backends that refused the connection may be tried again. It never fires when no backend refused.
func (b *Balancer) recheck(tried []*backend) <-chan time.Time {
	if len(tried) == 0 {
		return nil
	}
	return time.After(b.timing.FirstChecks)
}

// carry copies until from ends, and then closes the write side of to, because the other direction may continue. When to
// fails, it closes both.
func carry(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		_, _ = to.Close(), from.Close()
		return
	}
	if err := to.CloseWrite(); err != nil {
		_, _ = to.Close(), from.Close()
	}
}
