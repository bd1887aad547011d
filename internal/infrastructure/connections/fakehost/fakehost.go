// Package fakehost implements the service of host.proto in memory, without machines, for tests of the infrastructure provider.
package fakehost

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/dialing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// Host is a fake capstand.
type Host struct {
	hostpb.UnimplementedHostServer

	// Keepalive contains the keepalive parameters of the server.
	Keepalive hostpb.Keepalive

	socket string
	server *grpc.Server

	mu            sync.Mutex
	info          *hostpb.HostInfo
	networks      map[string]*hostpb.Network
	peers         map[string]*hostpb.SetPeersRequest
	services      map[string]*hostpb.SetServicesRequest
	invented      []*hostpb.SetServicesRequest
	occupied      map[string]string
	loadBalancers map[string]*hostpb.LoadBalancer
	machines      map[string]*hostpb.Machine
	volumes       map[string]*hostpb.Volume
	deleted       map[string]bool
	bootstrap     map[string][]byte
	updates       map[string]*update
	watchers      map[chan *hostpb.Event]struct{}
	calls         map[string]int
	tenants       []string
	refuse        map[string]error
	before        map[string]func()
	hold          bool
	deaf          bool
	commands      atomic.Int32
	imports       atomic.Int32
	loaded        atomic.Int32
}

// New returns a fake host that serves until the test ends. setup can change it before.
func New(t testing.TB, setup ...func(*Host)) *Host {
	t.Helper()
	// Not t.TempDir(): a socket's path holds at most 107 bytes.
	dir, err := os.MkdirTemp("", "fakehost")
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{
		Keepalive: hostpb.DefaultKeepalive, socket: filepath.Join(dir, "s"),
		info: &hostpb.HostInfo{
			Id: filepath.Base(dir), Hostname: "fake", Architecture: "amd64", OperatingSystem: "linux", Cpus: 4,
			MemoryBytes: 64 << 30, KubernetesVersions: []string{"v1.35.0", "v1.36.3"}, Images: []string{"host"}, Driver: "hollow", CgroupVersion: 2, Volumes: true,
		},
		networks: map[string]*hostpb.Network{}, peers: map[string]*hostpb.SetPeersRequest{},
		services: map[string]*hostpb.SetServicesRequest{}, occupied: map[string]string{}, loadBalancers: map[string]*hostpb.LoadBalancer{}, machines: map[string]*hostpb.Machine{},
		volumes: map[string]*hostpb.Volume{},
		deleted: map[string]bool{}, bootstrap: map[string][]byte{}, updates: map[string]*update{}, watchers: map[chan *hostpb.Event]struct{}{},
		calls: map[string]int{}, refuse: map[string]error{}, before: map[string]func(){},
	}
	for _, f := range setup {
		f(h)
	}
	h.Start(t)
	t.Cleanup(func() {
		h.Stop()
		_ = os.RemoveAll(dir)
	})
	return h
}

