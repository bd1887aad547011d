// Package host is capstand, the root daemon of a host: it makes machines, networks and load balancers
// and keeps them, through its own restarts and those of the host.
//
// Everything is keyed by the id that its owner gave it, and belongs to its owner's namespace and name alone
// (package owner). What is asked for is on disk before it is done, and everything that is done can be done
// again: at its start capstand goes through its disk and carries on from wherever it, or the host,
// was stopped.
package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/hub"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/runc"
)

// Config of a capstand.
type Config struct {
	// Root holds all state.
	Root string
	// Assets is the folder that `make build` fills.
	Assets string
	// Backups holds a folder for each cluster, which its control plane machines find at /var/lib/capstan/backups. It
	// outlives them, and the cluster. backups below Root when empty.
	Backups string
	// Name of the host, for people.
	Name string
	// ReserveMemory is kept from machines, in bytes.
	ReserveMemory int64
	// BalancerUID is the unprivileged user (and group) that balancers run as.
	BalancerUID int
	// RunDir is shared by every capstand of the box: network.DefaultRunDir.
	RunDir string
	// Credentials renews the certificates of the managers that come over TCP; nil without TCP.
	Credentials hostpb.CredentialsServer
}

// Host is the service.
type Host struct {
	hostpb.UnimplementedHostServer
	config       Config
	log          *slog.Logger
	id           string
	boxID        string
	capacity     int64
	capabilities []string
	system       runc.System
	store        store
	runc         runc.Runc
	box          network.Box
	hub          *hub.Hub

	// running counts the goroutines of machines, balancers, the firewall and the trash.
	running sync.WaitGroup
	ctx     context.Context

	// mu guards what follows. It is held while a request is admitted and recorded, never while a
	// machine starts or ends.
	mu        sync.Mutex
	networks  map[string]*hostpb.Network
	machines  map[string]*machine
	balancers map[string]*loadBalancer
}

// New opens the state of a host and carries on with all that is recorded there, until ctx is done.
// Machines and load balancers go on after that.
func New(ctx context.Context, config Config, log *slog.Logger) (*Host, error) {
	h := &Host{
		config: config, log: log, ctx: ctx, hub: hub.New(), store: store{config.Root},
		runc:     runc.Runc{Binary: filepath.Join(config.Assets, "node", "bin", "runc"), Root: filepath.Join(config.Root, "runc")},
		networks: map[string]*hostpb.Network{}, machines: map[string]*machine{}, balancers: map[string]*loadBalancer{},
		system: runc.HostSystem(),
	}
	var err error
	if h.id, err = h.store.open(); err != nil {
		return nil, err
	}
	if h.capabilities, err = runc.OwnCapabilities(); err != nil {
		return nil, err
	}
	memory, err := hostMemory()
	if err != nil {
		return nil, err
	}
	h.capacity, h.boxID = max(0, memory-config.ReserveMemory), boxID("/")
	h.box = network.Box{Dir: config.RunDir, HostID: h.id, HostRoot: config.Root}
	setSysctls("/proc/sys", log)
	if err := h.forgetOtherBoot(); err != nil {
		return nil, err
	}
	if err := h.recover(); err != nil {
		return nil, err
	}
	log.Info("capstand", "id", h.id, "root", config.Root, "machines", len(h.machines), "balancers", len(h.balancers),
		"memory for machines MiB", h.capacity>>20, "kubernetes", kubernetesVersions(config.Assets))
	return h, nil
}

// Wait returns when all goroutines have seen that ctx is done.
func (h *Host) Wait() { h.running.Wait() }

// cgroup of a part of this host.
func (h *Host) cgroup(name string) cgroup.Group {
	return cgroup.Group("/capstan/" + h.id + "/" + name)
}

