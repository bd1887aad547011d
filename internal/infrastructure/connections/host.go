package connections

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/tracing"
)

const (
	// callTimeout bounds every call but Watch: a capstand that hangs must not hold a worker.
	callTimeout = 20 * time.Second
	// maxMessageBytes bounds requests, and answers that list the objects of a whole host. It is enough for bootstrap data, which fits into a
	// Secret and has at most 1 MiB, and for the Services of 20 clusters with the longest lists.
	maxMessageBytes = 8 << 20
	// maxAnswerBytes bounds all other messages of a host: descriptions of the host, of a machine and of a load balancer.
	maxAnswerBytes = 1 << 20
	// maxStreamBytes bounds each message of a stream for a user, who can have many of them. The messages of capstand have 64 KiB and less.
	maxStreamBytes = 256 << 10

	// maxMirrorBytes bounds the memory of a host's objects in the manager. Those of a host with 250 machines need about 4 MiB.
	maxMirrorBytes = 64 << 20
	// maxAddresses of a machine: one of each family.
	maxAddresses = 2
	// maxText bounds the text of a host's error in bytes: it gets into conditions and logs.
	maxText = 4096

	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second

	// changesAtOnce is the number of changes of a connection that are reported without a pause, and changePause the pause before each further
	// one. A restart of capstand is two changes.
	changesAtOnce = 20
	changePause   = 3 * time.Second
	// objectsAtOnce is the number of changes of machines and load balancers that are reported without a pause, and objectsPerSecond the rate of
	// further ones. A host with 1000 machines that connects again does not wait.
	objectsAtOnce    = 1000
	objectsPerSecond = 100
)

// Host is the connection to one host and a mirror of its objects. The returned messages are shared and must not be
// changed.
type Host struct {
	hostpb.HostClient

	name, address string
	credentials   credentials.Client
	inbound       *Inbound
	slot          *slot                             // of a host that dials, else nil
	served        *atomic.Pointer[x509.Certificate] // the host's at the last handshake
	conn          *grpc.ClientConn
	notify        func(Event)
	silence       time.Duration
	stop          context.CancelFunc
	stopped       context.Context
	// managementCluster identifies the management cluster to the host.
	managementCluster func(context.Context) (string, error)

	mu            sync.RWMutex
	err           error     // nil while connected
	since         time.Time // of the loss of the connection, or of the first attempt
	info          *hostpb.HostInfo
	machines      map[string]*hostpb.Machine // changed with keepMachine and dropMachine only
	sums          tally                      // of machines
	loadBalancers map[string]*hostpb.LoadBalancer
	bytes         int // of memory that info, machines, loadBalancers and services occupy
	promised      map[string]Resources
	removals      int // of machines, reported by the host
	spans         map[Network]*span
	services      map[Network]publication // changed with keepServices and dropServices only
	heartbeat     heartbeat
	beat          chan struct{} // has a value after pulses were set
	forgotten     int           // counts the spans that were forgotten
	noClaims      bool          // the host's capstand is older than claims
}

func newHost(host *infrav1.CapstanHost, creds credentials.Client, p *Pool) (_ *Host, err error) {
	name, address, served := host.Name, host.Spec.Address, &atomic.Pointer[x509.Certificate]{}
	var dialled *slot
	if host.Dials() {
		if dialled, err = p.Inbound.open(name, creds, served.Store); err != nil {
			return nil, fmt.Errorf("credentials of host %s: %w", name, err)
		}
	}
	way, err := routeTo(host, dialled, creds, served.Store)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	h := &Host{
		name: name, address: address, credentials: creds, inbound: p.Inbound, slot: dialled,
		served: served,
		notify: paced(ctx, p.notify), silence: p.Silence, stop: cancel, stopped: ctx, managementCluster: p.managementCluster,
		err:           ErrConnecting,
		since:         time.Now(),
		machines:      map[string]*hostpb.Machine{},
		loadBalancers: map[string]*hostpb.LoadBalancer{},
		promised:      map[string]Resources{},
		spans:         map[Network]*span{},
		services:      map[Network]publication{},
		heartbeat:     newHeartbeat(),
		beat:          make(chan struct{}, 1),
	}
	way.options = append(way.options, grpc.WithChainUnaryInterceptor(h.unlessSilent))
	if h.conn, err = way.dial(name, p.Keepalive); err != nil {
		cancel()
		return nil, err
	}
	h.HostClient = hostpb.NewHostClient(h.conn)
	return h, nil
}