// Start serves again after Stop.
func (h *Host) Start(t testing.TB) {
	t.Helper()
	l, err := net.Listen("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	h.server = grpc.NewServer(append(h.Keepalive.Server(), grpc.UnaryInterceptor(h.intercept))...)
	hostpb.RegisterHostServer(h.server, h)
	server := h.server
	go func() { _ = server.Serve(l) }()
}

// ServeTLS serves over TCP as well, with mutual TLS, until the test ends. It returns the address.
func (h *Host) ServeTLS(t testing.TB, files credentials.Server) string {
	t.Helper()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := files.Listen(raw, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(append(h.Keepalive.Server(), grpc.UnaryInterceptor(h.intercept), grpc.Creds(credentials.Handshaken()))...)
	hostpb.RegisterHostServer(server, h)
	hostpb.RegisterCredentialsServer(server, &credentials.Service{Server: files})
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return l.Addr().String()
}

// Dial serves a manager that the host dials, as the CapstanHost of this name, until the test ends or stop is called. The host keeps
// each spare connection for the time spare.
func (h *Host) Dial(t testing.TB, address, name string, files credentials.Server, spare time.Duration) (stop func()) {
	t.Helper()
	listener := dialing.Dialer{
		Address: address, Config: func() (*tls.Config, error) { return files.DialConfig(name) }, Spare: spare, Log: slog.New(slog.DiscardHandler),
	}.Listen(t.Context())
	server := grpc.NewServer(append(h.Keepalive.Server(), grpc.UnaryInterceptor(h.intercept), grpc.Creds(credentials.Handshaken()))...)
	hostpb.RegisterHostServer(server, h)
	hostpb.RegisterCredentialsServer(server, &credentials.Service{Server: files})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server.Stop
}

// Stop ends the server. The host keeps its objects.
func (h *Host) Stop() { h.server.Stop() }

// Address returns the value for CapstanHost.spec.address.
func (h *Host) Address() string { return "unix://" + h.socket }

// Hold keeps new machines and updates PENDING until it is called with false.
func (h *Host) Hold(hold bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hold = hold
	if hold {
		return
	}
	for _, m := range h.machines {
		h.run(m)
		h.runUpdate(m)
	}
}

// Deafen keeps load balancers from listening until it is called with false.
func (h *Host) Deafen(deaf bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deaf = deaf
	for id, lb := range h.loadBalancers {
		changed := proto.CloneOf(lb)
		changed.Serving = !deaf
		h.loadBalancers[id] = changed
		h.broadcast(loadBalancerEvent(hostpb.Event_CHANGED, changed))
	}
}

// Answer makes the API servers behind a load balancer healthy.
func (h *Host) Answer(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed := proto.CloneOf(h.loadBalancers[id])
	for _, b := range changed.GetBackends() {
		b.Healthy = true
	}
	h.loadBalancers[id] = changed
	h.broadcast(loadBalancerEvent(hostpb.Event_CHANGED, changed))
}

// AddTenant limits the effect of DeleteLoadBalancer and DeleteNetwork on Calls, Refuse and Before to objects of the added
// namespaces. The deletion of a cluster sends them to every connected host, and parallel tests share a manager.
func (h *Host) AddTenant(namespace string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tenants = append(h.tenants, namespace)
}

// ofOthers returns whether a request removes an object of a namespace that is no tenant; h.mu is held.
func (h *Host) ofOthers(req any) bool {
	switch r := req.(type) {
	case *hostpb.DeleteLoadBalancerRequest:
		return len(h.tenants) > 0 && !slices.Contains(h.tenants, r.GetNamespace())
	case *hostpb.DeleteNetworkRequest:
		return len(h.tenants) > 0 && !slices.Contains(h.tenants, r.GetNamespace())
	}
	return false
}

// Refuse makes calls of a method fail, for example "EnsureNetwork". A nil error ends this.
func (h *Host) Refuse(method string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refuse[method] = err
}

// Before lets f run before each call of a method. nil ends this.
func (h *Host) Before(method string, f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.before[method] = f
}

// Calls returns how often a method was called.
func (h *Host) Calls(method string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.calls[method]
}

// Watchers returns how many watches are open.
func (h *Host) Watchers() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.watchers)
}

// SetInfo changes the properties of the host.
func (h *Host) SetInfo(change func(*hostpb.HostInfo)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.info = proto.CloneOf(h.info)
	change(h.info)
	h.sendInfo()
}

// Update changes the status of a machine, as events on a real host do.
func (h *Host) Update(id string, change func(*hostpb.MachineStatus)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[id]; m != nil {
		change(m.Status)
		h.send(hostpb.Event_CHANGED, m)
	}
}

// Lose removes a machine without a request, as the loss of a disk does.
func (h *Host) Lose(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[id]; m != nil {
		delete(h.machines, id)
		h.send(hostpb.Event_DELETED, m)
	}
}

// Machine returns a copy of a machine and its bootstrap data, or nil.
func (h *Host) Machine(id string) (*hostpb.Machine, []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machines[id] == nil {
		return nil, nil
	}
	return proto.CloneOf(h.machines[id]), h.bootstrap[id]
}

// LoadBalancer returns a copy, or nil.
func (h *Host) LoadBalancer(id string) *hostpb.LoadBalancer {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.loadBalancers[id] == nil {
		return nil
	}
	return proto.CloneOf(h.loadBalancers[id])
}

// HoldVirtualAddress gives the host the virtual address of a load balancer.
func (h *Host) HoldVirtualAddress(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	lb := proto.CloneOf(h.loadBalancers[id])
	lb.VirtualAddress.Held = true
	h.loadBalancers[id] = lb
	h.broadcast(loadBalancerEvent(hostpb.Event_CHANGED, lb))
}

// Network returns a copy, or nil.
func (h *Host) Network(id string) *hostpb.Network {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.networks[id] == nil {
		return nil
	}
	return proto.CloneOf(h.networks[id])
}

