package connections

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

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
	for range credentials.MaxHandshakes {
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
	g.Expect(tls.Client(slow[credentials.MaxHandshakes-1], config).HandshakeContext(t.Context())).To(Succeed(), "the newest handshake")
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
	g.Expect(h.bytes).To(Equal(memory(h.Machine("again"))))
}

// acceptingHost accepts all Services, and removes all networks.
type acceptingHost struct{ hostpb.HostClient }

func (acceptingHost) SetServices(context.Context, *hostpb.SetServicesRequest, ...grpc.CallOption) (*hostpb.SetServicesResponse, error) {
	return &hostpb.SetServicesResponse{}, nil
}

func (acceptingHost) DeleteNetwork(context.Context, *hostpb.DeleteNetworkRequest, ...grpc.CallOption) (*hostpb.DeleteNetworkResponse, error) {
	return &hostpb.DeleteNetworkResponse{}, nil
}

// The records of Services, which a host can have reported, count as its objects. The networks for which it gets pulses are bounded too.
func TestRecordsOfServicesAreBounded(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	h := &Host{HostClient: acceptingHost{}, services: map[Network]publication{}, heartbeat: newHeartbeat(), notify: func(Event) {}}
	ensure := func(n int) {
		_, err := h.EnsureServices(t.Context(), &hostpb.SetServicesRequest{
			NetworkId: strconv.Itoa(n), Services: []*hostpb.PublishedService{{Name: strings.Repeat("x", 1<<20)}},
		})
		g.Expect(err).NotTo(HaveOccurred())
	}
	for range 3 {
		ensure(0)
	}
	one := h.bytes
	g.Expect(one).To(BeNumerically("~", 1<<20, 1<<10), "a record that is replaced")
	_, err := h.DeleteNetwork(t.Context(), &hostpb.DeleteNetworkRequest{Id: "0"})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(h.bytes).To(BeZero())
	for n := range 2 * maxMirrorBytes / one {
		ensure(n)
	}
	g.Expect(h.services).To(HaveLen(maxMirrorBytes / one))
	g.Expect(h.bytes).To(BeNumerically("<=", maxMirrorBytes))
	h.synced(newPresent())
	g.Expect(h.services).To(BeEmpty())
	g.Expect(h.bytes).To(BeZero())

	h.beat = make(chan struct{}, 1)
	for n := range 2 * maxPulsed {
		h.SetPulses(Network{ID: strconv.Itoa(n)}, true)
	}
	g.Expect(h.heartbeat.networks).To(HaveLen(maxPulsed))
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

// busyHost sends events without a pause, or ends its streams after each.
type busyHost struct {
	hostpb.UnimplementedHostServer

	event func(n int) *hostpb.Event
	ends  bool
}

func (h busyHost) Watch(_ *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	if err := stream.Send(&hostpb.Event{Type: hostpb.Event_SYNCED}); err != nil {
		return err
	}
	for n := 0; ; n++ {
		if err := stream.Send(h.event(n)); err != nil || h.ends {
			return err
		}
	}
}

// Root on a host cannot start the reconcilers of all clusters without a pause, neither by the end of streams nor in a stream.
func TestBusyHost(t *testing.T) {
	t.Parallel()
	synced := func(int) *hostpb.Event { return &hostpb.Event{Type: hostpb.Event_SYNCED} }
	for name, tc := range map[string]struct {
		host   busyHost
		counts func(Event) bool
		burst  int
		pause  time.Duration
	}{
		"ends":           {busyHost{event: synced, ends: true}, func(e Event) bool { return e.Connection }, changesAtOnce, changePause},
		"connects":       {busyHost{event: synced}, func(e Event) bool { return e.Connection }, changesAtOnce, changePause},
		"capacity":       {busyHost{event: memoryOf}, func(e Event) bool { return e.Capacity }, changesAtOnce, changePause},
		"machines":       {busyHost{event: machineOf}, func(e Event) bool { return e.Machine != nil }, objectsAtOnce, time.Second / objectsPerSecond},
		"load balancers": {busyHost{event: balancerOf}, func(e Event) bool { return e.LoadBalancer != nil }, objectsAtOnce, time.Second / objectsPerSecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := NewWithT(t)
			pool := NewPool(t.Context(), nil)
			var changes atomic.Int32
			pool.receivers = append(pool.receivers, func(e Event) {
				if tc.counts(e) {
					changes.Add(1)
				}
			})
			start := time.Now()
			_, err := pool.Connect(t.Context(), &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Address: serve(t, tc.host)}})
			g.Expect(err).NotTo(HaveOccurred())
			g.Eventually(changes.Load, "30s").Should(BeNumerically(">=", tc.burst))
			excess := func() int { return int(changes.Load()) - tc.burst - int(time.Since(start)/tc.pause) }
			g.Consistently(excess, changePause/2).Should(BeNumerically("<=", 1))
		})
	}
}

