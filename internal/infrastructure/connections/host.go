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
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/shorten"
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

// errTooMuch is the state of a host whose objects do not fit into the mirror.
var errTooMuch = fmt.Errorf("expected at most %d MiB of machines and load balancers, found more: restart capstand of this host, or remove the host", maxMirrorBytes>>20)

// ErrConnecting is the state of a host that has not answered yet.
var ErrConnecting = errors.New("connecting")

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
	bytes         int // of memory that info, machines and loadBalancers occupy
	promised      map[string]Resources
	removals      int // of machines, reported by the host
	spans         map[Network]*span
	services      map[Network]publication
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

// bounded returns an error of a host with its code, its details and a text of at most maxText bytes.
func bounded(err error) error {
	s, ok := status.FromError(err)
	if !ok || len(s.Message()) <= maxText {
		return err
	}
	short := s.Proto()
	short.Message = shorten.Marked(short.GetMessage(), maxText)
	return status.ErrorProto(short)
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

// IncompatibleError is the state of a host whose capstand this manager cannot use.
type IncompatibleError struct{ message string }

func (e IncompatibleError) Error() string { return e.message }

// incompatible returns an IncompatibleError if the versions of a host's capstand and of this manager do not work together.
func incompatible(info *hostpb.HostInfo) error {
	if why := hostpb.Incompatible(info.GetProtocolVersion(), info.GetMinimumManagerVersion(), info.GetCapstandVersion()); why != "" {
		return IncompatibleError{why + ". The machines of the host continue unchanged"}
	}
	return nil
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

// present are the ids of the objects that a host has reported in a stream and still has. They are part of the mirror, and bounded with it.
type present struct{ machines, loadBalancers map[string]bool }

func newPresent() present { return present{map[string]bool{}, map[string]bool{}} }

func (p present) note(e *hostpb.Event) {
	switch o := e.GetObject().(type) {
	case *hostpb.Event_Machine:
		p.machines[o.Machine.GetSpec().GetId()] = true
		if e.GetType() == hostpb.Event_DELETED {
			delete(p.machines, o.Machine.GetSpec().GetId())
		}
	case *hostpb.Event_LoadBalancer:
		p.loadBalancers[o.LoadBalancer.GetId()] = true
		if e.GetType() == hostpb.Event_DELETED {
			delete(p.loadBalancers, o.LoadBalancer.GetId())
		}
	}
}

// apply takes one event into the mirror and passes on the changes that it makes.
func (h *Host) apply(e *hostpb.Event) {
	for _, change := range h.mirror(e) {
		h.notify(change)
	}
}

// mirror takes one event into the mirror, and returns the changes.
func (h *Host) mirror(e *hostpb.Event) (changes []Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	gone := e.GetType() == hostpb.Event_DELETED
	before, usable := h.exclusive(), incompatible(h.info) == nil
	object, changed, claimed := Event{Host: h.name}, false, false
	switch o := e.GetObject().(type) {
	case *hostpb.Event_Machine:
		object.Machine = o.Machine
		have := h.machines[o.Machine.GetSpec().GetId()]
		claimed = have != nil && have.GetStatus().GetManagementCluster() != o.Machine.GetStatus().GetManagementCluster()
		h.mirrorMachine(o.Machine, gone)
	case *hostpb.Event_LoadBalancer:
		object.LoadBalancer = o.LoadBalancer
		if gone {
			drop(h, h.loadBalancers, o.LoadBalancer.GetId())
		} else {
			keep(h, h.loadBalancers, o.LoadBalancer.GetId(), o.LoadBalancer)
		}
	case *hostpb.Event_Host:
		keepBoot(h.info, o.Host, time.Now())
		changed = !proto.Equal(h.info, o.Host)
		h.bytes += memory(o.Host) - memory(h.info)
		h.info = o.Host
	}
	if object.Machine != nil || object.LoadBalancer != nil {
		changes = append(changes, object)
	}
	// Connected depends on the versions too, and machines in deletion wait for it, not for capacity.
	if h.err == nil && usable != (incompatible(h.info) == nil) {
		changes = append(changes, Event{Host: h.name, Connection: true})
	}
	if h.err == nil && (changed || h.exclusive().exceeds(before)) {
		changes = append(changes, Event{Host: h.name, Capacity: true})
	}
	if claimed {
		changes = append(changes, Event{Host: h.name, Claimed: true})
	}
	return changes
}

// keepBoot replaces the time of the boot by that of the manager's clock, because the clock of a host can be wrong. A boot keeps its time, and
// the uptime is left out: otherwise each report would be a change.
func keepBoot(before, report *hostpb.HostInfo, received time.Time) {
	switch up := time.Duration(report.GetUptimeMilliseconds()) * time.Millisecond; {
	case report.GetBootId() != "" && report.GetBootId() == before.GetBootId():
		report.BootedAt = before.GetBootedAt()
	case up > 0:
		report.BootedAt = timestamppb.New(received.Add(-up))
	}
	report.UptimeMilliseconds = 0
}

// mirrorMachine takes a machine into the mirror, or removes it; h.mu is held.
func (h *Host) mirrorMachine(m *hostpb.Machine, gone bool) {
	if !gone {
		h.keepMachine(m)
		h.kept(m)
		return
	}
	h.removals++
	h.forget(NetworkOf(m.GetSpec().GetNetwork().GetId(), m.GetSpec().GetNetwork())) // the host may remove a network together with its last machine
	h.dropMachine(m.GetSpec().GetId())
	delete(h.promised, m.GetSpec().GetId())
}

// keepMachine puts a machine into the mirror; h.mu is held.
func (h *Host) keepMachine(m *hostpb.Machine) {
	id := m.GetSpec().GetId()
	h.dropMachine(id)
	keep(h, h.machines, id, m)
	h.sums.add(m)
}

// keepAnswer puts a machine from an answer into the mirror, unless the mirror is full; h.mu is held. Only the end of the stream empties it.
func (h *Host) keepAnswer(m *hostpb.Machine) error {
	if h.bytes+memory(m) > maxMirrorBytes {
		return errTooMuch
	}
	h.keepMachine(m)
	return nil
}

// dropMachine removes a machine from the mirror; h.mu is held.
func (h *Host) dropMachine(id string) {
	if m, found := h.machines[id]; found {
		h.sums.remove(m)
		drop(h, h.machines, id)
	}
}

// holds reports whether a machine of the host other than except has an address.
func (h *Host) holds(a networkAddress, except string) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.sums.holds(a, except)
}

// keep puts an object into the mirror; h.mu is held.
func keep[T proto.Message](h *Host, mirror map[string]T, id string, object T) {
	drop(h, mirror, id)
	mirror[id] = object
	h.bytes += memory(object)
}

// drop removes an object from the mirror; h.mu is held.
func drop[T proto.Message](h *Host, mirror map[string]T, id string) {
	if object, found := mirror[id]; found {
		h.bytes -= memory(object)
		delete(mirror, id)
	}
}

// bound empties the mirror of a host that reports too much, and returns an error.
func (h *Host) bound() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bytes <= maxMirrorBytes {
		return nil
	}
	h.info, h.bytes = nil, 0
	clear(h.machines)
	h.sums = tally{}
	clear(h.loadBalancers)
	return errTooMuch
}