// forgetOtherBoot drops runc's state after a reboot: its process ids mean nothing any more, and might
// by accident mean something else.
func (h *Host) forgetOtherBoot() error {
	path := h.store.path("boot-id")
	was, _ := os.ReadFile(path)
	now := proc.BootID()
	if string(was) == now {
		return nil
	}
	if err := os.RemoveAll(h.runc.Root); err != nil {
		return err
	}
	return atomicfile.WriteFile(path, []byte(now), 0o644)
}

// recover takes over everything on disk and starts to look after it.
func (h *Host) recover() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.loadAll(); err != nil {
		return err
	}
	for _, n := range h.networks {
		// A crash came before its first machine was recorded, or after the last one was gone.
		if err := h.dropDemanded(h.ctx, n.Id); err != nil {
			h.log.Error("network", "id", n.Id, "error", err)
		}
		if h.networks[n.Id] != nil {
			h.recoverNetwork(n)
		}
	}
	if err := h.box.Sweep(h.ctx, func(id string) bool { return h.networks[id] != nil }); err != nil {
		h.log.Error("networks that were not recorded", "error", err)
	}
	h.running.Go(func() { h.box.GuardFirewalls(h.ctx, h.log) })
	for _, lb := range h.balancers {
		described := lb.described
		h.running.Go(func() {
			if described != nil {
				select {
				case <-h.ctx.Done():
				case <-lb.deleted.Done():
				case <-described:
				}
			}
			lb.run(h.ctx)
		})
	}
	for _, m := range h.machines {
		h.running.Go(func() { m.run(h.ctx) })
	}
	h.emptyTrash()
	return nil
}

// loadAll reads all objects; h.mu is held. One that cannot be read does not keep the others from running.
func (h *Host) loadAll() error {
	networks, badNetworks, err1 := load(h.store, networksDir, func() *hostpb.Network { return &hostpb.Network{} },
		func(_ string, n *hostpb.Network) error { return checkNetwork(n) })
	machines, badMachines, err2 := load(h.store, machinesDir, func() *hostpb.MachineSpec { return &hostpb.MachineSpec{} }, checkRecord)
	balancers, badBalancers, err3 := load(h.store, balancersDir, func() *hostpb.LoadBalancer { return &hostpb.LoadBalancer{} },
		func(_ string, lb *hostpb.LoadBalancer) error { return owner.Given("load balancer", lb.Id, lb) })
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	for _, n := range networks {
		h.networks[n.Id] = n
	}
	for _, spec := range machines {
		m := newMachine(h, spec)
		h.machines[spec.Id] = m
		if m.state.bootstrapped() {
			m.eraseBootstrapData()
		}
	}
	h.loadUnreadableMachines(badMachines)
	if err := h.mendNetworks(badNetworks); err != nil {
		return err
	}
	h.loadUnreadableBalancers(badBalancers)
	for _, spec := range balancers {
		listen, err := h.listenAddresses(spec)
		if err != nil {
			h.log.Error("load balancer", "id", spec.Id, "error", err)
			continue
		}
		h.balancers[spec.Id] = newLoadBalancer(h, spec, listen)
	}
	return nil
}

// recoverNetwork mends a network. One that cannot be mended now does not keep the others from it: each
// machine tries again before it starts.
func (h *Host) recoverNetwork(n *hostpb.Network) {
	log := h.log.With("network", n.Namespace+"/"+n.Name, "id", n.Id)
	if err := h.box.Ensure(h.ctx, boxNetwork(n)); err != nil {
		log.Error("network", "error", err)
		return
	}
	holders := slices.AppendSeq(slices.Collect(maps.Keys(h.machines)), maps.Keys(h.balancers))
	if err := h.box.KeepLeases(n.Id, holders); err != nil {
		log.Error("leases", "error", err)
	}
	for _, lb := range h.balancers {
		if lb.spec.NetworkId != n.Id || lb.described != nil {
			continue
		}
		if err := h.serve(lb.spec, lb.listen); err != nil { // before anyone else asks for its address
			log.Error("load balancer's address", "error", err)
		}
	}
	for _, m := range h.machines {
		if m.spec.Network.Id != n.Id {
			continue
		}
		if err := h.renewLease(m.spec); err != nil { // before anyone else asks for its address
			log.Error("lease", "machine", m.spec.Name, "error", err)
		}
	}
}