func memoryOf(n int) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: &hostpb.HostInfo{MemoryBytes: int64(n)}}}
}

func machineOf(int) *hostpb.Event { return machineEvent(hostpb.Event_CHANGED, "m") }

func balancerOf(int) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_LoadBalancer{LoadBalancer: &hostpb.LoadBalancer{Id: "l"}}}
}

func machineEvent(kind hostpb.Event_Type, id string, addresses ...*hostpb.Address) *hostpb.Event {
	return &hostpb.Event{Type: kind, Object: &hostpb.Event_Machine{Machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: id, Addresses: addresses}}}}
}

// The last of many changes of capacity is reported, although it follows others without a pause.
func TestLastCapacityIsReported(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	var state, seen atomic.Int32
	notify := paced(t.Context(), func(Event) { seen.Store(state.Load()) })
	const last = 10 * changesAtOnce
	for range last {
		state.Add(1)
		notify(Event{Capacity: true})
	}
	g.Expect(seen.Load()).To(BeEquivalentTo(changesAtOnce), "no event waits for another one")
	g.Eventually(seen.Load, "30s").Should(BeEquivalentTo(last))
}

// A machine with more addresses than capstand reports ends the stream: the lists of a description cost memory and time.
func TestMachineWithManyAddresses(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	many := []*hostpb.Address{{}, {}, {}}
	host := busyHost{ends: true, event: func(int) *hostpb.Event { return machineEvent(hostpb.Event_CHANGED, "m", many...) }}
	h, err := NewPool(t.Context(), nil).Connect(t.Context(), &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Address: serve(t, host)}})
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(h.ConnectionError, "30s").Should(MatchError(ContainSubstring("at most 2 addresses, found 3")))
	g.Expect(h.Machines()).To(BeEmpty())
}

// A host has no memory of the manager for objects that it removes before the stream is in sync.
func TestPresent(t *testing.T) {
	g := NewWithT(t)
	p, gone := newPresent(), balancerOf(0)
	gone.Type = hostpb.Event_DELETED
	p.note(machineEvent(hostpb.Event_CHANGED, "m"))
	p.note(balancerOf(0))
	p.note(memoryOf(0))
	g.Expect(p).To(Equal(present{map[string]bool{"m": true}, map[string]bool{"l": true}}))
	p.note(gone)
	p.note(machineEvent(hostpb.Event_DELETED, "m"))
	g.Expect(p).To(Equal(newPresent()))
}

// answeringHost answers with any machine.
type answeringHost struct {
	hostpb.HostClient

	machine *hostpb.Machine
}

func (h answeringHost) EnsureMachine(context.Context, *hostpb.EnsureMachineRequest, ...grpc.CallOption) (*hostpb.Machine, error) {
	return h.machine, nil
}

func (h answeringHost) UpdateMachine(context.Context, *hostpb.UpdateMachineRequest, ...grpc.CallOption) (*hostpb.Machine, error) {
	return h.machine, nil
}

