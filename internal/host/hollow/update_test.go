package hollow

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
)

// bootedHost returns a hollow host whose machine one is bootstrapped.
func bootedHost(t *testing.T, root string, b Behaviour) (h *Host, stop func(), spec *hostpb.MachineSpec) {
	t.Helper()
	h, stop = start(t, root, b)
	r := request("1", "one")
	if _, err := h.EnsureMachine(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	// The machine writes its start concurrently, which would overwrite the success of the bootstrap.
	await(t, h, "the machine starts", func(s *hostpb.MachineStatus) bool { return s.Bootstrap == hostpb.MachineStatus_STARTED })
	h.machines["1"].bootstrapped()
	return h, stop, r.Spec
}

func awaitUpdate(t *testing.T, h *Host, phase hostpb.UpdateStatus_Phase) *hostpb.Machine {
	t.Helper()
	return await(t, h, "the update is "+phase.String(), func(s *hostpb.MachineStatus) bool { return s.Update.GetPhase() == phase })
}

// await waits until the status of machine one is as expected.
func await(t *testing.T, h *Host, what string, expected func(*hostpb.MachineStatus) bool) *hostpb.Machine {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		m, err := h.GetMachine(t.Context(), &hostpb.GetMachineRequest{Id: "1"})
		if err != nil {
			t.Fatal(err)
		}
		if expected(m.Status) {
			return m
		}
		if time.Now().After(deadline) {
			t.Fatalf("want: %s, got %v", what, m.Status)
		}
	}
}

// An update survives the end of the host, and a client with either spec is accepted.
func TestUpdateContinues(t *testing.T) {
	root := t.TempDir()
	h, stop, before := bootedHost(t, root, Behaviour{UpdateDelay: time.Hour})
	after := proto.CloneOf(before)
	after.MemoryBytes = 2 << 30
	update := &hostpb.UpdateMachineRequest{Spec: after, UpdateId: "u"}
	for range 2 {
		if m, err := h.UpdateMachine(t.Context(), update); err != nil || m.Spec.MemoryBytes != after.MemoryBytes {
			t.Fatalf("%v, %v", m, err)
		}
	}
	awaitUpdate(t, h, hostpb.UpdateStatus_RUNNING)
	stop()
	h, _ = start(t, root, Behaviour{})
	m := awaitUpdate(t, h, hostpb.UpdateStatus_SUCCEEDED)
	if m.Spec.MemoryBytes != after.MemoryBytes || m.Status.Update.CompletedAt == nil {
		t.Errorf("the updated machine: %v", m)
	}
	for _, spec := range []*hostpb.MachineSpec{before, after} {
		if _, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec}); err != nil {
			t.Error(err)
		}
	}
	if info, _ := h.GetInfo(t.Context(), nil); info.AllocatedMemoryBytes != after.MemoryBytes {
		t.Errorf("%d bytes are allocated", info.AllocatedMemoryBytes)
	}
}

func TestUpdateRollsBack(t *testing.T) {
	h, _, before := bootedHost(t, t.TempDir(), Behaviour{FailUpdate: 1})
	after := proto.CloneOf(before)
	after.MemoryBytes = 2 << 30
	if _, err := h.UpdateMachine(t.Context(), &hostpb.UpdateMachineRequest{Spec: after, UpdateId: "u"}); err != nil {
		t.Fatal(err)
	}
	if m := awaitUpdate(t, h, hostpb.UpdateStatus_ROLLED_BACK); m.Spec.MemoryBytes != before.MemoryBytes || m.Status.Update.Message == "" {
		t.Errorf("the machine after a rollback: %v", m)
	}
	if info, _ := h.GetInfo(t.Context(), nil); info.AllocatedMemoryBytes != before.MemoryBytes {
		t.Errorf("%d bytes are allocated", info.AllocatedMemoryBytes)
	}
	if _, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: after}); err != nil {
		t.Error(err)
	}
}
