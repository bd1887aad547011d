package balancer

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

var fast = Timing{
	FirstChecks: 200 * time.Millisecond, AnsweredChecks: 20 * time.Millisecond, Checks: 20 * time.Millisecond, CheckTimeout: patience,
	Park: patience, Dial: patience, Hello: patience, Drain: patience, CutOff: 500 * time.Millisecond,
}

// patience is longer than each wait of a test, so that no timing of the balancer ends one.
const patience = 2 * expect.Patience

// fixture is a running balancer with one listen address.
type fixture struct {
	t       *testing.T
	dir     string
	address string
}

func start(t *testing.T, timing Timing, backends ...Backend) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), address: ports.Address(t)}
	f.configure(backends...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- New(f.dir, timing, slog.New(slog.NewTextHandler(io.Discard, nil))).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	f.await("listening", func(s Status) bool { return slices.Contains(s.Listening, f.address) })
	return f
}

func (f *fixture) configure(backends ...Backend) {
	f.t.Helper()
	config := Config{Listen: []string{f.address}, Backends: backends}
	if err := atomicfile.WriteJSON(filepath.Join(f.dir, ConfigFile), config, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) await(what string, wanted func(Status) bool) {
	f.t.Helper()
	expect.Eventually(f.t, what, func() error {
		var s Status
		err := atomicfile.ReadJSON(filepath.Join(f.dir, StatusFile), &s)
		if err == nil && !wanted(s) {
			err = fmt.Errorf("the status is %+v", s)
		}
		return err
	})
}

func (f *fixture) awaitHealthy(n int) {
	f.t.Helper()
	f.await(fmt.Sprintf("%d healthy", n), func(s Status) bool { return len(s.Healthy) == n })
}

// apiServer answers /readyz with ready's value and every other path with its name.
func apiServer(t *testing.T, name string, ready *atomic.Int32) Backend {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			w.WriteHeader(int(ready.Load()))
		}
		_, _ = io.WriteString(w, name)
	}))
	t.Cleanup(server.Close)
	return Backend{Name: name, Address: server.Listener.Addr().String()}
}

func ready(code int32) *atomic.Int32 {
	var v atomic.Int32
	v.Store(code)
	return &v
}

func (f *fixture) get() (string, error) {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	res, err := client.Get("https://" + f.address + "/")
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	return string(body), err
}

func TestRoundRobinOverHealthy(t *testing.T) {
	down := ready(500)
	f := start(t, fast, apiServer(t, "a", ready(200)), apiServer(t, "b", ready(403)), apiServer(t, "c", down))
	f.awaitHealthy(2)
	count := func(n int) map[string]int {
		seen := map[string]int{}
		for range n {
			name, err := f.get()
			if err != nil {
				t.Fatal(err)
			}
			seen[name]++
		}
		return seen
	}
	if got := count(10); got["a"] != 5 || got["b"] != 5 {
		t.Errorf("10 connections went to %v", got)
	}
	down.Store(200)
	f.awaitHealthy(3)
	if got := count(9); got["a"] != 3 || got["b"] != 3 || got["c"] != 3 {
		t.Errorf("9 connections went to %v", got)
	}
	down.Store(500)
	f.awaitHealthy(2)
	if got := count(4); got["c"] != 0 {
		t.Errorf("4 connections went to %v", got)
	}
}

// A connection that arrives before the first backend is served as soon as a backend is ready.
func TestParks(t *testing.T) {
	f := start(t, fast)
	answer := make(chan string, 1)
	go func() {
		name, err := f.get()
		answer <- name + fmt.Sprint(err)
	}()
	late := ready(500)
	f.configure(apiServer(t, "late", late))
	select {
	case got := <-answer:
		t.Fatalf("answered %q before a backend was ready", got)
	case <-time.After(100 * time.Millisecond):
	}
	late.Store(200)
	if got := <-answer; got != "late<nil>" {
		t.Errorf("got %q", got)
	}
}