// The answers of a host bring nothing into the mirror but the machine of the request, within the bound of the mirror.
func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	spec := &hostpb.MachineSpec{Id: "m"}
	for name, tc := range map[string]struct {
		answer *hostpb.Machine
		bytes  int
		want   string
	}{
		"another machine": {&hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "other"}}, 0, "expected the host to answer with machine m"},
		"many addresses":  {&hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "m", Addresses: []*hostpb.Address{{}, {}, {}}}}, 0, "found 3"},
		"a full mirror":   {&hostpb.Machine{Spec: spec}, maxMirrorBytes, "at most 64 MiB"},
		"the machine":     {&hostpb.Machine{Spec: spec}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			want := Succeed()
			if tc.want != "" {
				want = MatchError(ContainSubstring(tc.want))
			}
			h := &Host{HostClient: answeringHost{machine: tc.answer}, machines: map[string]*hostpb.Machine{}, promised: map[string]Resources{}, bytes: tc.bytes}
			_, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec})
			g.Expect(err).To(want)
			g.Expect(h.Machines()).To(HaveLen(map[bool]int{true: 1}[err == nil]))
			before := &hostpb.Machine{Spec: spec}
			h.machines["m"] = before
			_, err = h.UpdateMachine(t.Context(), &hostpb.UpdateMachineRequest{Spec: spec})
			g.Expect(err).To(want)
			g.Expect(h.Machine("m") == before).To(Equal(err != nil))
		})
	}
}

// A message counts with its memory, not with its bytes on the wire: an empty message in a list has two bytes there.
func TestMemory(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	const many = 100_000
	empty := &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "m", Addresses: make([]*hostpb.Address, many)}}
	for i := range empty.Spec.Addresses {
		empty.Spec.Addresses[i] = &hostpb.Address{}
	}
	g.Expect(memory(empty)).To(BeNumerically(">", many*int(unsafe.Sizeof(hostpb.Address{}))))
	texts := &hostpb.HostInfo{Images: make([]string, many)}
	g.Expect(memory(texts)).To(BeNumerically(">", many*int(unsafe.Sizeof(""))))
	g.Expect(memory((*hostpb.HostInfo)(nil))).To(BeZero())
	wire, err := proto.Marshal(empty)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(len(wire)).To(BeNumerically("<", maxAnswerBytes))
	g.Expect(memoryOnceRead(wire[:len(wire)-1], empty.ProtoReflect().Descriptor())).To(BeNumerically("<", 2*structBytes), "a broken message ends")
}

// A host cannot fill the memory of the manager with a small message.
func TestMessagesAreBounded(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	large := &listingHost{}
	host, closer, err := Dial(t.Context(), nil, &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{Address: serve(t, large)}}, nil)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = closer.Close() })
	machine := func(addresses int) error {
		large.machines = []*hostpb.Machine{{Spec: &hostpb.MachineSpec{Addresses: slices.Repeat([]*hostpb.Address{{}}, addresses)}}}
		_, err := host.GetMachine(t.Context(), &hostpb.GetMachineRequest{})
		return err
	}
	g.Expect(machine(1000)).To(Succeed())
	g.Expect(machine(100_000)).To(MatchError(ContainSubstring("at most 4 MiB of memory")), "less than 1 MiB on the wire")
	list := func(machines, message int) error {
		large.machines = slices.Repeat([]*hostpb.Machine{{Status: &hostpb.MachineStatus{Message: strings.Repeat("x", message)}}}, machines)
		_, err := host.ListMachines(t.Context(), &hostpb.ListMachinesRequest{})
		return err
	}
	g.Expect(list(1000, 4<<10)).To(Succeed(), "a list of a whole host can be longer than other answers")
	g.Expect(Code(list(3000, 4<<10))).To(Equal(codes.ResourceExhausted))
	g.Expect(list(100_000, 0)).To(MatchError(ContainSubstring("at most 32 MiB of memory")))
}

// listingHost has any machines.
type listingHost struct {
	hostpb.UnimplementedHostServer

	machines []*hostpb.Machine
}

func (h *listingHost) GetMachine(context.Context, *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	return h.machines[0], nil
}

func (h *listingHost) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	return &hostpb.ListMachinesResponse{Machines: h.machines}, nil
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