// emptyTrash removes discarded folders in the background.
func (h *Host) emptyTrash() {
	h.running.Go(func() {
		if err := h.store.emptyTrash(); err != nil {
			h.log.Error("trash", "error", err)
		}
	})
}

func boxNetwork(n *hostpb.Network) network.Network {
	return network.Network{ID: n.Id, CIDR: n.Cidr, IPv6CIDR: n.Ipv6Cidr, Cluster: n.Namespace + "/" + n.Name}
}

// fillNetwork sets a network's outputs.
func fillNetwork(n *hostpb.Network) *hostpb.Network {
	if _, gateway, err := network.ParseCIDR(n.Cidr); err == nil { // that of an unreadable machine may not be known
		n.Gateway, n.Bridge = gateway.String(), network.BridgeName(n.Id)
	}
	return n
}

// lease takes the addresses of a machine that is about to be recorded.
func (h *Host) lease(spec *hostpb.MachineSpec) error {
	return h.box.Lease(spec.Network.Id, spec.Id, spec.Namespace+"/"+spec.Name, leased(spec))
}

// renewLease takes the addresses of a recorded machine again, as after a reboot.
func (h *Host) renewLease(spec *hostpb.MachineSpec) error {
	return h.box.Renew(spec.Network.Id, spec.Id, spec.Namespace+"/"+spec.Name, leased(spec))
}

func leased(spec *hostpb.MachineSpec) (all []string) {
	for _, a := range spec.Addresses {
		all = append(all, a.Address)
	}
	return all
}

// GetInfo returns what the host is and has.
func (h *Host) GetInfo(context.Context, *hostpb.GetInfoRequest) (*hostpb.HostInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.info(), nil
}

