package host

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/updaterecord"
	"capstan.dev/capstan/internal/machineapi"
)

// loadUpdate returns the last update of the machine whose folder is dir, or nil if it was never updated.
func loadUpdate(dir string) (*updaterecord.Record, error) {
	u, err := updaterecord.Load(dir)
	if u == nil || err != nil {
		return nil, err
	}
	// Rules for new machines can be stricter than those under which this one was made.
	id := filepath.Base(dir)
	return u, errors.Join(checkRecord(id, u.From), checkRecord(id, u.To))
}

// UpdateMachine records the running and the desired spec of a machine, and updates it in the background.
func (ms *machines) UpdateMachine(_ context.Context, req *hostpb.UpdateMachineRequest) (*hostpb.Machine, error) {
	if err := admission.CheckUpdate(req); err != nil {
		return nil, err
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	m := ms.byID[req.Spec.Id]
	if m == nil {
		return nil, admission.NoMachine(req.Spec.Id)
	}
	if m.broken != "" {
		return nil, refusal.Errorf(hostpb.Refusal_DAMAGED, "machine %s: %s", m.spec.Id, m.broken)
	}
	have := m.snapshot()
	again, err := admission.Update(req, have, ms.info())
	if err != nil || again {
		return have, err
	}
	if err := ms.canGrow(m, req.Spec, admission.DiskBytes(req.Spec)-admission.DiskBytes(have.Spec)); err != nil {
		return nil, err
	}
	if err := m.beginUpdate(req); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the update of machine %s: %v", m.spec.Id, err)
	}
	m.log.Info("Update recorded", "update", req.UpdateId, "version", req.Spec.KubernetesVersion, "cpus", req.Spec.Cpus, "memoryMiB", req.Spec.MemoryBytes>>20,
		"diskMiB", admission.DiskBytes(req.Spec)>>20)
	ms.broadcaster.Publish(events.Host(ms.info()))
	return m.snapshot(), nil
}

// canGrow refuses the growth of a disk that cannot grow in place (UNSUPPORTED), or that the host cannot reserve (NO_DISK_SPACE); mu is held.
func (ms *machines) canGrow(m *machine, spec *hostpb.MachineSpec, growth int64) error {
	if growth <= 0 {
		return nil
	}
	if !m.disk().Exists() {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "machine %s/%s has no disk of its own, so its disk cannot grow; replace the machine", m.spec.Namespace, m.spec.Name)
	}
	if !slices.Contains(ms.capabilities, "CAP_SYS_RESOURCE") {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "capstand on this host does not have CAP_SYS_RESOURCE, so it cannot enlarge the disk of the running machine %s/%s; replace the machine",
			m.spec.Namespace, m.spec.Name)
	}
	if !ms.preallocates() {
		return nil
	}
	return ms.spaceFor(spec, growth)
}

// beginUpdate records the update with its data. The record comes last: data without a record is replaced by the next update.
func (m *machine) beginUpdate(req *hostpb.UpdateMachineRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := atomicfile.WriteFile(m.updateData(), req.Data, 0o600); err != nil {
		return err
	}
	u := &updaterecord.Record{
		ID: req.UpdateId, From: proto.CloneOf(m.current.Load()), To: proto.CloneOf(req.Spec), Phase: hostpb.UpdateStatus_PENDING, StartedAt: time.Now(),
	}
	if err := u.Save(m.dir); err != nil {
		return err
	}
	m.setUpdate(u)
	m.updates.Send()
	return nil
}

func (m *machine) updateData() string { return filepath.Join(m.dir, "update-data") }

// setUpdate makes u the machine's update and publishes it; m.mu is held.
func (m *machine) setUpdate(u *updaterecord.Record) {
	m.update = u
	m.current.Store(u.Spec())
	m.publish(func(s *hostpb.MachineStatus) { s.Update = u.Status() })
}

// lastUpdate returns a copy of the record of the last update, or nil.
func (m *machine) lastUpdate() *updaterecord.Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.update == nil {
		return nil
	}
	u := *m.update
	return &u
}

// reservedMemory returns the memory that the machine may use, in bytes. While an update runs, it is the larger limit.
func (m *machine) reservedMemory() int64 {
	u, memory := m.lastUpdate(), m.current.Load().MemoryBytes
	if u.Ended() {
		return memory
	}
	return max(memory, u.From.MemoryBytes, u.To.MemoryBytes)
}

// eraseUpdateData removes both copies of the data, and the request to the machine.
func (m *machine) eraseUpdateData() {
	for _, path := range []string{m.updateData(), filepath.Join(m.runDir(), machineapi.UpdateRequestFile), filepath.Join(m.runDir(), machineapi.UpdateDataFile)} {
		if err := atomicfile.Remove(path); err != nil {
			m.log.Error("Cannot erase the data of the update", "error", err)
		}
	}
}
