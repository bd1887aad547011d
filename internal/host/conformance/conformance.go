// Package conformance tests that an implementation of the host service follows the admission rules that its clients
// rely on: the same gRPC code and the same reason for each refused call. capstand, the hollow host and the fake host of
// the tests run it. It is imported by tests only.
//
// Layer: test.
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

// Test makes calls to a host without objects, which has memory for two machines of 1 GiB and less than 1 TiB.
func Test(t *testing.T, h hostpb.HostServer, f Features) {
	t.Helper()
	calls := slices.Concat(networkCalls(), machineCalls(f.Version), claimCalls(), streamCalls())
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

func machineCalls(version string) []call {
	spec := &hostpb.MachineSpec{
		Id: "m-1", Namespace: "default", Name: "one", Cpus: 1, MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: version,
		Network:   &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"},
		Addresses: []*hostpb.Address{{Address: "10.1.0.10", Prefix: 24}},
	}
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

// streamCalls are those whose answers depend on no running machine.
func streamCalls() []call {
	logs := func(machine, service string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			return h.Logs(&hostpb.LogsRequest{Machine: machine, Service: service}, &logsStream{ctx: ctx})
		}
	}
	load := func(machines ...string) func(context.Context, hostpb.HostServer) error {
		return func(ctx context.Context, h hostpb.HostServer) error {
			return h.LoadImage(&imageStream{ctx: ctx, first: &hostpb.LoadImageRequest{Machines: machines}})
		}
	}
	return []call{
		{"logs of an unknown machine", logs("m-9", "kubelet"), hostpb.Refusal_NOT_FOUND, codes.NotFound},
		{"logs of a service that is a path", logs("m-1", "../kubelet"), invalid, codes.InvalidArgument},
		{"logs of no service", logs("m-1", ""), invalid, codes.InvalidArgument},
		{"image for no machine", load(), invalid, codes.InvalidArgument},
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
