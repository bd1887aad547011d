// Package hollow is a capstand without a sandbox: a host whose machines contain nothing. It implements the same protocol
// as the real capstand: machines are recorded on disk, run after a delay, register a Node with their providerID in the
// workload cluster with the credentials of their bootstrap data, and keep it healthy until they are deleted or fail.
// The delays and the probabilities of failures are configurable. It serves scale tests and demonstrations with a thousand
// machines on one computer, and needs no privileges.
//
// It imports internal/node packages, because its machines read bootstrap data as capstan-init does.
//
// Layer: host. Allowed imports: api, library, contract.
package hollow

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/client-go/rest"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// Driver is the driver in HostInfo.
const Driver = "hollow"

// Config of a hollow host.
type Config struct {
	// Root is the folder of all state.
	Root string
	// Name of the host.
	Name string
	// CPUs and MemoryBytes are the resources that the host reports. Machines cannot share memory.
	CPUs        int32
	MemoryBytes int64
	// Versions of Kubernetes that its machines can report, with the leading v.
	Versions []string

	// Behaviour of machines.
	Behaviour Behaviour

	// Credentials returns the credentials of a machine's kubelet. By default it requests a certificate from the workload
	// cluster with the bootstrap token, as a kubelet does.
	Credentials func(ctx context.Context, m Identity) (*rest.Config, error)
}

// Behaviour defines the delays and failures of machines.
type Behaviour struct {
	// StartDelay is the time until a machine runs, BootDelay the time from then until it registers its Node.
	StartDelay, BootDelay time.Duration
	// Jitter varies the delays and FailAfter by up to this fraction: 0.2 is ± 20 %.
	Jitter float64
	// FailStart and FailBootstrap are the probabilities, from 0 to 1, that a machine fails before it runs, and that its
	// bootstrap fails.
	FailStart, FailBootstrap float64
	// UpdateDelay is the time that an update in place takes, and FailUpdate the probability that it is rolled back.
	UpdateDelay time.Duration
	FailUpdate  float64
	// FailAfter is the average time until a running machine fails; 0 is never.
	FailAfter time.Duration
	// LeaseInterval is the period in which a machine renews its Node's lease; 0 is 10 s, as for a kubelet.
	LeaseInterval time.Duration
}

// Host is a hollow host.
type Host struct {
	hostpb.UnimplementedHostServer

	config      Config
	log         *slog.Logger
	store       store
	broadcaster *events.Broadcaster
	ctx         context.Context
	running     sync.WaitGroup

	mu       sync.Mutex
	id       string
	machines map[string]*machine
	networks map[string]*hostpb.Network
	peers    map[string]*hostpb.SetPeersRequest
	services map[string]*hostpb.SetServicesRequest
	volumes  map[string]*hostpb.Volume
	used     int64
}

// New reads the state folder and resumes the machines of the last run.
func New(ctx context.Context, config Config, log *slog.Logger) (*Host, error) {
	if config.Credentials == nil {
		config.Credentials = bootstrapCredentials
	}
	if config.Behaviour.LeaseInterval <= 0 {
		config.Behaviour.LeaseInterval = leaseDuration / 4
	}
	slices.Sort(config.Versions)
	h := &Host{
		config: config, log: log, store: store{root: config.Root}, broadcaster: events.New(), ctx: ctx,
		machines: map[string]*machine{}, networks: map[string]*hostpb.Network{}, peers: map[string]*hostpb.SetPeersRequest{},
		services: map[string]*hostpb.SetServicesRequest{},
	}
	var err error
	if h.id, err = h.store.hostID(); err != nil {
		return nil, err
	}
	if h.volumes, err = h.store.loadVolumes(); err != nil {
		return nil, err
	}
	records, err := h.store.load()
	if err != nil {
		return nil, err
	}
	for _, record := range records {
		h.add(newMachine(h, record))
	}
	return h, nil
}

// Wait waits until all goroutines have ended after the end of the context.
func (h *Host) Wait() { h.running.Wait() }