func (h *Host) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := filepath.Base(info.FullMethod)
	h.mu.Lock()
	var err error
	var before func()
	if !h.ofOthers(req) {
		h.calls[method]++
		err, before = h.refuse[method], h.before[method]
	}
	h.mu.Unlock()
	if before != nil {
		before()
	}
	if err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// GetInfo implements hostpb.HostServer.
func (h *Host) GetInfo(context.Context, *hostpb.GetInfoRequest) (*hostpb.HostInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return proto.CloneOf(h.info), nil
}

// Watch implements hostpb.HostServer.
func (h *Host) Watch(_ *hostpb.WatchRequest, stream hostpb.Host_WatchServer) error {
	events := make(chan *hostpb.Event, 10000)
	h.mu.Lock()
	h.watchers[events] = struct{}{}
	events <- infoEvent(h.info)
	for _, m := range h.machines {
		events <- machineEvent(hostpb.Event_CHANGED, m)
	}
	for _, lb := range h.loadBalancers {
		events <- loadBalancerEvent(hostpb.Event_CHANGED, lb)
	}
	events <- &hostpb.Event{Type: hostpb.Event_SYNCED}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		delete(h.watchers, events)
		h.mu.Unlock()
	}()
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case e := <-events:
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
}

// EnsureNetwork implements hostpb.HostServer.
func (h *Host) EnsureNetwork(_ context.Context, n *hostpb.Network) (*hostpb.Network, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ensureNetwork(n)
}

func (h *Host) ensureNetwork(n *hostpb.Network) (*hostpb.Network, error) {
	if err := admission.CheckNetwork(n); err != nil {
		return nil, err
	}
	if err := admission.Network(n, maps.Values(h.networks)); err != nil {
		return nil, err
	}
	if err := admission.NoOverlap(n, maps.Values(h.networks)); err != nil {
		return nil, err
	}
	out := proto.CloneOf(n)
	out.Gateway = netip.MustParsePrefix(n.GetCidr()).Addr().Next().String()
	out.Bridge = "cb-" + n.GetId()
	h.networks[n.GetId()] = out
	h.reportTunnelAddress()
	return proto.CloneOf(out), nil
}

// reportTunnelAddress publishes the tunnel address of the networks if it has changed; h.mu is held.
func (h *Host) reportTunnelAddress() {
	address := admission.TunnelAddress(maps.Values(h.networks))
	if address == h.info.GetTunnelAddress() {
		return
	}
	h.info = proto.CloneOf(h.info)
	h.info.TunnelAddress = address
	h.sendInfo()
}

// SetPeers implements hostpb.HostServer.
func (h *Host) SetPeers(_ context.Context, r *hostpb.SetPeersRequest) (*hostpb.SetPeersResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Peers(r, h.networks[r.GetNetworkId()], h.info.GetOverlayPublicKey() != ""); err != nil {
		return nil, err
	}
	h.peers[r.GetNetworkId()] = r
	return &hostpb.SetPeersResponse{}, nil
}

// SetServices implements hostpb.HostServer.
func (h *Host) SetServices(_ context.Context, r *hostpb.SetServicesRequest) (*hostpb.SetServicesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Services(r, h.networks[r.GetNetworkId()]); err != nil {
		return nil, err
	}
	h.services[r.GetNetworkId()] = r
	out := &hostpb.SetServicesResponse{}
	for _, s := range r.GetServices() {
		if why := h.occupied[s.GetAddress()]; why != "" {
			refused := &hostpb.RefusedAddress{Address: s.GetAddress(), Message: why}
			if s.GetHostPorts() {
				refused.Name = s.GetName()
			}
			out.Refused = append(out.Refused, refused)
		}
	}
	return out, nil
}

// Pulse implements hostpb.HostServer.
func (h *Host) Pulse(context.Context, *hostpb.PulseRequest) (*hostpb.PulseResponse, error) {
	return &hostpb.PulseResponse{}, nil
}

// ListServices implements hostpb.HostServer.
func (h *Host) ListServices(context.Context, *hostpb.ListServicesRequest) (*hostpb.ListServicesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	answer := hostpb.ServiceLists(maps.Values(h.services))
	answer.Lists = append(answer.Lists, h.invented...)
	return answer, nil
}

// Invent makes the host report lists of Services that no manager has sent.
func (h *Host) Invent(lists ...*hostpb.SetServicesRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.invented = lists
}

