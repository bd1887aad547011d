package balancer

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// running is one of several balancers with the same folder.
type running struct {
	*Balancer
	cancel context.CancelFunc
	done   chan error
}

func run(t *testing.T, dir string, timing Timing) *running {
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{New(dir, timing, quiet()), cancel, make(chan error, 1)}
	go func() { r.done <- r.Run(ctx); close(r.done) }()
	t.Cleanup(func() { cancel(); <-r.done })
	return r
}

// awaitServing waits until the balancer listens and owns the folder.
func (r *running) awaitServing(t *testing.T) {
	t.Helper()
	expect.True(t, "serving", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		conn, err := net.Dial("unix", filepath.Join(r.dir, handoverSocket))
		if err == nil {
			_ = conn.Close()
		}
		return len(r.listeners) == 1 && err == nil && len(r.pool.healthy()) > 0
	})
}

// A second balancer takes over during a stream of connections. No connection is refused. An open connection stays in the
// first balancer until it ends.
// Row IC-10.
func TestHandover(t *testing.T) {
	f := &fixture{t: t, dir: t.TempDir(), address: ports.Address(t)}
	f.configure(apiServer(t, "a", ready(200)))
	first := run(t, f.dir, fast)
	f.awaitHealthy(1)
	open, err := net.Dial("tcp", f.address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	_, _ = open.Write(record("\x01\x00\x03\xe8")) // The server waits for the rest of the record.
	expect.True(t, "open", func() bool { n, _, _ := first.gate.load(); return n == 1 })

	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failed)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := f.get(); err != nil {
				failed <- err
				return
			}
		}
	}()
	second := run(t, f.dir, fast)
	expect.True(t, "handed over", first.hasSuccessor)
	second.awaitServing(t)
	third := run(t, f.dir, fast) // The second handover.
	expect.True(t, "handed over", second.hasSuccessor)
	if err := <-second.done; err != nil {
		t.Errorf("the second balancer: %v", err)
	}
	close(stop)
	if err := <-failed; err != nil {
		t.Errorf("while balancers change: %v", err)
	}
	_ = third

	select {
	case err := <-first.done:
		t.Fatalf("the first balancer ended with an open connection: %v", err)
	default:
	}
	_ = open.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := open.Read(make([]byte, 1)); err == nil || !os.IsTimeout(err) {
		t.Errorf("the open connection: %v", err)
	}
	_ = open.Close()
	if err := <-first.done; err != nil {
		t.Errorf("the first balancer: %v", err)
	}
	if name, err := f.get(); err != nil || name != "a" {
		t.Errorf("%q, %v", name, err)
	}
}

// Connections through a listener of the previous balancer have the keepalive of all connections.
func TestKeepAliveAfterHandover(t *testing.T) {
	first, err := Listen("127.0.0.1:0", false)
	expect.NoError(t, err)
	defer func() { _ = first.Close() }()
	file, err := first.(*net.TCPListener).File()
	expect.NoError(t, err)
	defer func() { _ = file.Close() }()
	inherited, err := net.FileListener(file)
	expect.NoError(t, err)
	defer func() { _ = inherited.Close() }()
	for name, listener := range map[string]net.Listener{"own": first, "inherited": inherited} {
		t.Run(name, func(t *testing.T) { checkKeepAlive(t, listener) })
	}
}

// checkKeepAlive checks the keepalive of a connection that a listener accepts.
func checkKeepAlive(t *testing.T, listener net.Listener) {
	t.Helper()
	client, err := net.Dial("tcp", listener.Addr().String())
	expect.NoError(t, err)
	defer func() { _ = client.Close() }()
	conn, err := acceptFrom(listener)
	expect.NoError(t, err)
	defer func() { _ = conn.Close() }()
	raw, err := conn.SyscallConn()
	expect.NoError(t, err)
	for option, want := range map[int]int{unix.TCP_KEEPIDLE: 30, unix.TCP_KEEPINTVL: 10, unix.TCP_KEEPCNT: 3} {
		var got int
		expect.NoError(t, raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option) }))
		if err != nil || got != want {
			t.Errorf("option %d is %d, %v, want %d", option, got, err, want)
		}
	}
}

// After a handover, the old balancer closes its connections after a while, or at once if their backend is removed.
func TestDrainEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		drain time.Duration
		leave bool
	}{"after a while": {50 * time.Millisecond, false}, "backend leaves": {patience, true}} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{t: t, dir: t.TempDir(), address: ports.Address(t)}
			f.configure(apiServer(t, "a", ready(200)))
			timing := fast
			timing.Drain = tt.drain
			first := run(t, f.dir, timing)
			f.awaitHealthy(1)
			open, err := net.Dial("tcp", f.address)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = open.Close() }()
			_, _ = open.Write(record("\x01\x00\x03\xe8"))
			expect.True(t, "open", func() bool { n, _, _ := first.gate.load(); return n == 1 })
			second := run(t, f.dir, fast)
			expect.True(t, "handed over", first.hasSuccessor)
			second.awaitServing(t)
			if tt.leave {
				f.configure()
			}
			if err := <-first.done; err != nil {
				t.Error(err)
			}
			if _, err := open.Read(make([]byte, 1)); err == nil {
				t.Error("the connection stays open")
			}
		})
	}
}

// A successor that dies between any two steps changes nothing. The first balancer continues, logs it, and accepts the next
// successor.
func TestHandoverBroken(t *testing.T) {
	f := &fixture{t: t, dir: t.TempDir(), address: ports.Address(t)}
	f.configure(apiServer(t, "a", ready(200)))
	first := run(t, f.dir, fast)
	first.awaitServing(t)
	for _, receives := range []bool{false, true} {
		second := New(f.dir, fast, quiet())
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(f.dir, handoverSocket), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		if receives {
			if err := second.receiveListeners(conn); err != nil {
				t.Fatal(err)
			}
			if second.inherited[f.address] == nil {
				t.Errorf("inherited %v", second.inherited)
			}
			_ = atomicfile.WriteJSON(filepath.Join(f.dir, StatusFile), Status{Message: "of the second"}, 0o644)
		}
		_ = conn.Close()
		second.close()
		f.await("the first's status", func(s Status) bool { return s.Message == "" && slices.Contains(s.Listening, f.address) })
		if name, err := f.get(); err != nil || name != "a" {
			t.Errorf("%q, %v", name, err)
		}
	}
	if first.hasSuccessor() {
		t.Error("the first balancer ended")
	}
	run(t, f.dir, fast)
	expect.True(t, "handed over", first.hasSuccessor)
}

// A balancer of a version without handovers keeps its folder.
func TestNoHandover(t *testing.T) {
	dir := t.TempDir()
	unlock, err := lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	err = New(dir, fast, quiet()).Run(context.Background())
	if err == nil || !strings.Contains(err.Error(), "another balancer") {
		t.Errorf("got %v", err)
	}
}
