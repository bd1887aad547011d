package host

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// onBox returns a capstand on a box without networks. Its host has memory and an image for machines.
func onBox(t *testing.T) *Host {
	t.Helper()
	h := recorded(t)
	clear(h.networks.byID)
	clear(h.machines.byID)
	clear(h.balancers.byID)
	h.ctx, h.id, h.capacity = t.Context(), "h", 8<<30
	h.config = Config{Root: h.store.root, Assets: t.TempDir(), RunDir: t.TempDir()}
	h.box = network.Box{Dir: h.config.RunDir, HostID: h.id, HostRoot: h.config.Root}
	kubelet := filepath.Join(h.config.Assets, "kubernetes", goodSpec().KubernetesVersion, "kubelet")
	if err := os.MkdirAll(filepath.Dir(kubelet), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, kubelet, "")
	return h
}

// recordOnly admits and records the machine of goodSpec, in a network that is not made. meanwhile happens in between.
func recordOnly(t *testing.T, h *Host, meanwhile func()) error {
	t.Helper()
	spec := goodSpec()
	leases := filepath.Join(h.config.RunDir, "networks", strings.TrimPrefix(network.BridgeName(spec.Network.Id), "cap"), "leases")
	expect.NoError(t, os.MkdirAll(leases, 0o700))
	expect.NoError(t, h.machines.admit(spec))
	meanwhile()
	return h.machines.record(&hostpb.EnsureMachineRequest{Spec: spec})
}

// unrecordable makes the record of an object fail, as a full disk does, until end is called.
func unrecordable(t *testing.T, h *Host, kind, id string) (end func()) {
	t.Helper()
	in := h.store.path(kind, id, "in-the-way")
	if err := os.MkdirAll(in, 0o700); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.RemoveAll(filepath.Dir(in)); err != nil {
			t.Fatal(err)
		}
	}
}

func leases(t *testing.T, h *Host) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(h.config.RunDir, "networks", "*", "leases", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func networksOf(t *testing.T, h *Host) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(h.config.RunDir, "networks", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// A failed record leaves no lease, network or data. Another machine can get the address at once.
func TestNotRecorded(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, spec := onBox(t), goodSpec()
	ensure := func(spec *hostpb.MachineSpec) error {
		_, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: []byte("secret")})
		return err
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.EnsureNetwork(gone, spec.Network); err == nil || len(networksOf(t, h)) > 0 {
		t.Errorf("for a caller that does not wait any more: %v, %v", err, networksOf(t, h))
	}
	end := unrecordable(t, h, networksDir, spec.Network.Id)
	if err := ensure(spec); err == nil || len(networksOf(t, h)) > 0 {
		t.Errorf("without a record of its network: %v, %v", err, networksOf(t, h))
	}
	end()
	end = unrecordable(t, h, machinesDir, spec.Id)
	if err := ensure(spec); err == nil || len(networksOf(t, h)) > 0 || len(h.networks.byID) > 0 {
		t.Errorf("the first machine: %v, %v, %v", err, networksOf(t, h), h.networks.byID)
	}
	if _, err := h.EnsureNetwork(t.Context(), spec.Network); err != nil {
		t.Fatal(err)
	}
	restoresNetwork(t, h, spec.Network)
	if err := ensure(spec); err == nil || len(leases(t, h)) > 0 {
		t.Errorf("a machine: %v, %v", err, leases(t, h))
	}
	if left, err := os.ReadDir(h.store.path(newDir)); err != nil || len(left) > 0 {
		t.Errorf("its data still exists: %v, %v", left, err)
	}
	end()

	balancer := goodBalancer()
	balancer.Listen = []string{"10.1.0.200:6443"}
	end = unrecordable(t, h, balancersDir, balancer.Id)
	if _, err := h.EnsureLoadBalancer(t.Context(), balancer); err == nil || len(leases(t, h)) > 0 {
		t.Errorf("a load balancer: %v, %v", err, leases(t, h))
	}
	end()
}

// restoresNetwork checks that a network whose record was lost, and could not be written again at the start, gets its record later and stays
// until then.
func restoresNetwork(t *testing.T, h *Host, n *hostpb.Network) {
	t.Helper()
	if err := os.RemoveAll(h.store.path(networksDir, n.Id)); err != nil {
		t.Fatal(err)
	}
	end := unrecordable(t, h, networksDir, n.Id)
	if _, err := h.EnsureNetwork(t.Context(), n); err == nil || len(networksOf(t, h)) != 1 {
		t.Errorf("without a new record: %v, %v", err, networksOf(t, h))
	}
	end()
	if _, err := h.EnsureNetwork(t.Context(), n); err != nil || !atomicfile.Exists(specFile(h.store.path(networksDir, n.Id))) {
		t.Errorf("the record was not written again: %v", err)
	}
}

// The deletion of a machine without a record releases its lease and no other lease.
func TestLeaseOfUnknownMachine(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	h, spec := onBox(t), goodSpec()
	if _, err := h.EnsureNetwork(t.Context(), spec.Network); err != nil {
		t.Fatal(err)
	}
	other := proto.CloneOf(spec)
	other.Id, other.Addresses[0].Address = "m-2", "10.1.0.11"
	for _, s := range []*hostpb.MachineSpec{spec, other} {
		if err := h.lease(s); err != nil {
			t.Fatal(err)
		}
	}
	res, err := h.DeleteMachine(t.Context(), &hostpb.DeleteMachineRequest{Id: spec.Id, Namespace: spec.Namespace, Name: spec.Name})
	if left := leases(t, h); err != nil || !res.Done || len(left) != 1 || filepath.Base(left[0]) != "10.1.0.11" {
		t.Errorf("%v, %v; left %v", res, err, left)
	}
}
