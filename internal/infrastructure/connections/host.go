package connections

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	// callTimeout bounds every call but Watch: a capstand that hangs must not hold a worker.
	callTimeout = 20 * time.Second
	// maxMessageBytes: bootstrap data is at most what fits into a Secret, 1 MiB.
	maxMessageBytes = 8 << 20

	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// ErrConnecting is the state of a host that has not answered yet.
var ErrConnecting = errors.New("connecting")

// Host is the connection to one host and the mirror of what is on it. The messages that it
// returns are shared: they must not be changed.
type Host struct {
	hostpb.HostClient

	name, address string
	credentials   credentials.Client
	served        *atomic.Pointer[x509.Certificate] // the host's at the last handshake
	conn          *grpc.ClientConn
	notify        func(Event)
	stop          context.CancelFunc
	stopped       context.Context

	mu            sync.RWMutex
	err           error // nil while connected
	info          *hostpb.HostInfo
	machines      map[string]*hostpb.Machine
	loadBalancers map[string]*hostpb.LoadBalancer
	promised      map[string]int64
	removals      int  // of machines, told by the host
	noClaims      bool // the host's capstand is older than claims
}

func newHost(name, address string, creds credentials.Client, keepalive hostpb.Keepalive, notify func(Event)) (*Host, error) {
	served := &atomic.Pointer[x509.Certificate]{}
	transport, err := transport(address, creds, served.Store)
	if err != nil {
		return nil, fmt.Errorf("credentials of host %s: %w", name, err)
	}
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(transport),
		keepalive.Client(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: maxBackoff,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithUnaryInterceptor(withTimeout),
	)
	if err != nil {
		return nil, fmt.Errorf("address %q of host %s: %w", address, name, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Host{
		HostClient: hostpb.NewHostClient(conn),
		name:       name, address: address, credentials: creds,
		served: served,
		conn:   conn, notify: notify, stop: cancel, stopped: ctx,
		err:           ErrConnecting,
		machines:      map[string]*hostpb.Machine{},
		loadBalancers: map[string]*hostpb.LoadBalancer{},
		promised:      map[string]int64{},
	}, nil
}

func withTimeout(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return invoke(ctx, method, req, reply, conn, opts...)
}

// Name of the CapstanHost.
func (h *Host) Name() string { return h.name }

// Connected returns nil while the mirror follows the host, and otherwise why it does not. A host that is gone without a
// word is one that does not answer in the time that the pool's Keepalive gives it.
func (h *Host) Connected() error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.err
}

// Info is what the host is and has, as it last said; nil when it never did.
func (h *Host) Info() *hostpb.HostInfo {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.info
}

// ID is the identity that the host's capstand has made for itself. A host says it before all else: it is known
// while the host is connected.
func (h *Host) ID() string { return h.Info().GetId() }

// Machine returns the machine as the host last described it, or nil. Nil means that the host does not
// have it only while it is connected.
func (h *Host) Machine(id string) *hostpb.Machine {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.machines[id]
}

// Machines are all of the host's, as it last described them.
func (h *Host) Machines() []*hostpb.Machine {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return slices.Collect(maps.Values(h.machines))
}

// EnsureMachine makes a machine, or finds it. The mirror has it at once: until the host's event comes, which may take
// a while when there are many, it would seem to be lost.
func (h *Host) EnsureMachine(ctx context.Context, r *hostpb.EnsureMachineRequest, opts ...grpc.CallOption) (*hostpb.Machine, error) {
	h.mu.RLock()
	before := h.removals
	h.mu.RUnlock()
	m, err := h.HostClient.EnsureMachine(ctx, r, opts...)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// Not what an event may have told us already, or a removal that has overtaken the answer.
	if id := m.GetSpec().GetId(); h.err == nil && h.machines[id] == nil && h.removals == before {
		h.machines[id] = m
		delete(h.promised, id)
	}
	return m, nil
}

// Claim records on the host that the machine's object is in the management cluster, if another one or none is recorded. A host
// whose capstand is older than claims is not asked again until it connects anew.
func (h *Host) Claim(ctx context.Context, m *hostpb.Machine, managementCluster string) error {
	h.mu.RLock()
	skip := h.noClaims
	h.mu.RUnlock()
	if skip || m.GetStatus().GetManagementCluster() == managementCluster {
		return nil
	}
	_, err := h.ClaimMachine(ctx, &hostpb.ClaimMachineRequest{
		Id: m.GetSpec().GetId(), Namespace: m.GetSpec().GetNamespace(), Name: m.GetSpec().GetName(), ManagementCluster: managementCluster,
	})
	if Code(err) == codes.Unimplemented {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.noClaims = true
		return nil
	}
	return err
}

// LoadBalancer returns the load balancer as the host last described it, or nil.
func (h *Host) LoadBalancer(id string) *hostpb.LoadBalancer {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.loadBalancers[id]
}

// Promise sets memory aside for a machine that is about to be made, until the host has it: the
// host's own account lags behind placement. Release takes it back.
func (h *Host) Promise(id string, bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machines[id] == nil {
		h.promised[id] = bytes
	}
}

// Release takes a promise back.
func (h *Host) Release(id string) {
	h.mu.Lock()
	before := h.freeMemory()
	delete(h.promised, id)
	more := h.freeMemory() > before
	h.mu.Unlock()
	if more {
		h.notify(Event{Host: h.name, Capacity: true})
	}
}

// FreeMemory is what is left for new machines, in bytes; what was promised counts as used. Whenever it
// grows, an Event tells so.
func (h *Host) FreeMemory() int64 {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.freeMemory()
}

// freeMemory goes by our own account or the host's, whichever is higher: either may be the first to know of a
// machine. A promised machine that the host has made already is in both, and must not count twice.
func (h *Host) freeMemory() int64 {
	var used int64
	for _, m := range h.machines {
		used += m.GetSpec().GetMemoryBytes()
	}
	for _, bytes := range h.promised {
		used += bytes
	}
	return h.info.GetMemoryBytes() - max(used, h.info.GetAllocatedMemoryBytes())
}

func (h *Host) close() {
	h.stop()
	_ = h.conn.Close()
}

// run follows the host until ctx ends or the host is closed. A stream that breaks is opened
// again, at once after it worked and then with back-off.
func (h *Host) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.stopped, cancel)()
	delay := backoff.Jittered(minBackoff, maxBackoff)
	for ctx.Err() == nil {
		synced, err := h.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		h.disconnected(err)
		if synced {
			delay = backoff.Jittered(minBackoff, maxBackoff)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay.Step()):
		}
	}
}