// synced drops the objects that the host no longer has, and marks the host as connected.
func (h *Host) synced(has present) {
	var lost []Event
	h.mu.Lock()
	h.err, h.noClaims = nil, false
	h.spans, h.services, h.heartbeat = map[Network]*span{}, map[Network]publication{}, newHeartbeat()
	h.forgotten++
	for id, m := range h.machines {
		if !has.machines[id] {
			h.dropMachine(id)
			lost = append(lost, Event{Host: h.name, Machine: m})
		}
	}
	for id, lb := range h.loadBalancers {
		if !has.loadBalancers[id] {
			drop(h, h.loadBalancers, id)
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

// Message returns the error text of a host without gRPC's prefix, bounded.
func Message(err error) string {
	err = bounded(err)
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// PublicMessage is Message for conditions and events, which the users of a namespace read. Hosts name the owner of an id, which can be in
// another namespace: this text is only in the log of the manager.
func PublicMessage(err error) string {
	switch refusal.Of(err).GetReason() {
	case hostpb.Refusal_ID_IN_USE, hostpb.Refusal_NOT_OWNER:
		return "an id in the request belongs to an object with another namespace or name there, so this object or its cluster is a copy: delete the copy and create it again without an id"
	}
	return Message(err)
}

// Code of an error that a host returned.
func Code(err error) codes.Code { return status.Code(err) }
