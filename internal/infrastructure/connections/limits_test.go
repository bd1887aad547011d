package connections

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// listen starts a manager with the place of a host, and returns the configuration of the host.
func listen(t *testing.T, change func(*Inbound)) (*WithT, *slot, *tls.Config, string) {
	t.Helper()
	g := NewWithT(t)
	dir := t.TempDir()
	creds, err := credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	in := NewInbound()
	in.Address = listener.Addr().String()
	change(in)
	s, err := in.open("h", creds, func(*x509.Certificate) {})
	g.Expect(err).NotTo(HaveOccurred())
	go func() { _ = in.Serve(t.Context(), listener) }()
	config, err := credentials.In(dir).DialConfig("h")
	g.Expect(err).NotTo(HaveOccurred())
	return g, s, config, in.Address
}

// Peers that finish no handshake keep no host out, however many places they have taken. They lose their oldest connections.
func TestSlowHandshakes(t *testing.T) {
	t.Parallel()
	g, s, config, address := listen(t, func(in *Inbound) { in.timeout = time.Hour })
	from := func(last byte) net.Conn {
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, last)}}).Dial("tcp", address)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = conn.Close() })
		g.Expect(conn.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
		return conn
	}
	other := from(3) // the oldest handshake, of a source with one
	var slow []net.Conn
	for range maxHandshakes {
		slow = append(slow, from(2))
	}
	for n := range 3 {
		conn, err := tls.Dial("tcp", address, config)
		g.Expect(err).NotTo(HaveOccurred(), "host %d", n)
		t.Cleanup(func() { _ = conn.Close() })
		used, err := s.dial(t.Context(), "")
		g.Expect(err).NotTo(HaveOccurred(), "a host at another address gets in")
		g.Expect(used.Close()).To(Succeed())
	}
	_, err := slow[0].Read(make([]byte, 1))
	g.Expect(err).To(MatchError(io.EOF), "the oldest handshake of the source with most handshakes")
	g.Expect(tls.Client(other, config).HandshakeContext(t.Context())).To(Succeed(), "a slow host at another address")
	g.Expect(tls.Client(slow[maxHandshakes-1], config).HandshakeContext(t.Context())).To(Succeed(), "the newest handshake")
}

func TestSourceOf(t *testing.T) {
	g := NewWithT(t)
	for address, want := range map[string]string{
		"192.0.2.1:4000": "192.0.2.1/32", "[::ffff:192.0.2.1]:4000": "192.0.2.1/32",
		"[2001:db8:0:1:2:3:4:5]:4000": "2001:db8:0:1::/64", "[fe80::1%eth0]:4000": "fe80::/64",
	} {
		found, err := netip.ParseAddrPort(address)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(sourceOf(net.TCPAddrFromAddrPort(found)).String()).To(Equal(want), address)
	}
}

func TestHandshakeTimeout(t *testing.T) {
	t.Parallel()
	g, _, _, address := listen(t, func(in *Inbound) { in.timeout = 100 * time.Millisecond })
	conn, err := net.Dial("tcp", address)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = conn.Close() })
	g.Expect(conn.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
	_, err = conn.Read(make([]byte, 1))
	g.Expect(err).To(MatchError(io.EOF))
}