// watch opens one stream and applies its events until it breaks.
func (h *Host) watch(ctx context.Context) (synced bool, err error) {
	stream, err := h.Watch(ctx, &hostpb.WatchRequest{})
	if err != nil {
		return false, err
	}
	present := map[string]bool{}
	for {
		e, err := stream.Recv()
		if err != nil {
			return synced, err
		}
		if e.GetType() == hostpb.Event_SYNCED {
			h.synced(present)
			synced = true
			continue
		}
		if !synced && e.GetType() == hostpb.Event_CHANGED {
			present[e.GetMachine().GetSpec().GetId()] = true
			present[e.GetLoadBalancer().GetId()] = true
		}
		h.apply(e)
	}
}

// apply takes one event into the mirror and passes it on.
func (h *Host) apply(e *hostpb.Event) {
	gone := e.GetType() == hostpb.Event_DELETED
	out := Event{Host: h.name}
	h.mu.Lock()
	before := h.freeMemory()
	changed, claimed := false, false
	switch o := e.GetObject().(type) {
	case *hostpb.Event_Machine:
		out.Machine = o.Machine
		have := h.machines[o.Machine.GetSpec().GetId()]
		claimed = have != nil && have.GetStatus().GetManagementCluster() != o.Machine.GetStatus().GetManagementCluster()
		if gone {
			h.removals++
		}
		put(h.machines, o.Machine.GetSpec().GetId(), o.Machine, gone)
		delete(h.promised, o.Machine.GetSpec().GetId())
	case *hostpb.Event_LoadBalancer:
		out.LoadBalancer = o.LoadBalancer
		put(h.loadBalancers, o.LoadBalancer.GetId(), o.LoadBalancer, gone)
	case *hostpb.Event_Host:
		changed = !proto.Equal(h.info, o.Host)
		h.info = o.Host
	}
	capacity := h.err == nil && (changed || h.freeMemory() > before)
	h.mu.Unlock()
	if out.Machine != nil || out.LoadBalancer != nil {
		h.notify(out)
	}
	if capacity {
		h.notify(Event{Host: h.name, Capacity: true})
	}
	if claimed {
		h.notify(Event{Host: h.name, Claimed: true})
	}
}

func put[T any](m map[string]T, id string, v T, gone bool) {
	if gone {
		delete(m, id)
		return
	}
	m[id] = v
}

// synced drops what the host no longer has and says that the host is connected.
func (h *Host) synced(present map[string]bool) {
	var lost []Event
	h.mu.Lock()
	h.err, h.noClaims = nil, false
	for id, m := range h.machines {
		if !present[id] {
			delete(h.machines, id)
			lost = append(lost, Event{Host: h.name, Machine: m})
		}
	}
	for id, lb := range h.loadBalancers {
		if !present[id] {
			delete(h.loadBalancers, id)
			lost = append(lost, Event{Host: h.name, LoadBalancer: lb})
		}
	}
	h.mu.Unlock()
	for _, e := range lost {
		h.notify(e)
	}
	h.notify(Event{Host: h.name, Connection: true})
}

// disconnected keeps the mirror as it last was.
func (h *Host) disconnected(err error) {
	h.mu.Lock()
	before := h.err
	h.err = errors.New(Message(err))
	changed := before == nil || before.Error() != h.err.Error()
	h.mu.Unlock()
	if changed {
		h.notify(Event{Host: h.name, Connection: true})
	}
}

// Message is what a host said, without the wording of gRPC around it.
func Message(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// Code of an error that a host returned.
func Code(err error) codes.Code { return status.Code(err) }