// route is the way of calls to a host.
type route struct {
	target    string
	transport grpccredentials.TransportCredentials
	options   []grpc.DialOption
}

// routeTo returns the route to a host: over the connections that it dials, or to its address. seen is called with its certificate.
func routeTo(host *infrav1.CapstanHost, dialled *slot, creds credentials.Client, seen func(*x509.Certificate)) (route, error) {
	if dialled != nil {
		return dialled.route(host.Name), nil
	}
	transport, err := transport(host.Spec.Address, creds, seen)
	if err != nil {
		return route{}, fmt.Errorf("credentials of host %s: %w", host.Name, err)
	}
	return route{target: host.Spec.Address, transport: transport}, nil
}

// dial does not wait until the host answers.
func (r route) dial(name string, keepalive hostpb.Keepalive) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient(r.target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(r.transport),
		keepalive.Client(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: maxBackoff,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswerBytes), grpc.MaxCallSendMsgSize(maxMessageBytes), frugally()),
		grpc.WithUnaryInterceptor(limited),
		tracing.ClientOption(),
	}, r.options...)...)
	if err != nil {
		return nil, fmt.Errorf("address %q of host %s: %w", r.target, name, err)
	}
	return conn, nil
}

// forUsers are the limits of a connection for the streams of users. gRPC otherwise grows the window of a fast host to 16 MiB.
var forUsers = []grpc.DialOption{
	grpc.WithStreamInterceptor(func(ctx context.Context, d *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		return open(ctx, d, conn, method, append(opts, grpc.MaxCallRecvMsgSize(maxStreamBytes))...)
	}),
	grpc.WithStaticStreamWindowSize(maxStreamBytes), grpc.WithStaticConnWindowSize(maxStreamBytes),
	grpc.WithMaxHeaderListSize(maxStreamBytes),
}

// Dial returns a connection to a host outside of the pool for a stream of a user, which the caller closes. It needs leadership only for a host that dials:
// inbound has the connections of such a host.
func Dial(ctx context.Context, secrets client.Reader, host *infrav1.CapstanHost, inbound *Inbound) (_ hostpb.HostClient, _ io.Closer, err error) {
	var dialled *slot
	var creds credentials.Client
	if host.Dials() {
		if dialled = inbound.find(host.Name); dialled == nil {
			return nil, nil, errNotFollowed
		}
	} else if creds, err = loadCredentials(ctx, secrets, host); err != nil {
		return nil, nil, err
	}
	way, err := routeTo(host, dialled, creds, nil)
	if err != nil {
		return nil, nil, err
	}
	way.options = append(way.options, forUsers...)
	conn, err := way.dial(host.Name, hostpb.DefaultKeepalive)
	if err != nil {
		return nil, nil, err
	}
	return hostpb.NewHostClient(conn), conn, nil
}

// limited limits the time of a call, and the size of its answer and of its error.
func limited(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return bounded(invoke(ctx, method, req, reply, conn, append(opts, grpc.MaxCallRecvMsgSize(maxReceivedBytes(reply)))...))
}

// Name of the CapstanHost.
func (h *Host) Name() string { return h.name }

// ConnectionError returns nil while the mirror follows the host, and the reason otherwise. A host that disappeared silently
// is detected by the pool's Keepalive.
func (h *Host) ConnectionError() error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.err == nil {
		return incompatible(h.info)
	}
	return h.err
}

// Away returns for how long the host has not been connected to this process; 0 while it is. The clock is monotonic.
func (h *Host) Away() time.Duration {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.err == nil {
		return 0
	}
	return time.Since(h.since)
}

