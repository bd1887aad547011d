package hollow

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/node/kube"
)

// otherFile contains the spec of the last update that the machine does not have: the previous one, or the desired one of an
// update that was rolled back.
const otherFile = "other.json"

// UpdateMachine implements hostpb.HostServer. Nothing runs in the machine, so only its record and its Node change.
func (h *Host) UpdateMachine(_ context.Context, r *hostpb.UpdateMachineRequest) (*hostpb.Machine, error) {
	if err := admission.CheckUpdate(r); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[r.GetSpec().GetId()]
	if m == nil {
		return nil, admission.NoMachine(r.GetSpec().GetId())
	}
	have := m.snapshot()
	again, err := admission.Update(r, have, h.info())
	if err != nil || again {
		return have, err
	}
	if err := m.recordOther(have.GetSpec()); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the update: %v", err)
	}
	h.used += r.Spec.MemoryBytes - have.Spec.MemoryBytes
	m.change(func(next *hostpb.Machine) {
		next.Spec = proto.CloneOf(r.Spec)
		next.Status.Update = &hostpb.UpdateStatus{Id: r.UpdateId, Phase: hostpb.UpdateStatus_PENDING, StartedAt: timestamppb.Now()}
	})
	h.broadcaster.Publish(events.Host(h.info()))
	h.running.Go(m.runUpdate)
	return m.snapshot(), nil
}

// runUpdate ends the update after a delay. After a restart of the host it starts again.
func (m *machine) runUpdate() {
	b := m.host.config.Behaviour
	m.update(func(s *hostpb.MachineStatus) { s.Update.Phase = hostpb.UpdateStatus_RUNNING })
	if !m.sleep(b.UpdateDelay) {
		return
	}
	if rand.Float64() < b.FailUpdate {
		m.undoUpdate()
		return
	}
	if client := m.cluster(); client != nil {
		err := kube.Retry(m.ctx, "updating the node", func(ctx context.Context) error { return register(ctx, client, nodeOf(m.spec(), nil)) })
		if err != nil {
			return // The machine was deleted, or the host stops.
		}
	}
	m.update(func(s *hostpb.MachineStatus) {
		s.Update.Phase, s.Update.CompletedAt = hostpb.UpdateStatus_SUCCEEDED, timestamppb.Now()
	})
}

// undoUpdate gives the machine its previous spec again.
func (m *machine) undoUpdate() {
	h, from, to := m.host, m.otherSpec(), m.spec()
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := m.recordOther(to); err != nil {
		h.log.Error("Cannot record the end of an update", "machine", to.GetName(), "error", err)
	}
	h.used += from.GetMemoryBytes() - to.GetMemoryBytes()
	m.change(func(next *hostpb.Machine) {
		next.Spec = admission.Undone(from, to)
		u := next.Status.Update
		u.Phase, u.Message, u.CompletedAt = hostpb.UpdateStatus_ROLLED_BACK, "the update failed, because --fail-update is set", timestamppb.Now()
	})
	h.broadcaster.Publish(events.Host(h.info()))
}

func (m *machine) recordOther(spec *hostpb.MachineSpec) error {
	data, err := protojson.Marshal(spec)
	if err != nil {
		return err
	}
	return write(filepath.Join(m.host.store.dir(spec.GetId()), otherFile), data)
}

// otherSpec returns the recorded spec, or nil if the machine was never updated.
func (m *machine) otherSpec() *hostpb.MachineSpec {
	data, err := os.ReadFile(filepath.Join(m.host.store.dir(m.spec().GetId()), otherFile))
	spec := &hostpb.MachineSpec{}
	if err == nil {
		err = protojson.Unmarshal(data, spec)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.host.log.Error("Cannot read the other spec of a machine", "error", err)
		}
		return nil
	}
	return spec
}