// ServiceAt returns the last accepted Service of a network at an address, or nil.
func (h *Host) ServiceAt(networkID, address string) *hostpb.PublishedService {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.services[networkID].GetServices()
	if i := slices.IndexFunc(all, func(s *hostpb.PublishedService) bool { return s.GetAddress() == address }); i >= 0 {
		return all[i]
	}
	return nil
}

// Services returns the last accepted Services of a network, by name.
func (h *Host) Services(networkID string) map[string]*hostpb.PublishedService {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[string]*hostpb.PublishedService{}
	for _, s := range h.services[networkID].GetServices() {
		out[s.GetName()] = s
	}
	return out
}

// Occupy makes the host refuse an address for Services; an empty reason ends this.
func (h *Host) Occupy(address, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.occupied[address] = why
}

// Reboot implements hostpb.HostServer. It does nothing: a test stops the host and lets it return with another boot id.
func (h *Host) Reboot(context.Context, *hostpb.RebootRequest) (*hostpb.RebootResponse, error) {
	return &hostpb.RebootResponse{}, nil
}

// SetFencing implements hostpb.HostServer.
func (h *Host) SetFencing(_ context.Context, r *hostpb.SetFencingRequest) (*hostpb.SetFencingResponse, error) {
	if err := admission.CheckFencing(r); err != nil {
		return nil, err
	}
	h.SetInfo(func(i *hostpb.HostInfo) {
		i.Fencing = nil
		if r.GetStopAfterSeconds() > 0 {
			i.Fencing = []*hostpb.Fencing{{ManagementCluster: r.GetManagementCluster(), StopAfterSeconds: r.GetStopAfterSeconds()}}
		}
	})
	return &hostpb.SetFencingResponse{}, nil
}

// Peers returns the last accepted peers of a network, or nil.
func (h *Host) Peers(networkID string) *hostpb.SetPeersRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.peers[networkID]
}

// DeleteNetwork implements hostpb.HostServer.
func (h *Host) DeleteNetwork(_ context.Context, r *hostpb.DeleteNetworkRequest) (*hostpb.DeleteNetworkResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Deletion("network", r, h.networks[r.GetId()]); err != nil {
		return nil, err
	}
	if err := admission.UnusedNetwork(r.GetId(), h.specs(), maps.Values(h.loadBalancers)); err != nil {
		return nil, err
	}
	delete(h.networks, r.GetId())
	delete(h.peers, r.GetId())
	delete(h.services, r.GetId())
	h.reportTunnelAddress()
	return &hostpb.DeleteNetworkResponse{}, nil
}

// EnsureLoadBalancer implements hostpb.HostServer.
func (h *Host) EnsureLoadBalancer(_ context.Context, lb *hostpb.LoadBalancer) (*hostpb.LoadBalancer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.CheckLoadBalancer(lb); err != nil {
		return nil, err
	}
	if err := admission.LoadBalancer(lb, maps.Values(h.loadBalancers)); err != nil {
		return nil, err
	}
	if err := admission.BalancerNetwork(lb, h.networks[lb.GetNetworkId()]); err != nil {
		return nil, err
	}
	out := proto.CloneOf(lb)
	out.Serving = !h.deaf
	h.loadBalancers[lb.GetId()] = out
	h.broadcast(loadBalancerEvent(hostpb.Event_CHANGED, out))
	return proto.CloneOf(out), nil
}

// DeleteLoadBalancer implements hostpb.HostServer.
func (h *Host) DeleteLoadBalancer(_ context.Context, r *hostpb.DeleteLoadBalancerRequest) (*hostpb.DeleteLoadBalancerResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := admission.Deletion("load balancer", r, h.loadBalancers[r.GetId()]); err != nil {
		return nil, err
	}
	if lb := h.loadBalancers[r.GetId()]; lb != nil {
		delete(h.loadBalancers, r.GetId())
		h.broadcast(loadBalancerEvent(hostpb.Event_DELETED, lb))
	}
	return &hostpb.DeleteLoadBalancerResponse{}, nil
}