// An API server that answers before it is ready is checked sooner than one that does not answer.
func TestAnsweredChecks(t *testing.T) {
	timing := fast
	timing.FirstChecks = time.Hour
	starting := ready(500)
	answered := make(chan struct{}, 1)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(int(starting.Load()))
		select {
		case answered <- struct{}{}:
		default:
		}
	}))
	t.Cleanup(server.Close)
	f := start(t, timing, Backend{Name: "a", Address: server.Listener.Addr().String()})
	<-answered
	starting.Store(200)
	f.awaitHealthy(1)

	refused := &net.OpError{Op: "dial", Err: unix.ECONNREFUSED}
	for _, tt := range []struct {
		healthy  bool
		err      error
		answered int
		want     time.Duration
	}{
		{true, nil, 0, fast.Checks},
		{true, &notReadyError{}, 1, fast.Checks},
		{false, &notReadyError{}, mostAnswered, fast.AnsweredChecks},
		{false, &notReadyError{}, mostAnswered + 1, fast.FirstChecks},
		{false, refused, 1, fast.FirstChecks},
	} {
		if got := fast.pause(tt.healthy, tt.err, tt.answered); got != tt.want {
			t.Errorf("healthy before %v, %v, answered %d times: %s", tt.healthy, tt.err, tt.answered, got)
		}
	}
}

// The load balancer in a LAN listens at its virtual address also while another host has it.
func TestRoamingAddress(t *testing.T) {
	b := New(t.TempDir(), fast, quiet())
	t.Cleanup(b.close)
	const address = "192.0.2.77:6443" // not an address of this host
	if err := b.listen([]string{address}, ""); err == nil {
		t.Error("it listens at an address of another host")
	}
	if err := b.listen([]string{address}, address); err != nil || b.listeners[address] == nil {
		t.Errorf("a virtual address that the host does not have: %v", err)
	}
}

// Without a backend, a connection is closed after a while.
func TestParkingEnds(t *testing.T) {
	timing := fast
	timing.Park = 100 * time.Millisecond
	f := start(t, timing)
	conn, err := net.Dial("tcp", f.address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	began := time.Now()
	_, _ = conn.Write(record("hello"))
	_ = conn.SetReadDeadline(began.Add(patience))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(began) < timing.Park/2 {
		t.Errorf("after %s: %v, want EOF after %s", time.Since(began), err, timing.Park)
	}
}

// If a healthy backend refuses connections, clients reach another backend.
func TestFailover(t *testing.T) {
	timing := fast
	timing.Checks = time.Hour // no health check runs during the test
	dead := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	f := start(t, timing, Backend{"dead", dead.Listener.Addr().String()}, apiServer(t, "alive", ready(200)))
	f.awaitHealthy(2)
	dead.Close()
	for range 6 {
		if name, err := f.get(); err != nil || name != "alive" {
			t.Errorf("got %q, %v", name, err)
		}
	}
}

// pipeThrough connects a client, through a balancer, to a TCP server that counts as healthy.
func pipeThrough(t *testing.T, serve func(*net.TCPConn)) (client *net.TCPConn, p *pool) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		if conn, err := listener.Accept(); err == nil {
			serve(conn.(*net.TCPConn))
		}
	}()
	b := New(t.TempDir(), fast, slog.New(slog.NewTextHandler(io.Discard, nil)))
	added := b.pool.set([]Backend{{"x", listener.Addr().String()}})
	b.pool.setHealth(added[0], true)
	address := ports.Address(t)
	if err := b.listen([]string{address}, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn.(*net.TCPConn), b.pool
}

// record returns the start of a TLS connection, as far as the balancer reads it.
func record(content string) []byte {
	return append([]byte{22, 3, 1, 0, byte(len(content))}, content...)
}