// Watch streams everything, then changes.
func (h *Host) Watch(_ *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	w, end := h.hub.Subscribe()
	defer end()
	for _, event := range h.everything() {
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	if err := stream.Send(&hostpb.Event{Type: hostpb.Event_SYNCED}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	for {
		events, err := w.Take(ctx)
		if err != nil {
			return status.Error(codes.Unavailable, "capstand or the client is ending")
		}
		for _, event := range events {
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}

func (h *Host) everything() []*hostpb.Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	events := []*hostpb.Event{hub.Host(h.info())}
	for _, lb := range h.balancers {
		events = append(events, hub.LoadBalancer(hostpb.Event_CHANGED, lb.snapshot()))
	}
	for _, m := range h.machines {
		events = append(events, hub.Machine(hostpb.Event_CHANGED, m.snapshot()))
	}
	return events
}

// EnsureNetwork makes a cluster's network on this host.
func (h *Host) EnsureNetwork(ctx context.Context, n *hostpb.Network) (*hostpb.Network, error) {
	if err := checkNetwork(n); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.ensureNetwork(ctx, n, false); err != nil {
		return nil, err
	}
	return fillNetwork(proto.CloneOf(h.networks[n.Id])), nil
}

// onDemand marks a network that was made for a machine: it goes with the last one.
const onDemand = "on-demand"

// ensureNetwork makes and records a network; h.mu is held.
func (h *Host) ensureNetwork(ctx context.Context, n *hostpb.Network, demanded bool) error {
	if have := h.networks[n.Id]; have != nil {
		if err := owner.Ensure("network", n.Id, have, n); err != nil {
			return err
		}
	}
	for _, other := range h.networks {
		if other.Id != n.Id && other.Namespace == n.Namespace && other.Name == n.Name {
			return status.Errorf(codes.AlreadyExists, "cluster %s/%s has network %s on this host, not %s: it belongs to another cluster of that name, delete that first",
				n.Namespace, n.Name, other.Id, n.Id)
		}
	}
	if err := h.box.Ensure(ctx, boxNetwork(n)); err != nil {
		if h.networks[n.Id] == nil { // half of it may be there
			err = errors.Join(err, h.box.Release(ctx, n.Id))
		}
		return networkError(err)
	}
	if h.networks[n.Id] != nil {
		if !demanded {
			return ignoreNotExist(os.Remove(h.store.path(networksDir, n.Id, onDemand)))
		}
		return nil
	}
	n = &hostpb.Network{Id: n.Id, Namespace: n.Namespace, Name: n.Name, Cidr: n.Cidr, Ipv6Cidr: n.Ipv6Cidr}
	files := map[string][]byte{}
	if demanded {
		files[onDemand] = nil
	}
	if err := h.store.create(networksDir, n.Id, n, files); err != nil {
		err = errors.Join(err, h.box.Release(context.WithoutCancel(ctx), n.Id))
		return status.Errorf(codes.Internal, "recording network: %v", err)
	}
	h.networks[n.Id] = n
	h.log.Info("network", "cluster", n.Namespace+"/"+n.Name, "id", n.Id, "cidr", n.Cidr, "IPv6", n.Ipv6Cidr, "bridge", network.BridgeName(n.Id))
	return nil
}

func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// DeleteNetwork removes a cluster's network from this host.
func (h *Host) DeleteNetwork(ctx context.Context, req *hostpb.DeleteNetworkRequest) (*hostpb.DeleteNetworkResponse, error) {
	if err := owner.Given("network", req.Id, req); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.networks[req.Id]; n != nil {
		if err := owner.Delete("network", req.Id, n, req); err != nil {
			return nil, err
		}
	}
	if err := h.networkUnused(req.Id); err != nil {
		return nil, err
	}
	if h.networks[req.Id] == nil {
		return &hostpb.DeleteNetworkResponse{}, nil
	}
	return &hostpb.DeleteNetworkResponse{}, h.deleteNetwork(ctx, req.Id)
}

// networkUnused says who still uses a network; h.mu is held.
func (h *Host) networkUnused(id string) error {
	for _, m := range h.machines {
		if m.spec.Network.Id == id {
			return status.Errorf(codes.FailedPrecondition, "network %s has machine %s/%s; delete its machines first", id, m.spec.Namespace, m.spec.Name)
		}
	}
	for _, lb := range h.balancers {
		if lb.spec.NetworkId == id {
			return status.Errorf(codes.FailedPrecondition, "network %s has load balancer %s/%s; delete it first", id, lb.spec.Namespace, lb.spec.Name)
		}
	}
	return nil
}

// deleteNetwork removes a network; h.mu is held. The record goes last, so a crash leaves something to
// start from.
func (h *Host) deleteNetwork(ctx context.Context, id string) error {
	if err := h.box.Release(ctx, id); err != nil {
		return status.Errorf(codes.Internal, "network %s: %v", id, err)
	}
	if err := h.store.discard(h.store.path(networksDir, id)); err != nil {
		return status.Errorf(codes.Internal, "network %s: %v", id, err)
	}
	delete(h.networks, id)
	h.emptyTrash()
	return nil
}

// EnsureMachine records a machine and starts it in the background.
func (h *Host) EnsureMachine(ctx context.Context, req *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	spec := req.Spec
	if err := checkMachine(spec); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[spec.Id]; m != nil {
		return h.machineAgain(m, req)
	}
	if err := h.admit(spec); err != nil {
		return nil, err
	}
	if err := h.ensureNetwork(ctx, spec.Network, true); err != nil {
		return nil, err
	}
	if err := h.recordMachine(req); err != nil {
		if err := h.unlease(context.WithoutCancel(ctx), spec.Network.Id, spec.Id); err != nil {
			h.log.Error("what a machine has left that is not recorded", "id", spec.Id, "error", err)
		}
		return nil, err
	}
	m := newMachine(h, proto.CloneOf(spec))
	h.machines[spec.Id] = m
	m.log.Info("machine", "addresses", spec.Addresses, "cpus", spec.Cpus, "memory MiB", spec.MemoryBytes>>20)
	h.hub.Publish(hub.Machine(hostpb.Event_CHANGED, m.snapshot()))
	h.hub.Publish(hub.Host(h.info()))
	h.running.Go(func() { m.run(h.ctx) })
	return m.snapshot(), nil
}

// recordMachine takes a new machine's addresses and writes down what it is to be; h.mu is held.
func (h *Host) recordMachine(req *hostpb.EnsureMachineRequest) error {
	if err := h.lease(req.Spec); err != nil {
		return networkError(err)
	}
	files := map[string][]byte{}
	if len(req.BootstrapData) > 0 {
		files["bootstrap-data"] = req.BootstrapData
	}
	if err := h.store.create(machinesDir, req.Spec.Id, req.Spec, files); err != nil {
		return status.Errorf(codes.Internal, "recording machine: %v", err)
	}
	return nil
}

// unlease gives back the addresses of a machine that is not recorded, and its network if that was made for machines and has
// none; h.mu is held.
func (h *Host) unlease(ctx context.Context, networkID, machineID string) error {
	return errors.Join(h.box.Unlease(networkID, machineID), h.dropDemanded(ctx, networkID))
}

// admit decides whether a new machine may be made; h.mu is held.
func (h *Host) admit(spec *hostpb.MachineSpec) error {
	if h.store.buried(spec.Id, time.Now()) {
		return status.Errorf(codes.FailedPrecondition, "machine %s was deleted within the last day; make one with a new id", spec.Id)
	}
	for _, other := range h.machines {
		if other.spec.Namespace == spec.Namespace && other.spec.Name == spec.Name {
			return status.Errorf(codes.AlreadyExists, "machine %s/%s is %s on this host, not %s: another management cluster, or one made before, owns it; delete it first",
				spec.Namespace, spec.Name, other.spec.Id, spec.Id)
		}
	}
	info := h.info()
	if err := provided(spec, info); err != nil {
		return err
	}
	return fits(spec, info)
}

// machineAgain answers for a machine that exists. Bootstrap data is taken if it was missing.
func (h *Host) machineAgain(m *machine, req *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	if err := owner.Ensure("machine", m.spec.Id, m.spec, req.Spec); err != nil {
		return nil, err
	}
	if m.deleted.Err() != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "machine %s is being deleted; make one with a new id", m.spec.Id)
	}
	if m.broken != "" {
		return nil, status.Errorf(codes.FailedPrecondition, "machine %s: %s", m.spec.Id, m.broken)
	}
	if err := changed(m.spec, req.Spec); err != nil {
		return nil, err
	}
	m.mu.Lock()
	missing := !m.state.bootstrapped() && !atomicfile.Exists(m.bootstrapFile())
	m.mu.Unlock()
	if missing && len(req.BootstrapData) > 0 {
		if err := atomicfile.WriteFile(m.bootstrapFile(), req.BootstrapData, 0o600); err != nil {
			return nil, status.Errorf(codes.Internal, "recording bootstrap data: %v", err)
		}
		m.wakeUp()
	}
	return m.snapshot(), nil
}

// machine finds one by id.
func (h *Host) machine(id string) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[id]; m != nil {
		return m, nil
	}
	return nil, status.Errorf(codes.NotFound, "no machine %q on this host", id)
}

