package balancer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/ports"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// A new source always gets a connection, even if many sources use their full share.
// Row IC-10.
func TestGate(t *testing.T) {
	g := newGate(1000)
	for i := range 9 {
		source := netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/32", i))
		for entered := true; entered; {
			entered = g.enter(source) != nil
		}
		if i == 0 && g.sources[source] != 500 {
			t.Errorf("the only source has %d of 1000", g.sources[source])
		}
	}
	leave := g.enter(netip.MustParsePrefix("10.0.1.1/32"))
	if leave == nil {
		t.Fatalf("no room for a tenth source: %+v", g.sources)
	}
	open, sources, _ := g.load()
	leave()
	if nowOpen, nowSources, _ := g.load(); nowOpen != open-1 || nowSources != sources-1 {
		t.Errorf("%d connections of %d sources, had %d of %d", nowOpen, nowSources, open, sources)
	}
}

// from connects from a loopback address.
func from(t *testing.T, source, address string) net.Conn {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	conn, err := dialer.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// echoServer returns a backend that is healthy as soon as it is in the balancer's pool.
func echoServer(t *testing.T, accepted *atomic.Int32) Backend {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			go func() { _, _ = io.Copy(conn, conn); _ = conn.Close() }()
		}
	}()
	return Backend{"echo", listener.Addr().String()}
}

// listening starts a balancer in this process, in front of an echo server.
func listening(t *testing.T, timing Timing, most int) (b *Balancer, address string, accepted *atomic.Int32) {
	t.Helper()
	accepted = &atomic.Int32{}
	b = New(t.TempDir(), timing, quiet())
	b.gate.most = most
	b.pool.setHealth(b.pool.set([]Backend{echoServer(t, accepted)})[0], true)
	address = ports.Address(t)
	if err := b.listen([]string{address}, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b, address, accepted
}

// While one source has thousands of idle connections, another source can connect. Idle connections do not reach an API server.
func TestIdleConnections(t *testing.T) {
	b, address, accepted := listening(t, fast, 2000)
	for range 2500 {
		from(t, "127.0.0.2", address)
	}
	victim := from(t, "127.0.0.3", address)
	if err := echoes(victim); err != nil {
		t.Errorf("another source: %v", err)
	}
	if open, sources, _ := b.gate.load(); open != 1001 || sources != 2 || accepted.Load() != 1 {
		t.Errorf("%d connections of %d sources, %d reached the server", open, sources, accepted.Load())
	}
}

// The balancer closes connections without a complete TLS hello. They do not reach an API server.
// Row IC-10.
func TestNoHello(t *testing.T) {
	timing := fast
	timing.Hello = 100 * time.Millisecond
	b, address, accepted := listening(t, timing, 100)
	for name, said := range map[string]string{"no data": "", "half a record": string(record("hello")[:7]), "no TLS": "GET / HTTP/1.1\r\n\r\n",
		"empty record": "\x16\x03\x01\x00\x00", "no handshake": "\x17\x03\x03\x00\x01x"} {
		conn := from(t, "127.0.0.1", address)
		_, _ = io.WriteString(conn, said)
		_ = conn.SetDeadline(time.Now().Add(patience / 4))
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: read %d bytes, %v", name, n, err)
		}
	}
	if err := echoes(from(t, "127.0.0.1", address)); err != nil || accepted.Load() != 1 {
		t.Errorf("%v; %d connections reached the server", err, accepted.Load())
	}
	families, err := b.metrics.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.Metric {
			if len(m.Label) == 1 && *m.Label[0].Value == noHello && *m.Counter.Value != 5 {
				t.Errorf("%s counts %v", noHello, *m.Counter.Value)
			}
		}
	}
}

// failing is a listener that has no file descriptors for its connections, until it is closed.
type failing struct {
	net.Listener
	failures int
}

func (l *failing) Accept() (net.Conn, error) {
	if l.failures--; l.failures < 0 {
		return nil, net.ErrClosed
	}
	return nil, syscall.EMFILE
}

// Failures to accept connections are logged at a limited rate.
func TestAcceptFails(t *testing.T) {
	var lines strings.Builder
	b := New(t.TempDir(), fast, slog.New(slog.NewTextHandler(&lines, nil)))
	b.accept(&failing{failures: 30})
	if n := strings.Count(lines.String(), "\n"); n == 0 || n > 25 {
		t.Errorf("30 failures fill %d lines:\n%s", n, lines.String())
	}
}

func TestMetrics(t *testing.T) {
	a, down := apiServer(t, "a", ready(200)), apiServer(t, "down", ready(500))
	f := start(t, fast, a, down)
	f.awaitHealthy(1)
	if _, err := f.get(); err != nil {
		t.Fatal(err)
	}
	conn, err := tls.Dial("tcp", f.address, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	var body string
	f.await("metrics", func(Status) bool {
		body = f.metrics()
		// The connection of the request before can still be open.
		return strings.Contains(body, fmt.Sprintf("capstan_balancer_backend_connections{backend=%q} 1\n", a.Address))
	})
	for _, want := range []string{"capstan_balancer_parked_connections 0", fmt.Sprintf("capstan_balancer_backend_up{backend=%q} 1", a.Address),
		fmt.Sprintf("capstan_balancer_backend_up{backend=%q} 0", down.Address), fmt.Sprintf("capstan_balancer_backend_connections{backend=%q} 0", down.Address),
		`capstan_balancer_connections_total{result="served"} 2`, "capstan_balancer_healthy_backends 1", "capstan_balancer_connections_limit "} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q in\n%s", want, body)
		}
	}
}

// A connection without a ready API server is counted while it waits.
func TestParkedConnectionsAreCounted(t *testing.T) {
	f := start(t, fast)
	conn := from(t, "127.0.0.1", f.address)
	_, _ = conn.Write(record("hello"))
	for _, want := range []string{"1", "0"} {
		f.await(want+" parked", func(Status) bool {
			return strings.Contains(f.metrics(), "\ncapstan_balancer_parked_connections "+want+"\n")
		})
		_ = conn.Close()
		f.configure(apiServer(t, "a", ready(200)))
	}
}

// metrics returns what the balancer serves; nothing before it has its socket.
func (f *fixture) metrics() string {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(f.dir, MetricsSocket))
	}}}
	res, err := client.Get("http://balancer/metrics")
	if err != nil {
		return ""
	}
	defer func() { _ = res.Body.Close() }()
	data, _ := io.ReadAll(res.Body)
	return string(data)
}