// EnsureMachine implements hostpb.HostServer.
func (h *Host) EnsureMachine(_ context.Context, r *hostpb.EnsureMachineRequest) (*hostpb.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	spec := r.GetSpec()
	if err := admission.CheckMachine(spec); err != nil {
		return nil, err
	}
	if m := h.machines[spec.GetId()]; m != nil {
		if err := admission.SameUpdatedMachine(m.GetSpec(), h.updates[spec.GetId()].other(), spec); err != nil {
			return nil, err
		}
		return proto.CloneOf(m), nil
	}
	if err := admission.NewMachine(spec, h.info, h.deleted[spec.GetId()], h.specs()); err != nil {
		return nil, err
	}
	if err := admission.Mounts(spec, func(id string) *hostpb.Volume { return h.volumes[id] }, h.specs()); err != nil {
		return nil, err
	}
	if err := admission.FreeAddresses(spec, h.specs()); err != nil {
		return nil, err
	}
	if _, err := h.ensureNetwork(spec.GetNetwork()); err != nil {
		return nil, err
	}
	m := &hostpb.Machine{Spec: proto.CloneOf(spec), Status: &hostpb.MachineStatus{
		Phase: hostpb.MachineStatus_PENDING, Bootstrap: hostpb.MachineStatus_WAITING, ManagementCluster: r.GetManagementCluster(),
	}}
	if len(r.GetBootstrapData()) > 0 {
		m.Status.Bootstrap = hostpb.MachineStatus_STARTED
	}
	h.machines[spec.GetId()] = m
	h.bootstrap[spec.GetId()] = r.GetBootstrapData()
	out := proto.CloneOf(m)
	h.account()
	h.send(hostpb.Event_CHANGED, m)
	if !h.hold {
		h.run(m)
	}
	return out, nil
}

// run starts a machine whose bootstrap succeeds.
func (h *Host) run(m *hostpb.Machine) {
	if m.Status.Phase != hostpb.MachineStatus_PENDING {
		return
	}
	m.Status.Phase = hostpb.MachineStatus_RUNNING
	h.send(hostpb.Event_CHANGED, m)
	m.Status.Bootstrap = hostpb.MachineStatus_SUCCEEDED
	m.Status.Services = []*hostpb.ServiceStatus{{Name: "kubelet", State: "ready"}, {Name: "containerd", State: "ready"}}
	h.send(hostpb.Event_CHANGED, m)
}

// StartMachine implements hostpb.HostServer.
func (h *Host) StartMachine(_ context.Context, r *hostpb.StartMachineRequest) (*hostpb.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.GetId()]
	if err := admission.Owned(r, m.GetSpec()); err != nil {
		return nil, err
	}
	if m.Status.Phase == hostpb.MachineStatus_FAILED {
		m.Status.Phase, m.Status.Message = hostpb.MachineStatus_RUNNING, ""
		h.send(hostpb.Event_CHANGED, m)
	}
	return proto.CloneOf(m), nil
}

// ClaimMachine implements hostpb.HostServer.
func (h *Host) ClaimMachine(_ context.Context, r *hostpb.ClaimMachineRequest) (*hostpb.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.GetId()]
	if err := admission.Owned(r, m.GetSpec()); err != nil {
		return nil, err
	}
	m.Status.ManagementCluster = r.GetManagementCluster()
	if m.Status.Unconfirmed {
		m.Status.Unconfirmed = false
		h.run(m)
	}
	h.send(hostpb.Event_CHANGED, m)
	return proto.CloneOf(m), nil
}

// Logs implements hostpb.HostServer. The log of each service is one line.
func (h *Host) Logs(r *hostpb.LogsRequest, stream hostpb.Host_LogsServer) error {
	m, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: r.GetMachine()})
	if err != nil {
		return err
	}
	if err := admission.CheckService(r.GetService()); err != nil {
		return err
	}
	return stream.Send(&hostpb.LogChunk{Data: fmt.Appendf(nil, "log of %s, service %s\n", m.GetSpec().GetName(), r.GetService())})
}

// Exec implements hostpb.HostServer. Each command copies its input, writes "errors" and ends with the exit code that is its
// second word, or 0.
func (h *Host) Exec(stream hostpb.Host_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if err := admission.CheckExec(start); err != nil {
		return err
	}
	if _, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: start.GetMachine()}); err != nil {
		return err
	}
	h.commands.Add(1)
	defer h.commands.Add(-1)
	code := 0
	if words := start.GetCommand(); len(words) > 1 {
		code, _ = strconv.Atoi(words[1])
	}
	err = errors.Join(
		stream.Send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_Started{Started: true}}),
		stream.Send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_Stderr{Stderr: []byte("errors")}}))
	for err == nil {
		var request *hostpb.ExecRequest
		if request, err = stream.Recv(); request.GetStdinClosed() {
			return stream.Send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_ExitCode{ExitCode: int32(code)}})
		}
		if data := request.GetStdin(); err == nil && len(data) > 0 {
			err = stream.Send(&hostpb.ExecResponse{Content: &hostpb.ExecResponse_Stdout{Stdout: data}})
		}
	}
	return err
}