// GetMachine returns one machine.
func (h *Host) GetMachine(_ context.Context, req *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	m, err := h.machine(req.Id)
	if err != nil {
		return nil, err
	}
	return m.snapshot(), nil
}

// ListMachines returns every machine.
func (h *Host) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	res := &hostpb.ListMachinesResponse{}
	for _, m := range h.machines {
		res.Machines = append(res.Machines, m.snapshot())
	}
	return res, nil
}

// StartMachine starts a machine that has failed.
func (h *Host) StartMachine(_ context.Context, req *hostpb.StartMachineRequest) (*hostpb.Machine, error) {
	if err := owner.Given("machine", req.Id, req); err != nil {
		return nil, err
	}
	m, err := h.machine(req.Id)
	if err != nil {
		return nil, err
	}
	if err := owner.Ensure("machine", req.Id, m.spec, req); err != nil {
		return nil, err
	}
	if err := m.startAgain(); err != nil {
		return nil, err
	}
	return m.snapshot(), nil
}

// deleteWait is for how long DeleteMachine waits, so that most callers need to ask only once.
const deleteWait = 5 * time.Second

// DeleteMachine removes a machine. The tombstone comes first: whatever happens then, the machine goes.
func (h *Host) DeleteMachine(ctx context.Context, req *hostpb.DeleteMachineRequest) (*hostpb.DeleteMachineResponse, error) {
	if !idForm.MatchString(req.Id) {
		return nil, status.Errorf(codes.InvalidArgument, "machine id %q is not valid", req.Id)
	}
	if err := owner.Given("machine", req.Id, req); err != nil {
		return nil, err
	}
	m, err := h.bury(ctx, req)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return &hostpb.DeleteMachineResponse{Done: true}, nil
	}
	m.delete()
	m.setStatus(func(s *hostpb.MachineStatus) { s.Phase = hostpb.MachineStatus_DELETING })
	select {
	case <-m.gone:
		return &hostpb.DeleteMachineResponse{Done: true}, nil
	case <-ctx.Done():
	case <-time.After(deleteWait):
	}
	return &hostpb.DeleteMachineResponse{Done: false}, nil
}

