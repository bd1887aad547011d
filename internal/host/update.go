package host

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/machineapi"
)

// updateRecordFile is the file with the last update in the folder of a machine's state.
const updateRecordFile = "update.json"

// updateRecord is the last update of a machine. It contains both specs, so that capstand can continue the update
// or undo it from any step.
type updateRecord struct {
	ID      string                    `json:"id"`
	From    *hostpb.MachineSpec       `json:"-"`
	To      *hostpb.MachineSpec       `json:"-"`
	Phase   hostpb.UpdateStatus_Phase `json:"phase"`
	Step    string                    `json:"step,omitempty"`
	Message string                    `json:"message,omitempty"`
	// RollingBack is true when capstan-init undoes the update: from then on, the machine has its previous limits.
	RollingBack bool `json:"rollingBack,omitempty"`
	// Grown is true when the disk has its new size. It keeps that size if the update is undone.
	Grown     bool      `json:"grown,omitempty"`
	StartedAt time.Time `json:"startedAt"`
	// CompletedAt is the time of the result.
	CompletedAt time.Time `json:"completedAt,omitzero"`
}

// updateFile is the form of updateRecord on disk.
type updateFile struct {
	updateRecord

	From json.RawMessage `json:"from"`
	To   json.RawMessage `json:"to"`
}

func (u *updateRecord) save(dir string) error {
	from, err := protojson.Marshal(u.From)
	if err != nil {
		return err
	}
	to, err := protojson.Marshal(u.To)
	if err != nil {
		return err
	}
	return atomicfile.WriteJSON(filepath.Join(dir, updateRecordFile), updateFile{*u, from, to}, 0o600)
}

// loadUpdate returns the last update of the machine whose folder is dir, or nil if it was never updated.
func loadUpdate(dir string) (*updateRecord, error) {
	var file updateFile
	err := atomicfile.ReadJSON(filepath.Join(dir, updateRecordFile), &file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	u := file.updateRecord
	u.From, u.To = &hostpb.MachineSpec{}, &hostpb.MachineSpec{}
	lenient := protojson.UnmarshalOptions{DiscardUnknown: true}
	if err == nil {
		err = errors.Join(lenient.Unmarshal(file.From, u.From), lenient.Unmarshal(file.To, u.To))
	}
	if err == nil {
		err = errors.Join(admission.CheckMachine(u.From), admission.CheckMachine(u.To))
	}
	return &u, err
}

func (u *updateRecord) ended() bool { return u == nil || admission.Ended(u.status()) }

// undone returns whether the machine has its previous spec.
func (u *updateRecord) undone() bool {
	return u.RollingBack || u.ended() && u.Phase != hostpb.UpdateStatus_SUCCEEDED
}

// spec returns the spec of the machine: the desired one, unless the update is or was undone.
func (u *updateRecord) spec() *hostpb.MachineSpec {
	switch {
	case !u.undone():
		return u.To
	case u.Grown:
		return admission.Undone(u.From, u.To)
	}
	return u.From
}

// other returns the other spec of the update, which clients with an older cache may still have.
func (u *updateRecord) other() *hostpb.MachineSpec {
	switch {
	case u == nil:
		return nil
	case u.undone():
		return u.To
	}
	return u.From
}

func (u *updateRecord) status() *hostpb.UpdateStatus {
	if u == nil {
		return nil
	}
	s := &hostpb.UpdateStatus{Id: u.ID, Phase: u.Phase, Step: u.Step, Message: u.Message, StartedAt: timestamppb.New(u.StartedAt)}
	if !u.CompletedAt.IsZero() {
		s.CompletedAt = timestamppb.New(u.CompletedAt)
	}
	return s
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
	if admission.DiskBytes(req.Spec) > admission.DiskBytes(have.Spec) {
		if err := m.canGrow(); err != nil {
			return nil, err
		}
	}
	if err := m.beginUpdate(req); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the update of machine %s: %v", m.spec.Id, err)
	}
	m.log.Info("Update recorded", "update", req.UpdateId, "version", req.Spec.KubernetesVersion, "cpus", req.Spec.Cpus, "memoryMiB", req.Spec.MemoryBytes>>20,
		"diskMiB", admission.DiskBytes(req.Spec)>>20)
	ms.broadcaster.Publish(events.Host(ms.info()))
	return m.snapshot(), nil
}

// canGrow refuses the growth of a disk that cannot grow in place (UNSUPPORTED).
func (m *machine) canGrow() error {
	if !m.disk().Exists() {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "machine %s/%s has no disk of its own, so its disk cannot grow; replace the machine", m.spec.Namespace, m.spec.Name)
	}
	if !slices.Contains(m.host.capabilities, "CAP_SYS_RESOURCE") {
		return refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "capstand on this host does not have CAP_SYS_RESOURCE, so it cannot enlarge the disk of the running machine %s/%s; replace the machine",
			m.spec.Namespace, m.spec.Name)
	}
	return nil
}

// beginUpdate records the update with its data. The record comes last: data without a record is replaced by the next update.
func (m *machine) beginUpdate(req *hostpb.UpdateMachineRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := atomicfile.WriteFile(m.updateData(), req.Data, 0o600); err != nil {
		return err
	}
	u := &updateRecord{
		ID: req.UpdateId, From: proto.CloneOf(m.current.Load()), To: proto.CloneOf(req.Spec), Phase: hostpb.UpdateStatus_PENDING, StartedAt: time.Now(),
	}
	if err := u.save(m.dir); err != nil {
		return err
	}
	m.setUpdate(u)
	m.updates.Send()
	return nil
}

func (m *machine) updateData() string { return filepath.Join(m.dir, "update-data") }

// setUpdate makes u the machine's update and publishes it; m.mu is held.
func (m *machine) setUpdate(u *updateRecord) {
	m.update = u
	m.current.Store(u.spec())
	m.publish(func(s *hostpb.MachineStatus) { s.Update = u.status() })
}

// lastUpdate returns a copy of the record of the last update, or nil.
func (m *machine) lastUpdate() *updateRecord {
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
	if u.ended() {
		return memory
	}
	return max(memory, u.From.MemoryBytes, u.To.MemoryBytes)
}

// eraseUpdateData removes both copies of the data, and the request to the machine.
func (m *machine) eraseUpdateData() {
	for _, path := range []string{m.updateData(), filepath.Join(m.runDir(), machineapi.UpdateRequestFile), filepath.Join(m.runDir(), machineapi.UpdateDataFile)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			m.log.Error("Cannot erase the data of the update", "error", err)
		}
	}
}
