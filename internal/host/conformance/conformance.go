// Package conformance tests that an implementation of the host service follows the admission rules that its clients
// rely on: the same gRPC code and the same reason for each refused call. capstand, the hollow host and the fake host of
// the tests run it. It is imported by tests only.
//
// Layer: test. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package conformance

import (
	"context"
	"fmt"
	"io"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// Features of an implementation.
type Features struct {
	// LoadBalancers is false if the host refuses every load balancer.
	LoadBalancers bool
	// Version of Kubernetes that the host has.
	Version string
}

// call is a request that the host must answer with reason; REASON_UNSPECIFIED means that it must succeed.
type call struct {
	name   string
	do     func(context.Context, hostpb.HostServer) error
	reason hostpb.Refusal_Reason
	code   codes.Code
}

const (
	invalid = hostpb.Refusal_INVALID
	success = hostpb.Refusal_REASON_UNSPECIFIED
)

// TunnelAddress is the address that the host must have for its overlays.
const TunnelAddress = "192.0.2.1"

// Test makes calls to a host without objects, which has memory for two machines of 1 GiB and less than 1 TiB.
func Test(t *testing.T, h hostpb.HostServer, f Features) {
	t.Helper()
	calls := slices.Concat(networkCalls(), overlayCalls(), serviceCalls(), machineCalls(f.Version), hostAccessCalls(f.Version), claimCalls(), volumeCalls(f.Version), updateCalls(f.Version), streamCalls())
	if f.LoadBalancers {
		calls = append(calls, balancerCalls()...)
	}
	for _, c := range append(calls, deleteCalls(f)...) {
		err := c.do(t.Context(), h)
		if got := refusal.Of(err).Reason; got != c.reason || status.Code(err) != c.code {
			t.Errorf("%s: got %s with reason %s (%v), want %s with reason %s", c.name, status.Code(err), got, err, c.code, c.reason)
		}
	}
}

func network(change func(*hostpb.Network)) func(context.Context, hostpb.HostServer) error {
	n := &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"}
	change(n)
	return func(ctx context.Context, h hostpb.HostServer) error { _, err := h.EnsureNetwork(ctx, n); return err }
}

func networkCalls() []call {
	return []call{
		{"network without an id", network(func(n *hostpb.Network) { n.Id = "" }), invalid, codes.InvalidArgument},
		{"network whose id is a path", network(func(n *hostpb.Network) { n.Id = "../n" }), invalid, codes.InvalidArgument},
		{"network without a CIDR", network(func(n *hostpb.Network) { n.Cidr = "" }), invalid, codes.InvalidArgument},
		{"network without an owner", network(func(n *hostpb.Network) { n.Name = "" }), invalid, codes.InvalidArgument},
		{"network", network(func(*hostpb.Network) {}), success, codes.OK},
		{"network again", network(func(*hostpb.Network) {}), success, codes.OK},
		{"network of another namespace", network(func(n *hostpb.Network) { n.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"network with the name of another", network(func(n *hostpb.Network) { n.Id, n.Cidr = "n-2", "10.2.0.0/24" }), hostpb.Refusal_NAME_IN_USE, codes.AlreadyExists},
		{"network with another CIDR", network(func(n *hostpb.Network) { n.Cidr = "10.2.0.0/24" }), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
		{"network that overlaps another", network(func(n *hostpb.Network) { n.Id, n.Name = "n-2", "other" }), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
	}
}

// overlayCalls create the network o-1, which has an overlay, and delete it.
func overlayCalls() []call {
	overlay := func(change func(*hostpb.Network)) func(context.Context, hostpb.HostServer) error {
		return network(func(n *hostpb.Network) {
			n.Id, n.Name, n.Cidr = "o-1", "overlay", "10.3.0.0/24"
			n.Overlay = &hostpb.Overlay{Vni: 4096, Address: "127.0.0.1", Mtu: 1450}
			change(n)
		})
	}
	return []call{
		{"VNI of another program", overlay(func(n *hostpb.Network) { n.Overlay.Vni = 4095 }), invalid, codes.InvalidArgument},
		{"VNI of 25 bits", overlay(func(n *hostpb.Network) { n.Overlay.Vni = 1 << 24 }), invalid, codes.InvalidArgument},
		{"MTU too small for IPv6", overlay(func(n *hostpb.Network) { n.Overlay.Mtu = 1279 }), invalid, codes.InvalidArgument},
		{"tunnel address for all hosts", overlay(func(n *hostpb.Network) { n.Overlay.Address = "0.0.0.0" }), invalid, codes.InvalidArgument},
		{"tunnel address of nobody else", overlay(func(*hostpb.Network) {}), invalid, codes.InvalidArgument},
		{"overlay", overlay(func(n *hostpb.Network) { n.Overlay.Address = TunnelAddress }), success, codes.OK},
		{"tunnel address of the overlay", reportsTunnel(TunnelAddress), success, codes.OK},
		{"overlay again", overlay(func(n *hostpb.Network) { n.Overlay.Address = TunnelAddress }), success, codes.OK},
		{"overlay with another VNI", overlay(func(n *hostpb.Network) { n.Overlay.Address, n.Overlay.Vni = TunnelAddress, 4097 }), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
		{"overlay removed", overlay(func(n *hostpb.Network) { n.Overlay = nil }), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
		{"VNI of another cluster", overlay(func(n *hostpb.Network) {
			n.Id, n.Name, n.Cidr, n.Overlay.Address = "o-2", "other", "10.4.0.0/24", TunnelAddress
		}), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
		{"peers", peers("o-1", "overlay", &hostpb.Peer{Addresses: []string{"10.3.0.10"}, Host: "192.0.2.2"}), success, codes.OK},
		{"other peers", peers("o-1", "overlay", &hostpb.Peer{Addresses: []string{"10.3.0.11"}, Host: "192.0.2.3"}), success, codes.OK},
		{"peer with the gateway's address", peers("o-1", "overlay", &hostpb.Peer{Addresses: []string{"10.3.0.1"}, Host: "192.0.2.2"}), invalid, codes.InvalidArgument},
		{"deletion of a network with an overlay", func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "o-1", Namespace: "default", Name: "overlay"})
			return err
		}, success, codes.OK},
		{"no tunnel address without an overlay", reportsTunnel(""), success, codes.OK},
		{"peers of a deleted network", peers("o-1", "overlay"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"overlay for a network without one", network(func(n *hostpb.Network) {
			n.Overlay = &hostpb.Overlay{Vni: 4096, Address: "192.0.2.1", Mtu: 1450}
		}), hostpb.Refusal_NETWORK_CONFLICT, codes.FailedPrecondition},
		{"peers of a network without an overlay", peers("n-1", "demo"), hostpb.Refusal_UNSUPPORTED, codes.FailedPrecondition},
		{"peers of an unknown network", peers("n-9", "demo"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"peers of a network of another owner", peers("n-1", "thief"), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"peers without an owner", peers("n-1", ""), invalid, codes.InvalidArgument},
	}
}

// reportsTunnel fails unless the host reports the tunnel address.
func reportsTunnel(want string) func(context.Context, hostpb.HostServer) error {
	return func(ctx context.Context, h hostpb.HostServer) error {
		info, err := h.GetInfo(ctx, &hostpb.GetInfoRequest{})
		if err == nil && info.GetTunnelAddress() != want {
			return fmt.Errorf("expected the tunnel address %q, found %q", want, info.GetTunnelAddress())
		}
		return err
	}
}

func peers(id, name string, peers ...*hostpb.Peer) func(context.Context, hostpb.HostServer) error {
	return func(ctx context.Context, h hostpb.HostServer) error {
		_, err := h.SetPeers(ctx, &hostpb.SetPeersRequest{NetworkId: id, Namespace: "default", Name: name, Peers: peers})
		return err
	}
}

// serviceCalls publish nothing: the hosts of the tests have different addresses.
func serviceCalls() []call {
	services := func(id, name string, services ...*hostpb.PublishedService) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.SetServices(ctx, &hostpb.SetServicesRequest{NetworkId: id, Namespace: "default", Name: name, Services: services})
			return err
		}
	}
	with := func(change func(*hostpb.PublishedService)) func(context.Context, hostpb.HostServer) error {
		s := &hostpb.PublishedService{
			Name: "default/web", Address: "192.0.2.100", Machines: []string{"10.1.0.10"}, SourceRanges: []string{"198.51.100.0/24"},
			Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
		}
		change(s)
		return services("n-1", "demo", s)
	}
	hostPort := func(name string) *hostpb.PublishedService {
		return &hostpb.PublishedService{Name: name, Address: "192.0.2.1", HostPorts: true, Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}}}
	}
	return []call{
		{"no Services", services("n-1", "demo"), success, codes.OK},
		{"Services of an unknown network", services("n-9", "demo"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"Services of another owner", services("n-1", "thief"), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"Services without an owner", services("n-1", ""), invalid, codes.InvalidArgument},
		{"Service at an IPv6 address", with(func(s *hostpb.PublishedService) { s.Address = "fd00::1" }), invalid, codes.InvalidArgument},
		{"Service at all addresses", with(func(s *hostpb.PublishedService) { s.Address = "0.0.0.0" }), invalid, codes.InvalidArgument},
		{"Service at a rule", with(func(s *hostpb.PublishedService) { s.Address = "192.0.2.1 accept" }), invalid, codes.InvalidArgument},
		{"Service without a port", with(func(s *hostpb.PublishedService) { s.Ports = nil }), invalid, codes.InvalidArgument},
		{"Service with port 0", with(func(s *hostpb.PublishedService) { s.Ports[0].Port = 0 }), invalid, codes.InvalidArgument},
		{"Service with a port of 17 bits", with(func(s *hostpb.PublishedService) { s.Ports[0].NodePort = 1 << 16 }), invalid, codes.InvalidArgument},
		{"Service without a protocol", with(func(s *hostpb.PublishedService) { s.Ports[0].Protocol = 0 }), invalid, codes.InvalidArgument},
		{"Service with a port twice", with(func(s *hostpb.PublishedService) { s.Ports = append(s.Ports, s.Ports[0]) }), invalid, codes.InvalidArgument},
		{"Service with a machine of another network", with(func(s *hostpb.PublishedService) { s.Machines = []string{"10.2.0.10"} }), invalid, codes.InvalidArgument},
		{"Service with the gateway as a machine", with(func(s *hostpb.PublishedService) { s.Machines = []string{"10.1.0.1"} }), invalid, codes.InvalidArgument},
		{"Services with one port of the host", services("n-1", "demo", hostPort("a/web"), hostPort("a/other")), invalid, codes.InvalidArgument},
		{"Service with ports of the host twice", services("n-1", "demo", hostPort("a/web"), hostPort("a/web")), invalid, codes.InvalidArgument},
		{"Service with a source range with host bits", with(func(s *hostpb.PublishedService) { s.SourceRanges = []string{"198.51.100.1/24"} }), invalid, codes.InvalidArgument},
	}
}

func machineCalls(version string) []call {
	spec := machineSpec(version)
	ensure := func(change func(*hostpb.MachineSpec)) func(context.Context, hostpb.HostServer) error {
		s := proto.CloneOf(spec)
		change(s)
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: s})
			return err
		}
	}
	second := func(change func(*hostpb.MachineSpec)) func(context.Context, hostpb.HostServer) error {
		return ensure(func(s *hostpb.MachineSpec) {
			s.Id, s.Name, s.Addresses[0].Address = "m-2", "two", "10.1.0.11"
			change(s)
		})
	}
	start := func(namespace, id string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.StartMachine(ctx, &hostpb.StartMachineRequest{Id: id, Namespace: namespace, Name: "one"})
			return err
		}
	}
	return []call{
		{"machine without an id", ensure(func(s *hostpb.MachineSpec) { s.Id = "" }), invalid, codes.InvalidArgument},
		{"machine whose id is a path", ensure(func(s *hostpb.MachineSpec) { s.Id = "../m" }), invalid, codes.InvalidArgument},
		{"machine without an owner", ensure(func(s *hostpb.MachineSpec) { s.Namespace = "" }), invalid, codes.InvalidArgument},
		{"machine without an address", ensure(func(s *hostpb.MachineSpec) { s.Addresses = nil }), invalid, codes.InvalidArgument},
		{"machine without memory", ensure(func(s *hostpb.MachineSpec) { s.MemoryBytes = 0 }), invalid, codes.InvalidArgument},
		{"machine with too many processors", ensure(func(s *hostpb.MachineSpec) { s.Cpus = 1 << 20 }), invalid, codes.InvalidArgument},
		{"machine with an unknown version", ensure(func(s *hostpb.MachineSpec) { s.KubernetesVersion = "v0.0.1" }), hostpb.Refusal_NOT_PROVIDED, codes.FailedPrecondition},
		{"machine with an unknown image", ensure(func(s *hostpb.MachineSpec) { s.Image = "windows" }), hostpb.Refusal_NOT_PROVIDED, codes.FailedPrecondition},
		{"machine that is too large", ensure(func(s *hostpb.MachineSpec) { s.MemoryBytes = 1 << 40 }), hostpb.Refusal_OUT_OF_MEMORY, codes.ResourceExhausted},
		{"machine", ensure(func(*hostpb.MachineSpec) {}), success, codes.OK},
		{"machine again", ensure(func(*hostpb.MachineSpec) {}), success, codes.OK},
		{"machine of another namespace", ensure(func(s *hostpb.MachineSpec) { s.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"machine with another spec", ensure(func(s *hostpb.MachineSpec) { s.MemoryBytes *= 2 }), hostpb.Refusal_SPEC_CHANGED, codes.InvalidArgument},
		{"machine with the name of another", second(func(s *hostpb.MachineSpec) { s.Name = "one" }), hostpb.Refusal_NAME_IN_USE, codes.AlreadyExists},
		{"machine with the address of another", second(func(s *hostpb.MachineSpec) { s.Addresses[0].Address = "10.1.0.10" }), hostpb.Refusal_ADDRESS_IN_USE, codes.AlreadyExists},
		{"machine in the network of another owner", second(func(s *hostpb.MachineSpec) { s.Network.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"start of a machine of another namespace", start("thief", "m-1"), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"start of a machine without an owner", start("", "m-1"), invalid, codes.InvalidArgument},
		{"start of an unknown machine", start("default", "m-9"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"get of an unknown machine", func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.GetMachine(ctx, &hostpb.GetMachineRequest{Id: "m-9"})
			return err
		}, hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"deleted machine", func(ctx context.Context, h hostpb.HostServer) error {
			req := &hostpb.DeleteMachineRequest{Id: "m-3", Namespace: "default", Name: "three"}
			if _, err := h.DeleteMachine(ctx, req); err != nil {
				return err
			}
			return second(func(s *hostpb.MachineSpec) { s.Id, s.Name = "m-3", "three" })(ctx, h)
		}, hostpb.Refusal_DELETED, codes.FailedPrecondition},
	}
}

// claimCalls claim the machine m-1. A refused claim changes nothing.
func claimCalls() []call {
	claim := func(id, namespace, cluster string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.ClaimMachine(ctx, &hostpb.ClaimMachineRequest{Id: id, Namespace: namespace, Name: "one", ManagementCluster: cluster})
			return err
		}
	}
	return []call{
		{"claim", claim("m-1", "default", "first"), success, codes.OK},
		{"claim again", claim("m-1", "default", "second"), success, codes.OK},
		{"claim without an owner", claim("m-1", "", "third"), invalid, codes.InvalidArgument},
		{"claim of another namespace", claim("m-1", "thief", "third"), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"claim of an unknown machine", claim("m-9", "default", "third"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"the last claim holds", func(ctx context.Context, h hostpb.HostServer) error {
			m, err := h.GetMachine(ctx, &hostpb.GetMachineRequest{Id: "m-1"})
			if got := m.GetStatus().GetManagementCluster(); err == nil && got != "second" {
				return fmt.Errorf("the machine belongs to management cluster %q", got)
			}
			return err
		}, success, codes.OK},
	}
}

// updateCalls update the machine m-1, which is not necessarily bootstrapped: calls that a host would accept fail last.
func updateCalls(version string) []call {
	update := func(change func(*hostpb.UpdateMachineRequest)) func(context.Context, hostpb.HostServer) error {
		r := &hostpb.UpdateMachineRequest{Spec: machineSpec(version), UpdateId: "u-1"}
		change(r)
		return func(ctx context.Context, h hostpb.HostServer) error { _, err := h.UpdateMachine(ctx, r); return err }
	}
	return []call{
		{"update without an id", update(func(r *hostpb.UpdateMachineRequest) { r.UpdateId = "" }), invalid, codes.InvalidArgument},
		{"update whose id is a path", update(func(r *hostpb.UpdateMachineRequest) { r.UpdateId = "../u" }), invalid, codes.InvalidArgument},
		{"update with too much data", update(func(r *hostpb.UpdateMachineRequest) { r.Data = make([]byte, 1<<20+1) }), invalid, codes.InvalidArgument},
		{"update without a spec", update(func(r *hostpb.UpdateMachineRequest) { r.Spec = nil }), invalid, codes.InvalidArgument},
		{"update of an unknown machine", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.Id = "m-9" }), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"update of a machine of another namespace", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"update by another management cluster", update(func(r *hostpb.UpdateMachineRequest) { r.ManagementCluster = "third" }), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
		{"update with another image", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.Image = "other" }), invalid, codes.InvalidArgument},
		{"update with another address", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.Addresses[0].Address = "10.1.0.12" }), invalid, codes.InvalidArgument},
		{"update with a smaller disk", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.DiskBytes = 1 << 30 }), invalid, codes.InvalidArgument},
		{"update to an older version", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.KubernetesVersion = "v1.2.3" }), invalid, codes.InvalidArgument},
		{"update to an unknown version", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.KubernetesVersion += "00" }), hostpb.Refusal_NOT_PROVIDED, codes.FailedPrecondition},
		{"update with too much memory", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.MemoryBytes = 1 << 40 }), hostpb.Refusal_OUT_OF_MEMORY, codes.ResourceExhausted},
		{"update with too many processors", update(func(r *hostpb.UpdateMachineRequest) { r.Spec.Cpus = 1 << 20 }), invalid, codes.InvalidArgument},
	}
}

