package connections_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// line is the network between a manager and a host. A cut line drops all data and closes no connection, like a box without power.
// A repaired line carries new connections, and old connections stay silent. newLine returns the address of the manager's end.
type line struct {
	network, to string

	cut atomic.Pointer[atomic.Bool]
	// delay of each message, in nanoseconds.
	delay atomic.Int64

	mu   sync.Mutex
	open []net.Conn
}

func newLine(t *testing.T, to string) (*line, string) {
	t.Helper()
	l, at := &line{network: "tcp", to: to}, "127.0.0.1:0"
	if path, unix := strings.CutPrefix(to, "unix://"); unix {
		l.network, l.to, at = "unix", path, filepath.Join(t.TempDir(), "s")
	}
	listener, err := net.Listen(l.network, at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	l.mend()
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			l.connect(t, client)
		}
	}()
	if l.network == "tcp" {
		return l, listener.Addr().String()
	}
	return l, "unix://" + listener.Addr().String()
}

// connect connects a client to the host over the line in its current state.
func (l *line) connect(t *testing.T, client net.Conn) {
	t.Cleanup(func() { _ = client.Close() })
	host, err := net.Dial(l.network, l.to)
	if err != nil {
		_ = client.Close()
		return
	}
	t.Cleanup(func() { _ = host.Close() })
	l.mu.Lock()
	l.open = append(l.open, client, host)
	l.mu.Unlock()
	cut := l.cut.Load()
	go l.carry(client, host, cut)
	go l.carry(host, client, cut)
}

func (l *line) sever() { l.cut.Load().Store(true) }
func (l *line) mend()  { l.cut.Store(&atomic.Bool{}) }

// reset closes the current connections and drops data in transit.
func (l *line) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.open {
		_ = conn.Close()
	}
	l.open = nil
}

// carry copies data until one end closes. Over a cut line, neither end notices this.
func (l *line) carry(from, to net.Conn, cut *atomic.Bool) {
	data := make([]byte, 32<<10)
	for {
		n, err := from.Read(data)
		time.Sleep(time.Duration(l.delay.Load()))
		if cut.Load() {
			if err != nil {
				return
			}
			continue
		}
		if err == nil {
			_, err = to.Write(data[:n])
		}
		if err != nil {
			_ = to.Close()
			return
		}
	}
}

// Both sides detect a silent loss of the other. Pending calls fail, the host ends its watch, and the normal state returns with the
// network.
func TestSilence(t *testing.T) {
	const answer = 5 * time.Second // A busy box answers in time.
	server := fakehost.New(t, func(h *fakehost.Host) { h.Keepalive = hostpb.Keepalive{Idle: time.Second, Answer: answer} })
	line, address := newLine(t, server.Address())
	g, _, h, events := connect(t, address, func(p *connections.Pool) { p.Keepalive.Answer = answer })
	g.Eventually(h.ConnectionError).Should(Succeed())
	ensure(g, h, "id-1", "a", "10.200.0.2", gib)
	g.Expect(server.Watchers()).To(Equal(1))

	drain(events)
	line.sever()
	silent := time.Now()
	connection := Receive(WithTransform(func(e connections.Event) bool { return e.Connection }, BeTrue()))
	g.Eventually(events).Should(connection)
	t.Logf("the manager noticed the loss after %s", time.Since(silent).Round(time.Millisecond))
	g.Expect(h.ConnectionError()).To(MatchError(ContainSubstring("keepalive")))
	g.Eventually(server.Watchers).Should(BeZero())
	g.Expect(h.Machine("id-1")).NotTo(BeNil(), "what was known is kept")

	server.Lose("id-1")
	drain(events)
	line.mend()
	g.Eventually(events).Should(connection)
	g.Eventually(h.ConnectionError).Should(Succeed())
	g.Expect(h.Machine("id-1")).To(BeNil())
}

// The line delays all messages and breaks repeatedly. Each machine that is requested until an answer arrives exists once. In the
// end, the mirror of the manager equals the state of the host, with one watch.
func TestBadLine(t *testing.T) {
	server := fakehost.New(t)
	line, address := newLine(t, server.Address())
	line.delay.Store(int64(20 * time.Millisecond))
	g, _, h, _ := connect(t, address)
	g.Eventually(h.ConnectionError).Should(Succeed())
	const machines = 10
	breaking, stop := context.WithCancel(t.Context())
	var breaks sync.WaitGroup
	breaks.Go(func() {
		for breaking.Err() == nil {
			time.Sleep(150 * time.Millisecond)
			line.reset()
		}
	})
	for n := range machines {
		g.Eventually(func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
				Id: fmt.Sprintf("id-%d", n), Namespace: "ns", Name: fmt.Sprintf("m-%d", n), MemoryBytes: gib, Image: "host", KubernetesVersion: "v1.36.3",
				Network:   &hostpb.Network{Id: "net", Namespace: "ns", Name: "c", Cidr: "10.200.0.0/21"},
				Addresses: []*hostpb.Address{{Address: fmt.Sprintf("10.200.0.%d", n+2), Prefix: 21}},
			}})
			return err
		}).Should(Succeed())
	}
	stop()
	breaks.Wait()
	g.Eventually(h.ConnectionError).Should(Succeed())
	g.Eventually(func() bool { return h.Machine("id-0") != nil }).Should(BeTrue(), "machine 0 is not known")
	line.reset()
	server.Lose("id-0") // No watch exists at this moment.
	for n := 1; n < machines; n++ {
		g.Eventually(func() bool { return h.Machine(fmt.Sprintf("id-%d", n)) != nil }).Should(BeTrue(), "machine %d is not known", n)
	}
	g.Eventually(func() bool { return h.Machine("id-0") == nil }).Should(BeTrue(), "the lost machine is still known")
	g.Eventually(server.Watchers).Should(Equal(1))
}
