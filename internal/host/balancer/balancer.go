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
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/disk"
	"capstan.dev/capstan/internal/host/proc"
)

// Balancer forwards connections as its configuration says.
type Balancer struct {
	// dir holds ConfigFile and StatusFile.
	dir    string
	timing Timing
	log    *slog.Logger
	pool   *pool
	slots  *semaphore.Weighted
	self   proc.Ref

	mu        sync.Mutex
	listeners map[string]net.Listener
	message   string
}

// New returns the balancer of a folder.
func New(dir string, timing Timing, log *slog.Logger) *Balancer {
	return &Balancer{
		dir: dir, timing: timing, log: log, pool: newPool(),
		slots: semaphore.NewWeighted(maxConnections), listeners: map[string]net.Listener{},
	}
}

// Run serves until ctx is done, following changes of the configuration.
func (b *Balancer) Run(ctx context.Context) error {
	unlock, err := lock(b.dir)
	if err != nil {
		return err
	}
	defer unlock()
	if b.self, err = proc.Find(os.Getpid()); err != nil {
		return err
	}
	changes, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer func() { _ = changes.Close() }()
	if err := changes.Add(b.dir); err != nil {
		return err
	}
	defer b.close()
	for {
		retry := b.apply()
		if err := b.waitForChange(ctx, changes, retry); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// lock keeps a second balancer from the folder: capstand may have been killed before it could see that
// it had started the first.
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

// waitForChange returns when the configuration was replaced, or a second later if some listen address
// is to be tried again: nothing tells when an address becomes free.
func (b *Balancer) waitForChange(ctx context.Context, changes *fsnotify.Watcher, retry bool) error {
	var again <-chan time.Time
	if retry {
		again = time.After(time.Second)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-again:
			return nil
		case err := <-changes.Errors:
			return err
		case event := <-changes.Events:
			if filepath.Base(event.Name) == ConfigFile {
				return nil
			}
		}
	}
}

// apply makes the balancer do what the configuration says and reports. It returns whether to try
// again soon.
func (b *Balancer) apply() (retry bool) {
	var config Config
	if err := disk.ReadJSON(filepath.Join(b.dir, ConfigFile), &config); err != nil {
		b.log.Error("configuration is kept as it was", "error", err)
		return true
	}
	err := b.listen(config.Listen)
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

// listen opens and closes listeners. Open connections stay.
func (b *Balancer) listen(addresses []string) error {
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
		listener, err := net.Listen("tcp", address)
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		b.listeners[address] = listener
		go b.accept(listener)
	}
	return errs
}

func (b *Balancer) close() {
	b.pool.set(nil)
	_ = b.listen(nil)
}

// report writes the status for capstand.
func (b *Balancer) report() {
	b.mu.Lock()
	defer b.mu.Unlock()
	status := Status{
		Process: b.self, Healthy: b.pool.healthy(), Message: b.message, Listening: []string{},
	}
	for address := range b.listeners {
		status.Listening = append(status.Listening, address)
	}
	slices.Sort(status.Listening)
	if err := disk.WriteJSON(filepath.Join(b.dir, StatusFile), status, 0o644); err != nil {
		b.log.Error("status cannot be written", "error", err)
	}
}

func (b *Balancer) accept(listener net.Listener) {
	for {
		// At the limit new connections wait in the kernel.
		_ = b.slots.Acquire(context.Background(), 1)
		conn, err := listener.Accept()
		if err != nil {
			b.slots.Release(1)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			b.log.Error("accept", "error", err)
			time.Sleep(50 * time.Millisecond) // out of files or memory: more haste makes it worse
			continue
		}
		go func() {
			defer b.slots.Release(1)
			defer func() { _ = conn.Close() }()
			if err := b.serve(conn.(*net.TCPConn)); err != nil {
				b.log.Warn("connection", "client", conn.RemoteAddr().String(), "error", err)
			}
		}()
	}
}

// serve connects a client to a backend and carries bytes both ways until both have ended.
func (b *Balancer) serve(client *net.TCPConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), b.timing.Park)
	defer cancel()
	backend, conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(backend.removed, func() { _, _ = conn.Close(), client.Close() })
	defer stop()
	var both sync.WaitGroup
	both.Go(func() { carry(conn, client) })
	both.Go(func() { carry(client, conn) })
	both.Wait()
	return nil
}

// connect waits for a healthy backend that takes the connection, as long as ctx allows.
func (b *Balancer) connect(ctx context.Context) (*backend, *net.TCPConn, error) {
	var tried []*backend
	for {
		backend, changed := b.pool.pick(tried)
		if backend == nil {
			// All that look healthy were tried: wait for one to become healthy, or for the next check.
			select {
			case <-ctx.Done():
				return nil, nil, fmt.Errorf("no healthy API server within %s", b.timing.Park)
			case <-changed:
			case <-b.recheck(tried):
			}
			tried = nil
			continue
		}
		dialer := net.Dialer{Timeout: b.timing.Dial}
		conn, err := dialer.DialContext(ctx, "tcp", backend.Address)
		if err == nil {
			return backend, conn.(*net.TCPConn), nil
		}
		tried = append(tried, backend)
	}
}

// recheck fires when backends that did not take a connection may be tried again, never when there are
// none: then only health matters.
func (b *Balancer) recheck(tried []*backend) <-chan time.Time {
	if len(tried) == 0 {
		return nil
	}
	return time.After(b.timing.FirstChecks)
}

// carry copies until from ends, and passes the end on: the other direction may go on. When to fails,
// both are closed.
func carry(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		_, _ = to.Close(), from.Close()
		return
	}
	if err := to.CloseWrite(); err != nil {
		_, _ = to.Close(), from.Close()
	}
}