// echoes checks a connection to an echo server.
func echoes(conn net.Conn) error {
	said := record("x")
	if _, err := conn.Write(said); err != nil {
		return err
	}
	heard := make([]byte, len(said))
	_, err := io.ReadFull(conn, heard)
	if err == nil && !bytes.Equal(heard, said) {
		err = fmt.Errorf("received %q", heard)
	}
	return err
}

// A client that closed its sending side still receives the answer.
func TestHalfClose(t *testing.T) {
	client, _ := pipeThrough(t, func(conn *net.TCPConn) {
		question, _ := io.ReadAll(conn) // until the client closes its sending side
		_, _ = conn.Write([]byte("heard " + string(question)))
		_ = conn.Close()
	})
	_, _ = client.Write(append(record("hello"), " again"...))
	_ = client.CloseWrite()
	if answer, err := io.ReadAll(client); err != nil || string(answer) != "heard "+string(record("hello"))+" again" {
		t.Errorf("got %q, %v", answer, err)
	}
}

// A change of the configuration keeps connections to remaining backends and closes connections to
// removed backends.
func TestConfigurationChange(t *testing.T) {
	client, pool := pipeThrough(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	echo := func() error { return echoes(client) }
	if err := echo(); err != nil {
		t.Fatal(err)
	}
	keep := pool.backends[0].Backend
	if added := pool.set([]Backend{{"other", "127.0.0.1:1"}, keep}); len(added) != 1 {
		t.Errorf("added %v", added)
	}
	if err := echo(); err != nil {
		t.Errorf("connection lost by a change: %v", err)
	}
	pool.set(nil)
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("the connection still exists after the removal of its backend")
	}
}

func TestPick(t *testing.T) {
	p := newPool()
	added := p.set([]Backend{{"a", "a:1"}, {"b", "b:1"}, {"c", "c:1"}})
	if b, changed := p.pick(nil); b != nil || changed == nil {
		t.Fatalf("picked %v without health", b)
	}
	_, changed := p.pick(nil)
	p.setHealth(added[0], true)
	select {
	case <-changed:
	default:
		t.Error("the change did not wake the waiting connection")
	}
	p.setHealth(added[2], true)
	if p.setHealth(added[2], true) {
		t.Error("an unchanged health is reported as a change")
	}
	var names []string
	for range 4 {
		b, _ := p.pick(nil)
		names = append(names, b.Name)
	}
	if got := strings.Join(names, ""); got != "acac" {
		t.Errorf("the order of picks is %s", got)
	}
	if b, _ := p.pick([]*backend{added[0]}); b.Name != "c" {
		t.Errorf("picked %s, which was tried", b.Name)
	}
	if b, _ := p.pick([]*backend{added[0], added[2]}); b != nil {
		t.Errorf("picked %s, all were tried", b.Name)
	}
}

// The status reports an address that is in use. The balancer serves it as soon as it is free.
func TestAddressTaken(t *testing.T) {
	taken, err := net.Listen("tcp", ports.Address(t))
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, fast)
	config := Config{Listen: []string{f.address, taken.Addr().String()}}
	if err := atomicfile.WriteJSON(filepath.Join(f.dir, ConfigFile), config, 0o600); err != nil {
		t.Fatal(err)
	}
	f.await("reported", func(s Status) bool { return strings.Contains(s.Message, "in use") && len(s.Listening) == 1 })
	_ = taken.Close()
	f.await("served", func(s Status) bool { return s.Message == "" && len(s.Listening) == 2 })
}

// TestRedirect: a machine cannot make the balancer send a request to another address, and it is not healthy.
func TestRedirect(t *testing.T) {
	var others atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { others.Add(1) }))
	defer other.Close()
	machine := httptest.NewTLSServer(http.RedirectHandler(other.URL, http.StatusFound))
	defer machine.Close()
	if err := check(t.Context(), healthClient(fast), machine.Listener.Addr().String()); err == nil || others.Load() > 0 {
		t.Errorf("the check ended with %v after %d requests to another address", err, others.Load())
	}
}