// add starts a machine. The caller holds h.mu, or has not shared h yet.
func (h *Host) add(m *machine) {
	spec := m.spec()
	h.machines[spec.GetId()] = m
	h.used += spec.GetMemoryBytes()
	if n := spec.GetNetwork(); h.networks[n.GetId()] == nil {
		h.networks[n.GetId()] = described(n)
	}
	h.running.Go(m.run)
	if !admission.Ended(m.snapshot().GetStatus().GetUpdate()) {
		h.running.Go(m.runUpdate)
	}
}

// remove removes a machine from the registry; h.mu is held.
func (h *Host) remove(m *machine) {
	spec := m.spec()
	delete(h.machines, spec.GetId())
	h.used -= spec.GetMemoryBytes()
}

// info describes the host; h.mu is held.
func (h *Host) info() *hostpb.HostInfo {
	return &hostpb.HostInfo{
		Id: h.id, Hostname: h.config.Name, Architecture: runtime.GOARCH, OperatingSystem: "linux",
		Cpus: h.config.CPUs, MemoryBytes: h.config.MemoryBytes, AllocatedMemoryBytes: h.used, Machines: int32(len(h.machines)),
		KubernetesVersions: h.config.Versions, Images: []string{"host"}, Driver: Driver, CgroupVersion: 2, CapstandVersion: "v0.0.0-hollow",
		Lans: true, Vlans: true, Ipv6Lans: true, HostMounts: true, HostPorts: true, Volumes: true, VolumeBytes: admission.VolumeBytes(maps.Values(h.volumes)),
		TunnelAddress: admission.TunnelAddress(maps.Values(h.networks)),
	}
}

// GetInfo implements hostpb.HostServer.
func (h *Host) GetInfo(context.Context, *hostpb.GetInfoRequest) (*hostpb.HostInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.info(), nil
}

// Watch implements hostpb.HostServer.
func (h *Host) Watch(_ *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	w, end := h.broadcaster.Subscribe()
	defer end()
	h.mu.Lock()
	first := []*hostpb.Event{events.Host(h.info())}
	for _, m := range h.machines {
		first = append(first, events.Machine(hostpb.Event_CHANGED, m.snapshot()))
	}
	h.mu.Unlock()
	first = append(first, &hostpb.Event{Type: hostpb.Event_SYNCED})
	for next := first; ; {
		for _, e := range next {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		var err error
		if next, err = w.Take(stream.Context()); err != nil {
			return err
		}
	}
}

// EnsureNetwork implements hostpb.HostServer. A hollow network is only a record.
func (h *Host) EnsureNetwork(_ context.Context, n *hostpb.Network) (*hostpb.Network, error) {
	if err := admission.CheckNetwork(n); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.admitNetwork(n); err != nil {
		return nil, err
	}
	h.changeNetworks(func() { h.networks[n.GetId()] = described(n) })
	return h.networks[n.GetId()], nil
}

// changeNetworks reports the host if the change gives it another tunnel address; h.mu is held.
func (h *Host) changeNetworks(change func()) {
	before := admission.TunnelAddress(maps.Values(h.networks))
	change()
	if admission.TunnelAddress(maps.Values(h.networks)) != before {
		h.broadcaster.Publish(events.Host(h.info()))
	}
}

// admitNetwork decides whether the host may have the network; h.mu is held.
func (h *Host) admitNetwork(n *hostpb.Network) error {
	if err := admission.Network(n, maps.Values(h.networks)); err != nil {
		return err
	}
	return admission.NoOverlap(n, maps.Values(h.networks))
}

// SetPeers implements hostpb.HostServer. Hollow peers are only a record.
func (h *Host) SetPeers(_ context.Context, r *hostpb.SetPeersRequest) (*hostpb.SetPeersResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Peers(r, h.networks[r.GetNetworkId()], false); err != nil {
		return nil, err
	}
	h.peers[r.GetNetworkId()] = r
	return &hostpb.SetPeersResponse{}, nil
}

// SetServices implements hostpb.HostServer. Hollow Services are only a record: nobody reaches a hollow machine.
func (h *Host) SetServices(_ context.Context, r *hostpb.SetServicesRequest) (*hostpb.SetServicesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Services(r, h.networks[r.GetNetworkId()]); err != nil {
		return nil, err
	}
	h.services[r.GetNetworkId()] = r
	return &hostpb.SetServicesResponse{}, nil
}

// ListServices implements hostpb.HostServer.
func (h *Host) ListServices(context.Context, *hostpb.ListServicesRequest) (*hostpb.ListServicesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return hostpb.ServiceLists(maps.Values(h.services)), nil
}

// Peers returns the last accepted peers of a network, or nil.
func (h *Host) Peers(networkID string) *hostpb.SetPeersRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.peers[networkID]
}

