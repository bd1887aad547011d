// Package updaterecord is the record of a machine's last update in place, on disk and in memory.
//
// Layer: host. Allowed imports: api, library, contract.
package updaterecord

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
)

// fileName is the file in the folder of a machine's state.
const fileName = "update.json"

// Record is the last update of a machine. It contains both specs, so that capstand can continue the update
// or undo it from any step.
type Record struct {
	ID      string                    `json:"id"`
	From    *hostpb.MachineSpec       `json:"-"`
	To      *hostpb.MachineSpec       `json:"-"`
	Phase   hostpb.UpdateStatus_Phase `json:"phase"`
	Step    string                    `json:"step,omitempty"`
	Message string                    `json:"message,omitempty"`
	// RollingBack is true when capstan-init undoes the update: from then on, the machine has its previous limits.
	RollingBack bool `json:"rollingBack,omitempty"`
	// Grown is true when the disk has its new size. It keeps that size if the update is undone.
	Grown bool `json:"grown,omitempty"`
	// Delivered is true when capstan-init may have the request. From then on, its report decides how the update ends.
	Delivered bool      `json:"delivered,omitempty"`
	StartedAt time.Time `json:"startedAt"`
	// CompletedAt is the time of the result.
	CompletedAt time.Time `json:"completedAt,omitzero"`
}

// file is the form of Record on disk.
type file struct {
	Record

	From json.RawMessage `json:"from"`
	To   json.RawMessage `json:"to"`
}

// Save writes the record into the folder of its machine.
func (u *Record) Save(dir string) error {
	from, err := protojson.Marshal(u.From)
	if err != nil {
		return err
	}
	to, err := protojson.Marshal(u.To)
	if err != nil {
		return err
	}
	return atomicfile.WriteJSON(filepath.Join(dir, fileName), file{*u, from, to}, 0o600)
}

// Load returns the last update of the machine whose folder is dir, or nil if it was never updated.
func Load(dir string) (*Record, error) {
	var f file
	err := atomicfile.ReadJSON(filepath.Join(dir, fileName), &f)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	u := f.Record
	u.From, u.To = &hostpb.MachineSpec{}, &hostpb.MachineSpec{}
	lenient := protojson.UnmarshalOptions{DiscardUnknown: true}
	return &u, errors.Join(lenient.Unmarshal(f.From, u.From), lenient.Unmarshal(f.To, u.To))
}

// Ended reports whether no update is in progress; also of a nil record.
func (u *Record) Ended() bool { return u == nil || admission.Ended(u.Status()) }

// Undone returns whether the machine has its previous spec.
func (u *Record) Undone() bool {
	return u.RollingBack || u.Ended() && u.Phase != hostpb.UpdateStatus_SUCCEEDED
}

// Spec returns the spec of the machine: the desired one, unless the update is or was undone.
func (u *Record) Spec() *hostpb.MachineSpec {
	switch {
	case !u.Undone():
		return u.To
	case u.Grown:
		return admission.Undone(u.From, u.To)
	}
	return u.From
}

// Other returns the other spec of the update, which clients with an older cache may still have.
func (u *Record) Other() *hostpb.MachineSpec {
	switch {
	case u == nil:
		return nil
	case u.Undone():
		return u.To
	}
	return u.From
}

// Status is the status of the update for clients; nil for a nil record.
func (u *Record) Status() *hostpb.UpdateStatus {
	if u == nil {
		return nil
	}
	s := &hostpb.UpdateStatus{Id: u.ID, Phase: u.Phase, Step: u.Step, Message: u.Message, StartedAt: timestamppb.New(u.StartedAt)}
	if !u.CompletedAt.IsZero() {
		s.CompletedAt = timestamppb.New(u.CompletedAt)
	}
	return s
}