// bury notes that a machine is to be gone, and returns it if it is there. One that was never recorded may have addresses.
func (h *Host) bury(ctx context.Context, req *hostpb.DeleteMachineRequest) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.store.buryOld(time.Now())
	m := h.machines[req.Id]
	if m != nil {
		if err := owner.Delete("machine", req.Id, m.spec, req); err != nil {
			return nil, err
		}
	}
	if !h.store.buried(req.Id, time.Now()) {
		if err := h.store.bury(req.Id); err != nil {
			return nil, status.Errorf(codes.Internal, "deleting machine %s: %v", req.Id, err)
		}
	}
	if m != nil {
		return m, nil
	}
	for id := range h.networks {
		if err := h.unlease(ctx, id, req.Id); err != nil {
			return nil, status.Errorf(codes.Internal, "addresses of machine %s: %v", req.Id, err)
		}
	}
	return nil, nil
}

// forget drops a machine of which nothing is left, and its network if that was made for machines.
func (h *Host) forget(ctx context.Context, m *machine) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.machines, m.spec.Id)
	if err := h.dropDemanded(ctx, m.spec.Network.Id); err != nil {
		h.machines[m.spec.Id] = m
		return err
	}
	h.hub.Publish(hub.Machine(hostpb.Event_DELETED, m.snapshot()))
	h.hub.Publish(hub.Host(h.info()))
	h.dropCgroup()
	h.emptyTrash()
	return nil
}

// dropDemanded removes a network that was made for machines and has none; h.mu is held.
func (h *Host) dropDemanded(ctx context.Context, id string) error {
	if h.networkUnused(id) != nil || !atomicfile.Exists(h.store.path(networksDir, id, onDemand)) {
		return nil
	}
	return h.deleteNetwork(ctx, id)
}

// dropCgroup removes this host's own cgroup with its last part; h.mu is held.
func (h *Host) dropCgroup() {
	if len(h.machines)+len(h.balancers) == 0 {
		h.cgroup("").RemoveEmpty()
		cgroup.Group("/capstan").RemoveEmpty()
	}
}

