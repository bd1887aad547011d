package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

var damages = map[string]string{"truncated": `{"id": "m-`, "garbage": "\x00\xff\x07", "empty": "", "wrong type": `["m-1"]`, "no fields": "{}"}

// reloaded returns a capstand that starts with the state of another one.
func reloaded(t *testing.T, h *Host) *Host {
	t.Helper()
	again := newHost(&platform{
		log: h.log, store: h.store, broadcaster: h.broadcaster, ctx: t.Context(), id: h.id, config: h.config, capacity: h.capacity, box: h.box, contacts: h.contacts,
		runc: runc.Runc{Root: h.store.path("runc")},
	})
	if err := again.loadAll(); err != nil {
		t.Fatal(err)
	}
	return again
}

// A damaged record leaves a failed machine that only its owner can delete, with its addresses and its network.
func TestDamagedRecords(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, spec := onBox(t), goodSpec()
	if err := h.store.create(balancersDir, spec.Network.Id, goodBalancer(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := h.EnsureNetwork(t.Context(), spec.Network); err != nil {
		t.Fatal(err)
	}
	if err := h.machines.record(&hostpb.EnsureMachineRequest{Spec: spec}); err != nil {
		t.Fatal(err)
	}
	for name, text := range damages {
		write(t, h.store.path(machinesDir, spec.Id, "spec.json"), text)
		write(t, h.store.path(networksDir, spec.Network.Id, "spec.json"), text)
		write(t, h.store.path(balancersDir, spec.Network.Id, "spec.json"), text)
		again := reloaded(t, h)
		m := again.machines.byID[spec.Id]
		if m == nil {
			t.Fatalf("%s: the machine is missing", name)
		}
		if run, pause := m.toRun(); run || pause != forever || m.status.Phase != hostpb.MachineStatus_FAILED || !strings.Contains(m.status.Message, "spec.json") {
			t.Errorf("%s: run %v, %v", name, run, m.status)
		}
		if m.spec.Namespace != spec.Namespace || m.spec.Name != spec.Name || m.spec.Network.Id != spec.Network.Id {
			t.Errorf("%s: the owner of the machine is lost: %v", name, m.spec)
		}
		if n := again.networks.byID[spec.Network.Id]; n == nil || n.Cidr != spec.Network.Cidr || n.Name != spec.Network.Name {
			t.Errorf("%s: the network is %v", name, n)
		}
		if lb := again.balancers.byID[spec.Network.Id]; lb == nil || lb.spec.Name != goodBalancer().Name || lb.snapshot().Message == "" {
			t.Errorf("%s: the load balancer is %v", name, lb)
		}
		thief := &hostpb.DeleteMachineRequest{Id: spec.Id, Namespace: "thief", Name: spec.Name}
		if _, err := again.DeleteMachine(t.Context(), thief); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: deletion by another owner: %v", name, err)
		}
		if _, err := again.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec}); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: the machine is created again: %v", name, err)
		}
	}
}

// A load balancer whose network has no readable record can be deleted, and described again when its owner has created the network.
func TestBalancerWithoutNetwork(t *testing.T) {
	h, spec := onBox(t), goodBalancer()
	if err := errors.Join(h.store.create(networksDir, spec.NetworkId, goodSpec().Network, nil), h.store.create(balancersDir, spec.Id, spec, nil)); err != nil {
		t.Fatal(err)
	}
	write(t, h.store.path(networksDir, spec.NetworkId, "spec.json"), damages["truncated"])
	again := reloaded(t, h)
	lb := again.balancers.byID[spec.Id]
	if lb == nil || lb.described == nil || lb.snapshot().Message == "" {
		t.Fatalf("the load balancer is %v", lb)
	}
	described := lb.described
	again.networks.byID[spec.NetworkId] = goodSpec().Network
	if _, err := again.EnsureLoadBalancer(t.Context(), spec); err != nil || !proto.Equal(lb.currentSpec(), spec) {
		t.Errorf("described again: %v, %v", lb.currentSpec(), err)
	}
	select {
	case <-described:
	default:
		t.Error("a load balancer that is described again does not run")
	}

	again = reloaded(t, h) // The record of the network was discarded.
	lb = again.balancers.byID[spec.Id]
	again.running.Go(func() { lb.runWhenDescribed(t.Context(), lb.described) })
	_, err := again.DeleteLoadBalancer(t.Context(), &hostpb.DeleteLoadBalancerRequest{Id: spec.Id, Namespace: spec.Namespace, Name: spec.Name})
	again.Wait()
	if err != nil || atomicfile.Exists(h.store.path(balancersDir, spec.Id)) {
		t.Errorf("the load balancer is not removed: %v", err)
	}
}

// A capstand that cannot read the state of a machine does not overwrite it.
func TestDamagedState(t *testing.T) {
	h := recorded(t)
	state := filepath.Join(onDisk(t, h).dir, "state.json")
	for _, name := range []string{"truncated", "garbage", "empty", "wrong type"} {
		write(t, state, damages[name])
		m := onDisk(t, h)
		m.died()
		if err := m.startAgain(); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: the machine is started: %v", name, err)
		}
		if run, _ := m.toRun(); run || read(t, state) != damages[name] {
			t.Errorf("%s: run %v, state %q", name, run, read(t, state))
		}
	}
}

// A machine that runs without a record is a failed machine, too.
func TestStrangers(t *testing.T) {
	h := recorded(t)
	h.ctx, h.box = t.Context(), network.Box{Dir: t.TempDir()}
	h.runc = runc.Runc{Root: h.store.path("runc"), Binary: "/bin/false"}
	for _, id := range []string{"stranger", goodSpec().Id} {
		if err := os.MkdirAll(filepath.Join(h.runc.Root, id), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	known := h.machines.byID[goodSpec().Id]
	h.machines.loadUnreadable(nil)
	m := h.machines.byID["stranger"]
	if m == nil || m.broken == "" || m.spec.Namespace != nobody || h.machines.byID[known.spec.Id] != known {
		t.Errorf("machines: %v", h.machines.byID)
	}
}

// Without its id, a host would create its machines and networks a second time.
func TestDamagedHostID(t *testing.T) {
	s := newStore(t)
	for _, text := range []string{"", "\n", "\x00\x01"} {
		write(t, s.path("host-id"), text)
		if id, err := s.open(); err == nil || !strings.Contains(err.Error(), "host-id is damaged") {
			t.Errorf("%q: id %q, %v", text, id, err)
		}
	}
}
