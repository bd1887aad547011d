package fakehost

import (
	"context"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
)

// update is the last update of a machine.
type update struct {
	from, to *hostpb.MachineSpec
	undone   bool
	data     []byte
}

// other returns the spec of the update that the machine does not have; nil without an update.
func (u *update) other() *hostpb.MachineSpec {
	switch {
	case u == nil:
		return nil
	case u.undone:
		return u.to
	}
	return u.from
}

// UpdateMachine implements hostpb.HostServer. An update succeeds at once, except while Hold is set.
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
	again, err := admission.Update(r, m, h.info)
	if err != nil || again {
		return proto.CloneOf(m), err
	}
	h.updates[m.Spec.Id] = &update{from: m.Spec, to: proto.CloneOf(r.Spec), data: r.Data}
	m.Spec = proto.CloneOf(r.Spec)
	m.Status.Update = &hostpb.UpdateStatus{Id: r.UpdateId, Phase: hostpb.UpdateStatus_PENDING, StartedAt: timestamppb.Now()}
	out := proto.CloneOf(m)
	h.account()
	h.send(hostpb.Event_CHANGED, m)
	if !h.hold {
		h.runUpdate(m)
	}
	return out, nil
}

// runUpdate carries out a pending update; h.mu is held.
func (h *Host) runUpdate(m *hostpb.Machine) {
	if m.Status.Update.GetPhase() != hostpb.UpdateStatus_PENDING {
		return
	}
	m.Status.Update.Phase = hostpb.UpdateStatus_RUNNING
	h.send(hostpb.Event_CHANGED, m)
	h.endUpdate(m, hostpb.UpdateStatus_SUCCEEDED, "")
}

// endUpdate ends an update; h.mu is held.
func (h *Host) endUpdate(m *hostpb.Machine, phase hostpb.UpdateStatus_Phase, message string) {
	m.Status.Update.Phase, m.Status.Update.Message, m.Status.Update.CompletedAt = phase, message, timestamppb.Now()
	if u := h.updates[m.Spec.Id]; phase != hostpb.UpdateStatus_SUCCEEDED {
		m.Spec, u.undone = admission.Undone(u.from, u.to), true
		h.account()
	}
	h.send(hostpb.Event_CHANGED, m)
}

// EndUpdate ends the update of a machine that Hold has kept, as a real machine would. After any other phase than SUCCEEDED the
// machine has its previous spec again.
func (h *Host) EndUpdate(id string, phase hostpb.UpdateStatus_Phase, message string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[id]; m != nil && !admission.Ended(m.Status.Update) {
		h.endUpdate(m, phase, message)
	}
}

// UpdateData returns the data of a machine's last update, or nil.
func (h *Host) UpdateData(id string) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if u := h.updates[id]; u != nil {
		return u.data
	}
	return nil
}
