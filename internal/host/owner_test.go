package host

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
)

func goodSpec() *hostpb.MachineSpec {
	return &hostpb.MachineSpec{
		Id: "m-1", Namespace: "default", Name: "one", Cpus: 1, MemoryBytes: 1 << 30, Image: admission.HostImage, KubernetesVersion: "v1.36.3",
		Network:   &hostpb.Network{Id: "n-1", Namespace: "default", Name: "demo", Cidr: "10.1.0.0/24"},
		Addresses: []*hostpb.Address{{Address: "10.1.0.10", Prefix: 24}},
	}
}

// recorded returns a capstand with records of a machine, its network and a load balancer. It does not run them.
func recorded(t *testing.T) *Host {
	t.Helper()
	h := newHost(&platform{log: slog.New(slog.DiscardHandler), store: store{t.TempDir()}, broadcaster: events.New(), ctx: t.Context()})
	if _, err := h.store.open(); err != nil {
		t.Fatal(err)
	}
	unmountAfter(t, h.store)
	spec := goodSpec()
	h.networks.byID[spec.Network.Id] = spec.Network
	h.machines.add(spec)
	h.balancers.add(goodBalancer(), []string{"10.1.0.1:6443"})
	return h
}

func goodBalancer() *hostpb.LoadBalancer {
	return &hostpb.LoadBalancer{Id: "n-1", Namespace: "default", Name: "demo", NetworkId: "n-1", Listen: []string{":6443"}}
}

// ALL-18: ids are public, and a copy of an object has the same id. A request with the id of another owner's object finds,
// changes and removes nothing, and the error names the owner.
func TestIDOfAnother_ALL18(t *testing.T) {
	ctx, h := context.Background(), recorded(t)
	stranger := goodSpec()
	stranger.Namespace, stranger.Network.Namespace = "thief", "thief"
	renamed := goodSpec()
	renamed.Name = "other"
	guest := proto.CloneOf(stranger)
	guest.Id, guest.Addresses[0].Address = "m-2", "10.1.0.11"
	balancer := goodBalancer()
	balancer.Namespace = "thief"

	for name, test := range map[string]struct {
		call func() error
		code codes.Code
		says string
	}{
		"machine": {func() error {
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: stranger})
			return err
		}, codes.AlreadyExists, "default/one"},
		"renamed machine": {func() error {
			_, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: renamed})
			return err
		}, codes.AlreadyExists, "default/one"},
		"network":              {func() error { _, err := h.EnsureNetwork(ctx, stranger.Network); return err }, codes.AlreadyExists, "default/demo"},
		"network of a machine": {func() error { return h.networks.ensure(ctx, guest.Network, true) }, codes.AlreadyExists, "default/demo"},
		"load balancer":        {func() error { _, err := h.EnsureLoadBalancer(ctx, balancer); return err }, codes.AlreadyExists, "default/demo"},
		"delete machine": {func() error {
			_, err := h.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: "m-1", Namespace: "thief", Name: "one"})
			return err
		}, codes.PermissionDenied, "default/one"},
		"delete network": {func() error {
			_, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "n-1", Namespace: "default", Name: "other"})
			return err
		}, codes.PermissionDenied, "default/demo"},
		"delete load balancer": {func() error {
			_, err := h.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: "n-1", Namespace: "thief", Name: "demo"})
			return err
		}, codes.PermissionDenied, "default/demo"},
		"delete machine, old client": {func() error {
			_, err := h.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: "m-1"})
			return err
		}, codes.InvalidArgument, "upgrade"},
		"delete network, old client": {func() error {
			_, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "n-1"})
			return err
		}, codes.InvalidArgument, "upgrade"},
		"delete load balancer, old client": {func() error {
			_, err := h.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: "n-1"})
			return err
		}, codes.InvalidArgument, "upgrade"},
	} {
		if err := test.call(); status.Code(err) != test.code || !strings.Contains(status.Convert(err).Message(), test.says) {
			t.Errorf("%s: %v, want %s with %q", name, err, test.code, test.says)
		}
	}
	if atomicfile.Exists(h.store.path(tombstonesDir, machineTombstone("m-1"))) || h.machines.byID["m-1"].deleted.Err() != nil || h.balancers.byID["n-1"].deleted.Err() != nil {
		t.Error("a refused deletion began")
	}
	if _, err := h.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{Spec: goodSpec()}); err != nil {
		t.Errorf("the machine of the caller: %v", err)
	}
}

// The management cluster of a machine is recorded and survives a restart of capstand.
func TestClaim(t *testing.T) {
	ctx, h := context.Background(), recorded(t)
	onDisk(t, h)
	m := h.machines.byID["m-1"]
	claim := &hostpb.ClaimMachineRequest{Id: m.spec.Id, Namespace: m.spec.Namespace, Name: m.spec.Name, ManagementCluster: "one"}
	if got, err := h.ClaimMachine(ctx, claim); err != nil || got.GetStatus().GetManagementCluster() != "one" {
		t.Errorf("%v, %v", got, err)
	}
	if again := newMachine(h.platform, m.spec, h.machines.forget); again.snapshot().GetStatus().GetManagementCluster() != "one" {
		t.Errorf("after a restart: %v", again.snapshot())
	}
	claim.Namespace, claim.ManagementCluster = "thief", "two"
	if _, err := h.ClaimMachine(ctx, claim); status.Code(err) != codes.AlreadyExists || m.snapshot().GetStatus().GetManagementCluster() != "one" {
		t.Errorf("a copy: %v, %v", err, m.snapshot())
	}
	made := goodSpec()
	made.Id = "m-2"
	files, err := firstFiles(&hostpb.EnsureMachineRequest{ManagementCluster: "three"}, nil)
	if err := errors.Join(err, h.store.create(machinesDir, made.Id, made, files)); err != nil {
		t.Fatal(err)
	}
	if got := newMachine(h.platform, made, h.machines.forget).snapshot(); got.GetStatus().GetManagementCluster() != "three" {
		t.Errorf("a new machine: %v", got)
	}
}