func described(n *hostpb.Network) *hostpb.Network {
	out := proto.CloneOf(n)
	if cidr, err := netip.ParsePrefix(n.GetCidr()); err == nil {
		out.Gateway = cidr.Masked().Addr().Next().String()
	}
	return out
}

// DeleteNetwork implements hostpb.HostServer.
func (h *Host) DeleteNetwork(_ context.Context, r *hostpb.DeleteNetworkRequest) (*hostpb.DeleteNetworkResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Deletion("network", r, h.networks[r.GetId()]); err != nil {
		return nil, err
	}
	if err := admission.UnusedNetwork(r.GetId(), h.specs(), func(func(*hostpb.LoadBalancer) bool) {}); err != nil {
		return nil, err
	}
	h.changeNetworks(func() { delete(h.networks, r.GetId()) })
	delete(h.peers, r.GetId())
	delete(h.services, r.GetId())
	return &hostpb.DeleteNetworkResponse{}, nil
}

// EnsureLoadBalancer implements hostpb.HostServer. A hollow host runs no control planes.
func (h *Host) EnsureLoadBalancer(context.Context, *hostpb.LoadBalancer) (*hostpb.LoadBalancer, error) {
	return nil, refusal.Errorf(hostpb.Refusal_UNSUPPORTED,
		"this host is hollow: its machines run no programs, so it cannot serve a control plane. Set spec.controlPlane of its CapstanHost to false")
}

// DeleteLoadBalancer implements hostpb.HostServer.
func (h *Host) DeleteLoadBalancer(_ context.Context, r *hostpb.DeleteLoadBalancerRequest) (*hostpb.DeleteLoadBalancerResponse, error) {
	return &hostpb.DeleteLoadBalancerResponse{}, admission.Deletion("load balancer", r, &hostpb.LoadBalancer{})
}

// EnsureMachine implements hostpb.HostServer.
func (h *Host) EnsureMachine(_ context.Context, r *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	spec := r.GetSpec()
	if err := admission.CheckMachine(spec); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[spec.GetId()]; m != nil {
		if err := admission.SameUpdatedMachine(m.spec(), m.otherSpec(), spec); err != nil {
			return nil, err
		}
		return m.snapshot(), nil
	}
	if err := h.admit(spec); err != nil {
		return nil, err
	}
	record := &hostpb.Machine{Spec: proto.CloneOf(spec), Status: &hostpb.MachineStatus{
		Phase: hostpb.MachineStatus_PENDING, Bootstrap: hostpb.MachineStatus_WAITING, ManagementCluster: r.GetManagementCluster(),
	}}
	if err := h.store.create(record, r.GetBootstrapData()); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the machine: %v", err)
	}
	m := newMachine(h, record)
	answer := m.snapshot()
	h.broadcaster.Publish(events.Machine(hostpb.Event_CHANGED, answer))
	h.add(m)
	h.broadcaster.Publish(events.Host(h.info()))
	return answer, nil
}

// admit decides whether a new machine may be created; h.mu is held.
func (h *Host) admit(spec *hostpb.MachineSpec) error {
	if err := admission.NewMachine(spec, h.info(), h.store.buried(spec.GetId()), h.specs()); err != nil {
		return err
	}
	if err := admission.Mounts(spec, func(id string) *hostpb.Volume { return h.volumes[id] }, h.specs()); err != nil {
		return err
	}
	if err := h.admitNetwork(spec.GetNetwork()); err != nil {
		return err
	}
	if err := admission.FreeAddresses(spec, h.specs()); err != nil {
		return err
	}
	if spec.GetControlPlane() {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "this host is hollow and runs no control planes: set spec.controlPlane of its CapstanHost to false")
	}
	return nil
}