// EnsureLoadBalancer makes or changes a load balancer.
func (h *Host) EnsureLoadBalancer(_ context.Context, want *hostpb.LoadBalancer) (*hostpb.LoadBalancer, error) {
	if !idForm.MatchString(want.Id) || len(want.Listen) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "load balancer %q needs a valid id and a listen address", want.Id)
	}
	if err := owner.Given("load balancer", want.Id, want); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	listen, err := h.admitBalancer(want)
	if err != nil {
		return nil, err
	}
	spec := &hostpb.LoadBalancer{Id: want.Id, Namespace: want.Namespace, Name: want.Name, NetworkId: want.NetworkId, Listen: want.Listen}
	for _, b := range want.Backends {
		spec.Backends = append(spec.Backends, &hostpb.Backend{Name: b.Name, Address: b.Address})
	}
	lb := h.balancers[spec.Id]
	if lb == nil {
		return h.newBalancer(spec, listen)
	}
	if proto.Equal(lb.currentSpec(), spec) {
		return lb.snapshot(), nil
	}
	if err := writeSpec(filepath.Join(lb.dir, "spec.json"), spec); err != nil {
		err = errors.Join(err, h.serve(lb.spec, lb.listen)) // it goes on as it is
		return nil, status.Errorf(codes.Internal, "recording load balancer: %v", err)
	}
	lb.change(func() { lb.spec, lb.listen = spec, listen })
	if err := lb.configure(); err != nil {
		return nil, status.Errorf(codes.Internal, "configuring load balancer: %v", err)
	}
	if lb.described != nil {
		close(lb.described)
		lb.described = nil
	}
	return lb.snapshot(), nil
}

// newBalancer records and starts a load balancer; h.mu is held.
func (h *Host) newBalancer(spec *hostpb.LoadBalancer, listen []string) (*hostpb.LoadBalancer, error) {
	if err := h.store.create(balancersDir, spec.Id, spec, nil); err != nil {
		err = errors.Join(err, h.box.Serve(spec.NetworkId, spec.Id, "", nil)) // admitBalancer gave it its addresses
		return nil, status.Errorf(codes.Internal, "recording load balancer: %v", err)
	}
	lb := newLoadBalancer(h, spec, listen)
	lb.log.Info("load balancer", "listen", listen)
	h.balancers[spec.Id] = lb
	h.hub.Publish(hub.LoadBalancer(hostpb.Event_CHANGED, lb.snapshot()))
	h.running.Go(func() { lb.run(h.ctx) })
	return lb.snapshot(), nil
}

// listenAddresses of a load balancer, with its network's gateway filled in; h.mu is held.
func (h *Host) listenAddresses(spec *hostpb.LoadBalancer) ([]string, error) {
	n := h.networks[spec.NetworkId]
	if n == nil {
		return nil, status.Errorf(codes.NotFound, "load balancer %s/%s: no network %q on this host; make it first", spec.Namespace, spec.Name, spec.NetworkId)
	}
	listen, err := listenAddresses(spec.Listen, fillNetwork(proto.CloneOf(n)).Gateway)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "load balancer %s/%s: %v", spec.Namespace, spec.Name, err)
	}
	return listen, nil
}