// A host has a bounded number of unused connections: the newest ones. A connection that the host closes is not used.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	g, s, config, address := listen(t, func(*Inbound) {})
	idle := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.idle)
	}
	var conns []*tls.Conn
	for n := range maxIdle + 2 {
		conn, err := tls.Dial("tcp", address, config)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = conn.Close() })
		conns = append(conns, conn)
		g.Eventually(idle, "30s").Should(Equal(min(n+1, maxIdle)))
	}
	for _, old := range conns[:2] {
		g.Expect(old.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
		_, err := old.Read(make([]byte, 1))
		g.Expect(err).To(MatchError(io.EOF))
	}
	g.Expect(conns[maxIdle+1].Close()).To(Succeed())
	g.Eventually(idle, "30s").Should(Equal(maxIdle - 1))
	used, err := s.dial(t.Context(), "")
	g.Expect(err).NotTo(HaveOccurred())
	_, err = used.Write([]byte("x"))
	g.Expect(err).NotTo(HaveOccurred())
	newest := conns[maxIdle]
	g.Expect(newest.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
	_, err = newest.Read(make([]byte, 1))
	g.Expect(err).NotTo(HaveOccurred(), "the newest connection is used")
	_, err = newest.Write([]byte("y"))
	g.Expect(err).NotTo(HaveOccurred())
	_, err = used.Read(make([]byte, 1))
	g.Expect(err).NotTo(HaveOccurred(), "the end of the watch does not harm the connection")
	s.close()
	_, err = s.dial(t.Context(), "")
	g.Expect(err).To(MatchError(net.ErrClosed))
}

// A host cannot fill the memory of the manager with objects. What it removes does not count.
func TestMirrorIsBounded(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	h := &Host{machines: map[string]*hostpb.Machine{}, loadBalancers: map[string]*hostpb.LoadBalancer{}, promised: map[string]Resources{}, notify: func(Event) {}}
	message := strings.Repeat("x", 1<<20)
	report := func(kind hostpb.Event_Type, id string) error {
		h.apply(&hostpb.Event{Type: kind, Object: &hostpb.Event_Machine{Machine: &hostpb.Machine{
			Spec: &hostpb.MachineSpec{Id: id}, Status: &hostpb.MachineStatus{Message: message},
		}}})
		return h.bound()
	}
	for range 3 * maxMirrorBytes / len(message) {
		g.Expect(report(hostpb.Event_CHANGED, "a")).To(Succeed(), "an object that changes")
	}
	g.Expect(report(hostpb.Event_DELETED, "a")).To(Succeed())
	g.Expect(h.bytes).To(BeZero())
	h.apply(&hostpb.Event{Object: &hostpb.Event_LoadBalancer{LoadBalancer: &hostpb.LoadBalancer{Id: "l", Message: message}}})
	var err error
	reported := 0
	for ; err == nil && reported < 1000; reported++ {
		err = report(hostpb.Event_CHANGED, strconv.Itoa(reported))
	}
	g.Expect(err).To(MatchError(ContainSubstring("expected at most 64 MiB")))
	g.Expect(reported).To(Equal(maxMirrorBytes/len(message)-1), "with the load balancer")
	g.Expect(h.Machines()).To(BeEmpty())
	g.Expect(report(hostpb.Event_CHANGED, "again")).To(Succeed())
	g.Expect(h.bytes).To(Equal(proto.Size(h.Machine("again"))))
}

// The text of an error of a host is bounded. Its code stays.
func TestErrorsAreBounded(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	long := status.Error(codes.AlreadyExists, strings.Repeat("ü", 1<<20))
	g.Expect(Code(bounded(long))).To(Equal(codes.AlreadyExists))
	g.Expect(len(bounded(long).Error())).To(BeNumerically("<", 2*maxText))
	g.Expect(len(Message(long))).To(BeNumerically("<=", maxText+len("…")))
	short := status.Error(codes.NotFound, "no machine")
	g.Expect(bounded(short)).To(BeIdenticalTo(short))
	g.Expect(bounded(nil)).To(Succeed())
}

// A message for users does not name the owner of an id. The owner can be in another namespace.
func TestPublicMessage_ALL18(t *testing.T) {
	t.Parallel()
	const secret = "cluster team-a/payments"
	for name, c := range map[string]struct {
		err         error
		says, never string
	}{
		"a copy":           {fmt.Errorf("first: %w", refusal.Errorf(hostpb.Refusal_ID_IN_USE, "network n belongs to %s", secret)), "is a copy", secret},
		"a volume":         {refusal.Errorf(hostpb.Refusal_NOT_OWNER, "volume v belongs to %s", secret), "is a copy", secret},
		"another refusal":  {refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "interface eth1 is too small"), "interface eth1 is too small", secret},
		"an error of gRPC": {status.Error(codes.Unavailable, "no connection"), "no connection", secret},
	} {
		if got := PublicMessage(c.err); !strings.Contains(got, c.says) || strings.Contains(got, c.never) || len(got) > 500 {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// flappingHost ends its streams, or reports that a stream is in sync without a pause.
type flappingHost struct {
	hostpb.UnimplementedHostServer

	ends bool
}

func (h flappingHost) Watch(_ *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	for {
		if err := stream.Send(&hostpb.Event{Type: hostpb.Event_SYNCED}); err != nil || h.ends {
			return err
		}
	}
}

// Root on a host cannot start the reconcilers of all clusters without a pause, neither by the end of streams nor in a stream.
func TestFlappingHost(t *testing.T) {
	t.Parallel()
	for name, host := range map[string]flappingHost{"ends": {ends: true}, "stays": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := NewWithT(t)
			pool := NewPool(t.Context(), nil)
			var changes atomic.Int32
			pool.receivers = append(pool.receivers, func(e Event) {
				if e.Connection {
					changes.Add(1)
				}
			})
			start := time.Now()
			_, err := pool.Connect(t.Context(), &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Address: serve(t, host)}})
			g.Expect(err).NotTo(HaveOccurred())
			g.Eventually(changes.Load, "30s").Should(BeNumerically(">=", changesAtOnce))
			excess := func() int { return int(changes.Load()) - changesAtOnce - int(time.Since(start)/changePause) }
			g.Consistently(excess, changePause/2).Should(BeNumerically("<=", 1))
		})
	}
}

// serve serves a host until the test ends, and returns its address.
func serve(t *testing.T, host hostpb.HostServer) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "host.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	hostpb.RegisterHostServer(server, host)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return "unix://" + socket
}

// largeHost sends messages of a size.
type largeHost struct {
	hostpb.UnimplementedHostServer

	size int
}

func (h *largeHost) Logs(_ *hostpb.LogsRequest, stream hostpb.Host_LogsServer) error {
	return stream.Send(&hostpb.LogChunk{Data: make([]byte, h.size)})
}

func (h *largeHost) GetMachine(context.Context, *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	return &hostpb.Machine{Status: &hostpb.MachineStatus{Message: strings.Repeat("x", h.size)}}, nil
}

// A host fills the memory of the manager neither with the messages of the streams of users nor with its answers before them.
func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	large := &largeHost{}
	host, closer, err := Dial(t.Context(), nil, &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Address: serve(t, large)}}, nil)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = closer.Close() })
	log := func(size int) error {
		large.size = size
		stream, err := host.Logs(t.Context(), &hostpb.LogsRequest{})
		g.Expect(err).NotTo(HaveOccurred())
		_, err = stream.Recv()
		return err
	}
	machine := func(size int) error {
		large.size = size
		_, err := host.GetMachine(t.Context(), &hostpb.GetMachineRequest{})
		return err
	}
	g.Expect(log(64<<10)).To(Succeed(), "as large as capstand sends them")
	g.Expect(Code(log(maxStreamBytes))).To(Equal(codes.ResourceExhausted), "a message with its header is longer")
	g.Expect(machine(maxStreamBytes)).To(Succeed())
	g.Expect(Code(machine(maxAnswerBytes))).To(Equal(codes.ResourceExhausted))
}