// Info returns the last reported properties and resources of the host, or nil before the first report.
func (h *Host) Info() *hostpb.HostInfo {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.info
}

// ID is the identity that the host's capstand has created. A host reports it first, so it is known while the host is
// connected.
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
	if err == nil {
		err = checkAnswer(m, r.GetSpec())
	}
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// An event may already have delivered newer state, or a removal.
	if id := m.GetSpec().GetId(); h.err == nil && h.machines[id] == nil && h.removals == before {
		if err := h.keepAnswer(m); err != nil {
			return nil, err
		}
		delete(h.promised, id)
	}
	return m, nil
}

// checkAnswer returns an error unless a host answered with the machine of the request.
func checkAnswer(m *hostpb.Machine, request *hostpb.MachineSpec) error {
	if m.GetSpec().GetId() != request.GetId() {
		return fmt.Errorf("expected the host to answer with machine %s, found another one", request.GetId())
	}
	return checkMachine(m)
}

// checkMachine returns an error for a description that no capstand sends.
func checkMachine(m *hostpb.Machine) error {
	if n := len(m.GetSpec().GetAddresses()); n > maxAddresses {
		return fmt.Errorf("expected a machine of the host with at most %d addresses, found %d", maxAddresses, n)
	}
	return nil
}

// Claim records on the host that the machine's object is in the management cluster, if another one or none is recorded, and
// lets an unconfirmed machine start.
// A host whose capstand does not support claims gets no further request until it connects again.
func (h *Host) Claim(ctx context.Context, m *hostpb.Machine, managementCluster string) error {
	h.mu.RLock()
	skip := h.noClaims
	h.mu.RUnlock()
	if skip || m.GetStatus().GetManagementCluster() == managementCluster && !m.GetStatus().GetUnconfirmed() {
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

// UpdateMachine updates a machine in place. The mirror has the result at once: until the host's event comes, its new memory
// would seem to be free.
func (h *Host) UpdateMachine(ctx context.Context, r *hostpb.UpdateMachineRequest, opts ...grpc.CallOption) (*hostpb.Machine, error) {
	h.mu.RLock()
	before := h.machines[r.GetSpec().GetId()]
	h.mu.RUnlock()
	m, err := h.HostClient.UpdateMachine(ctx, r, opts...)
	if err == nil {
		err = checkAnswer(m, r.GetSpec())
	}
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// An event may already have delivered newer state, or a removal.
	if id := m.GetSpec().GetId(); h.err == nil && before != nil && h.machines[id] == before {
		if err := h.keepAnswer(m); err != nil {
			return nil, err
		}
		h.kept(m)
	}
	return m, nil
}

func (h *Host) close() {
	h.stop()
	_ = h.conn.Close()
	if h.slot != nil {
		h.inbound.remove(h.name, h.slot)
	}
}

// run follows the host until ctx ends or the host is closed. A stream that breaks is opened
// again, at once after it worked and then with back-off.
func (h *Host) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.stopped, cancel)()
	go h.sendPulses(ctx)
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
	id, err := h.managementCluster(ctx)
	if err != nil {
		return false, err
	}
	stream, err := h.Watch(ctx, &hostpb.WatchRequest{ManagementCluster: id})
	if err != nil {
		return false, err
	}
	present := newPresent()
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
		if err := checkMachine(e.GetMachine()); err != nil {
			return synced, err
		}
		if !synced {
			present.note(e)
		}
		h.apply(e)
		if err := h.bound(); err != nil {
			return synced, err
		}
	}
}

// disconnected keeps the mirror as it last was.
func (h *Host) disconnected(err error) {
	h.mu.Lock()
	before := h.err
	h.err = errors.New(Message(err))
	if before == nil {
		h.since = time.Now()
		h.heartbeat.listen() // The attempts to connect take their time.
	}
	changed := before == nil || before.Error() != h.err.Error()
	h.mu.Unlock()
	if changed {
		h.notify(Event{Host: h.name, Connection: true})
	}
}