// specs iterates over the machines; h.mu is held.
func (h *Host) specs() iter.Seq[*hostpb.MachineSpec] {
	return func(yield func(*hostpb.MachineSpec) bool) {
		for _, m := range h.machines {
			if !yield(m.spec()) {
				return
			}
		}
	}
}

// StartMachine implements hostpb.HostServer. A failed hollow machine stays failed, so that tests of remediation see it.
func (h *Host) StartMachine(_ context.Context, r *hostpb.StartMachineRequest) (*hostpb.Machine, error) {
	m, err := h.owned(r)
	if err != nil {
		return nil, err
	}
	now := m.snapshot()
	if now.GetStatus().GetPhase() == hostpb.MachineStatus_FAILED {
		return nil, refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "this host is hollow: its failed machines do not start again; delete the machine")
	}
	return now, nil
}

// owned returns the machine that a request of its owner may change.
func (h *Host) owned(r admission.Request) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.GetId()]
	return m, admission.Owned(r, m.owner())
}

// ClaimMachine implements hostpb.HostServer.
func (h *Host) ClaimMachine(_ context.Context, r *hostpb.ClaimMachineRequest) (*hostpb.Machine, error) {
	m, err := h.owned(r)
	if err != nil {
		return nil, err
	}
	m.update(func(s *hostpb.MachineStatus) { s.ManagementCluster = r.GetManagementCluster() })
	return m.snapshot(), nil
}

// GetMachine implements hostpb.HostServer.
func (h *Host) GetMachine(_ context.Context, r *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[r.GetId()]; m != nil {
		return m.snapshot(), nil
	}
	return nil, admission.NoMachine(r.GetId())
}

// ListMachines implements hostpb.HostServer.
func (h *Host) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := &hostpb.ListMachinesResponse{}
	for _, m := range h.machines {
		out.Machines = append(out.Machines, m.snapshot())
	}
	return out, nil
}

// DeleteMachine implements hostpb.HostServer. It writes the tombstone first, so that the deletion continues after a crash.
func (h *Host) DeleteMachine(_ context.Context, r *hostpb.DeleteMachineRequest) (*hostpb.DeleteMachineResponse, error) {
	h.mu.Lock()
	m := h.machines[r.GetId()]
	if err := admission.Deletion("machine", r, m.owner()); err != nil {
		h.mu.Unlock()
		return nil, err
	}
	if m == nil {
		h.mu.Unlock()
		return &hostpb.DeleteMachineResponse{Done: true}, h.store.bury(r.GetId())
	}
	m.cancel()
	if err := h.store.bury(r.GetId()); err != nil {
		h.mu.Unlock()
		return nil, status.Errorf(codes.Internal, "removing the machine: %v", err)
	}
	h.remove(m)
	h.broadcaster.Publish(events.Host(h.info()))
	h.mu.Unlock()
	m.stop()
	h.broadcaster.Publish(events.Machine(hostpb.Event_DELETED, m.snapshot()))
	return &hostpb.DeleteMachineResponse{Done: true}, nil
}

// Logs implements hostpb.HostServer.
func (h *Host) Logs(r *hostpb.LogsRequest, stream hostpb.Host_LogsServer) error {
	m, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: r.GetMachine()})
	if err != nil {
		return err
	}
	if err := admission.CheckService(r.GetService()); err != nil {
		return err
	}
	return stream.Send(&hostpb.LogChunk{Data: fmt.Appendf(nil, "machine %s/%s is hollow: nothing runs in it\n", m.GetSpec().GetNamespace(), m.GetSpec().GetName())})
}

// Exec implements hostpb.HostServer. No command can run in a hollow machine.
func (h *Host) Exec(stream hostpb.Host_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := admission.CheckExec(first.GetStart()); err != nil {
		return err
	}
	m, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: first.GetStart().GetMachine()})
	if err != nil {
		return err
	}
	return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "machine %s/%s is hollow: nothing runs in it", m.GetSpec().GetNamespace(), m.GetSpec().GetName())
}

// LoadImage implements hostpb.HostServer.
func (h *Host) LoadImage(stream hostpb.Host_LoadImageServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if _, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: first.GetMachine()}); err != nil {
		return err
	}
	return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "this host is hollow: its machines run no programs")
}