// machineSpec returns the spec of the machine m-1.
func machineSpec(version string) *hostpb.MachineSpec {
	return &hostpb.MachineSpec{
		Id: "m-1", Namespace: "default", Name: "one", Cpus: 1, MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: version,
		Network:   &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"},
		Addresses: []*hostpb.Address{{Address: "10.1.0.10", Prefix: 24}},
	}
}

// streamCalls are those whose answers depend on no running machine.
func streamCalls() []call {
	logs := func(machine, service string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			return h.Logs(&hostpb.LogsRequest{Machine: machine, Service: service}, &logsStream{ctx: ctx})
		}
	}
	command := func(start *hostpb.ExecStart) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			return h.Exec(&execStream{ctx: ctx, first: &hostpb.ExecRequest{Content: &hostpb.ExecRequest_Start{Start: start}}})
		}
	}
	load := func(machine string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			return h.LoadImage(&imageStream{ctx: ctx, first: &hostpb.LoadImageRequest{Machine: machine}})
		}
	}
	return []call{
		{"logs of an unknown machine", logs("m-9", "kubelet"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"logs of a service that is a path", logs("m-1", "../kubelet"), invalid, codes.InvalidArgument},
		{"logs of no service", logs("m-1", ""), invalid, codes.InvalidArgument},
		{"command without a start", command(nil), invalid, codes.InvalidArgument},
		{"command in an unknown machine", command(&hostpb.ExecStart{Machine: "m-9"}), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"command in a machine that is a path", command(&hostpb.ExecStart{Machine: "../m-1"}), invalid, codes.InvalidArgument},
		{"command that is an option of runc", command(&hostpb.ExecStart{Machine: "m-1", Command: []string{"--tty"}}), invalid, codes.InvalidArgument},
		{"command with a strange terminal", command(&hostpb.ExecStart{Machine: "m-1", Term: "a=b c"}), invalid, codes.InvalidArgument},
		{"image for no machine", load(""), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"image for an unknown machine", load("m-9"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
	}
}

// logsStream is a client of Logs that ignores the log.
type logsStream struct {
	grpc.ServerStream

	ctx context.Context
}

func (s *logsStream) Context() context.Context    { return s.ctx }
func (s *logsStream) Send(*hostpb.LogChunk) error { return nil }

// execStream is a client of Exec that sends one message.
type execStream struct {
	grpc.ServerStream

	ctx   context.Context
	first *hostpb.ExecRequest
}

func (s *execStream) Context() context.Context           { return s.ctx }
func (s *execStream) Send(*hostpb.ExecResponse) error    { return nil }
func (s *execStream) Recv() (*hostpb.ExecRequest, error) { return s.first, nil }

// imageStream is a client of LoadImage that sends one message.
type imageStream struct {
	grpc.ServerStream

	ctx   context.Context
	first *hostpb.LoadImageRequest
}

func (s *imageStream) Context() context.Context                     { return s.ctx }
func (s *imageStream) SendAndClose(*hostpb.LoadImageResponse) error { return nil }

func (s *imageStream) Recv() (*hostpb.LoadImageRequest, error) {
	if s.first == nil {
		return nil, io.EOF
	}
	first := s.first
	s.first = nil
	return first, nil
}

func balancerCalls() []call {
	ensure := func(change func(*hostpb.LoadBalancer)) func(context.Context, hostpb.HostServer) error {
		lb := &hostpb.LoadBalancer{Id: "n-1", Namespace: "default", Name: "demo", NetworkId: "n-1", Listen: []string{":6443"}}
		change(lb)
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.EnsureLoadBalancer(ctx, lb)
			return err
		}
	}
	return []call{
		{"load balancer without an id", ensure(func(lb *hostpb.LoadBalancer) { lb.Id = "" }), invalid, codes.InvalidArgument},
		{"load balancer without an address", ensure(func(lb *hostpb.LoadBalancer) { lb.Listen = nil }), invalid, codes.InvalidArgument},
		{"load balancer without an owner", ensure(func(lb *hostpb.LoadBalancer) { lb.Name = "" }), invalid, codes.InvalidArgument},
		{"load balancer without a network", ensure(func(lb *hostpb.LoadBalancer) { lb.NetworkId = "n-9" }), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"load balancer", ensure(func(*hostpb.LoadBalancer) {}), success, codes.OK},
		{"load balancer again", ensure(func(*hostpb.LoadBalancer) {}), success, codes.OK},
		{"load balancer of another namespace", ensure(func(lb *hostpb.LoadBalancer) { lb.Namespace = "thief" }), hostpb.Refusal_ID_IN_USE, codes.AlreadyExists},
		{"load balancer with the name of another", ensure(func(lb *hostpb.LoadBalancer) { lb.Id = "n-2" }), hostpb.Refusal_NAME_IN_USE, codes.AlreadyExists},
	}
}

// deleteCalls delete the objects that the earlier calls created.
func deleteCalls(f Features) []call {
	machine := func(id, namespace string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: id, Namespace: namespace, Name: "one"})
			return err
		}
	}
	network := func(id, namespace string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: id, Namespace: namespace, Name: "demo"})
			return err
		}
	}
	balancer := func(id, namespace string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			_, err := h.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: id, Namespace: namespace, Name: "demo"})
			return err
		}
	}
	calls := []call{
		{"deletion of a network with a machine", network("n-1", "default"), hostpb.Refusal_NETWORK_IN_USE, codes.FailedPrecondition},
		{"deletion of a machine without an owner", machine("m-1", ""), invalid, codes.InvalidArgument},
		{"deletion of a machine whose id is a path", machine("../m", "default"), invalid, codes.InvalidArgument},
		{"deletion of a machine of another namespace", machine("m-1", "thief"), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
		{"deletion of a machine", machine("m-1", "default"), success, codes.OK},
		{"deletion of an unknown machine", machine("m-9", "default"), success, codes.OK},
		{"deletion of a load balancer whose id is a path", balancer("../n", "default"), invalid, codes.InvalidArgument},
		{"deletion of a load balancer without an owner", balancer("n-1", ""), invalid, codes.InvalidArgument},
		{"deletion of an unknown load balancer", balancer("n-9", "default"), success, codes.OK},
		{"deletion of a network whose id is a path", network("../n", "default"), invalid, codes.InvalidArgument},
		{"deletion of a network without an owner", network("n-1", ""), invalid, codes.InvalidArgument},
		{"deletion of a network of another namespace", network("n-1", "thief"), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
		{"deletion of an unknown network", network("n-9", "default"), success, codes.OK},
	}
	if f.LoadBalancers {
		calls = append(calls,
			call{"deletion of a network with a load balancer", network("n-1", "default"), hostpb.Refusal_NETWORK_IN_USE, codes.FailedPrecondition},
			call{"deletion of a load balancer of another namespace", balancer("n-1", "thief"), hostpb.Refusal_NOT_OWNER, codes.PermissionDenied},
			call{"deletion of a load balancer", balancer("n-1", "default"), success, codes.OK})
	}
	return append(calls, call{"deletion of a network", network("n-1", "default"), success, codes.OK})
}