// admitBalancer decides whether a load balancer may be as asked for, and returns its listen addresses;
// h.mu is held.
func (h *Host) admitBalancer(want *hostpb.LoadBalancer) ([]string, error) {
	if lb := h.balancers[want.Id]; lb != nil {
		if err := owner.Ensure("load balancer", want.Id, lb.spec, want); err != nil {
			return nil, err
		}
	}
	listen, err := h.listenAddresses(want)
	if err != nil {
		return nil, err
	}
	var have []string
	for _, other := range h.balancers {
		switch {
		case other.spec.Id == want.Id && other.deleted.Err() != nil:
			return nil, status.Errorf(codes.FailedPrecondition, "load balancer %s is being deleted", want.Id)
		case other.spec.Id == want.Id:
			have = other.listen
			if other.described != nil { // its process may run
				have = listen
			}
		case other.spec.Namespace == want.Namespace && other.spec.Name == want.Name:
			return nil, status.Errorf(codes.AlreadyExists, "load balancer %s/%s is %s on this host, not %s: it belongs to another cluster of that name, delete that first",
				want.Namespace, want.Name, other.spec.Id, want.Id)
		}
	}
	served, err := h.served(want, listen)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "load balancer %s/%s: %v", want.Namespace, want.Name, err)
	}
	if err := portsFree(listen, served, have); err != nil {
		return nil, status.Errorf(codes.AlreadyExists, "load balancer %s/%s: %v", want.Namespace, want.Name, err)
	}
	if err := h.serve(want, listen); err != nil { // all else is admitted: nothing of it stays when it is refused
		return nil, networkError(err)
	}
	return listen, nil
}

// served are the addresses that the network's bridge must have for a load balancer; h.mu is held.
func (h *Host) served(spec *hostpb.LoadBalancer, listen []string) ([]string, error) {
	n := h.networks[spec.NetworkId]
	if n == nil {
		return nil, fmt.Errorf("no network %q on this host", spec.NetworkId)
	}
	return network.Served(n.Cidr, listen)
}

// serve gives the network's bridge the addresses that a load balancer listens on; h.mu is held.
func (h *Host) serve(spec *hostpb.LoadBalancer, listen []string) error {
	addresses, err := h.served(spec, listen)
	if err != nil {
		return err
	}
	return h.box.Serve(spec.NetworkId, spec.Id, spec.Namespace+"/"+spec.Name, addresses)
}

// currentSpec is what was asked for last.
func (lb *loadBalancer) currentSpec() *hostpb.LoadBalancer {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	return proto.CloneOf(lb.spec)
}

// DeleteLoadBalancer removes a load balancer; an unknown one is fine.
func (h *Host) DeleteLoadBalancer(ctx context.Context, req *hostpb.DeleteLoadBalancerRequest) (*hostpb.DeleteLoadBalancerResponse, error) {
	if err := owner.Given("load balancer", req.Id, req); err != nil {
		return nil, err
	}
	h.mu.Lock()
	lb := h.balancers[req.Id]
	h.mu.Unlock()
	if lb == nil {
		return &hostpb.DeleteLoadBalancerResponse{}, nil
	}
	if err := owner.Delete("load balancer", req.Id, lb.currentSpec(), req); err != nil {
		return nil, err
	}
	// The mark makes the deletion go on after a crash.
	if err := atomicfile.WriteFile(filepath.Join(lb.dir, "deleted"), nil, 0o600); ignoreNotExist(err) != nil {
		return nil, status.Errorf(codes.Internal, "deleting load balancer: %v", err)
	}
	lb.delete()
	select {
	case <-lb.gone:
		return &hostpb.DeleteLoadBalancerResponse{}, nil
	case <-ctx.Done():
	case <-time.After(deleteWait):
	}
	return nil, status.Errorf(codes.Unavailable, "load balancer %s is still being removed: %s", req.Id, lb.snapshot().Message)
}

// forgetBalancer drops a load balancer of which nothing is left.
func (h *Host) forgetBalancer(lb *loadBalancer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.balancers, lb.spec.Id)
	h.hub.Publish(hub.LoadBalancer(hostpb.Event_DELETED, lb.snapshot()))
	h.dropCgroup()
	h.emptyTrash()
}

// portsFree tries the addresses that are new, but for those that the bridge gets only now: nobody can
// listen there yet. The answer may be old a moment later; then the balancer itself reports it.
func portsFree(listen, served, have []string) error {
	for _, address := range listen {
		if host, _, err := net.SplitHostPort(address); err == nil && slices.Contains(served, host) {
			continue
		}
		if err := portFree(address, have); err != nil {
			return err
		}
	}
	return nil
}