// Imports returns how many archives the host receives, and how many it has received to their end.
func (h *Host) Imports() (receiving, loaded int) { return int(h.imports.Load()), int(h.loaded.Load()) }

// Commands is the number of commands that run.
func (h *Host) Commands() int { return int(h.commands.Load()) }

// LoadImage implements hostpb.HostServer. The first 64 bytes of an archive are the name of its image; "garbage" is none.
func (h *Host) LoadImage(stream hostpb.Host_LoadImageServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if _, err := h.GetMachine(stream.Context(), &hostpb.GetMachineRequest{Id: first.GetMachine()}); err != nil {
		return err
	}
	h.imports.Add(1)
	defer h.imports.Add(-1)
	for archive := first.GetChunk(); ; {
		next, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && string(archive) == "garbage":
			return refusal.Errorf(hostpb.Refusal_INVALID, "the archive is garbage")
		case errors.Is(err, io.EOF):
			h.loaded.Add(1)
			return stream.SendAndClose(&hostpb.LoadImageResponse{Images: []string{string(archive[:min(len(archive), 64)])}})
		case err != nil:
			return err
		}
		archive = append(archive, next.GetChunk()...)
	}
}

// ListMachines implements hostpb.HostServer.
func (h *Host) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	res := &hostpb.ListMachinesResponse{}
	for _, m := range h.machines {
		res.Machines = append(res.Machines, proto.CloneOf(m))
	}
	return res, nil
}

// DeleteMachine implements hostpb.HostServer.
func (h *Host) DeleteMachine(_ context.Context, r *hostpb.DeleteMachineRequest) (*hostpb.DeleteMachineResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.GetId()]
	if err := admission.Deletion("machine", r, m.GetSpec()); err != nil {
		return nil, err
	}
	h.deleted[r.GetId()] = true
	if m == nil {
		return &hostpb.DeleteMachineResponse{Done: true}, nil
	}
	if h.hold {
		m.Status.Phase = hostpb.MachineStatus_DELETING
		h.send(hostpb.Event_CHANGED, m)
		return &hostpb.DeleteMachineResponse{}, nil
	}
	delete(h.machines, r.GetId())
	h.account()
	h.send(hostpb.Event_DELETED, m)
	return &hostpb.DeleteMachineResponse{Done: true}, nil
}

// GetMachine implements hostpb.HostServer.
func (h *Host) GetMachine(_ context.Context, r *hostpb.GetMachineRequest) (*hostpb.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[r.GetId()]; m != nil {
		return proto.CloneOf(m), nil
	}
	return nil, admission.NoMachine(r.GetId())
}

// specs iterates over the machines; h.mu is held.
func (h *Host) specs() iter.Seq[*hostpb.MachineSpec] {
	return func(yield func(*hostpb.MachineSpec) bool) {
		for _, m := range h.machines {
			if !yield(m.GetSpec()) {
				return
			}
		}
	}
}

// account updates the allocated resources in the host's properties.
func (h *Host) account() {
	h.info = proto.CloneOf(h.info)
	h.info.Machines, h.info.AllocatedMemoryBytes, h.info.VolumeBytes = 0, 0, admission.VolumeBytes(maps.Values(h.volumes))
	for _, m := range h.machines {
		h.info.Machines++
		h.info.AllocatedMemoryBytes += m.GetSpec().GetMemoryBytes()
	}
	h.sendInfo()
}

func (h *Host) sendInfo() { h.broadcast(infoEvent(h.info)) }

func (h *Host) send(t hostpb.Event_Type, m *hostpb.Machine) { h.broadcast(machineEvent(t, m)) }

func (h *Host) broadcast(e *hostpb.Event) {
	for w := range h.watchers {
		w <- e
	}
}

func infoEvent(info *hostpb.HostInfo) *hostpb.Event {
	return &hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_Host{Host: proto.CloneOf(info)}}
}

func machineEvent(t hostpb.Event_Type, m *hostpb.Machine) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_Machine{Machine: proto.CloneOf(m)}}
}

func loadBalancerEvent(t hostpb.Event_Type, lb *hostpb.LoadBalancer) *hostpb.Event {
	return &hostpb.Event{Type: t, Object: &hostpb.Event_LoadBalancer{LoadBalancer: proto.CloneOf(lb)}}
}
