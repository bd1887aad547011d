package host

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode"

	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/host/updaterecord"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/shorten"
)

const (
	// maxStep and maxUpdateMessage bound the report of a machine, in bytes, because its users may have replaced PID 1.
	maxStep          = 128
	maxUpdateMessage = 1024
)

// followUpdate carries out the update of a running machine, until ctx ends. The steps of the host can be repeated: each life of
// PID 1 and of capstand begins with them.
func (m *machine) followUpdate(ctx context.Context) {
	delivered := ""
	for {
		pause := m.stepUpdate(ctx, &delivered)
		if !rest(ctx, m.updates, pause) {
			return
		}
	}
}

// stepUpdate takes the next step of the update and returns the pause before the next look without an event. delivered is the id
// of the update that capstand has delivered since the last start of the machine.
func (m *machine) stepUpdate(ctx context.Context, delivered *string) time.Duration {
	u := m.lastUpdate()
	if u.Ended() {
		return forever
	}
	heard := m.lastReport()
	if heard.rollsBack(u) && !u.RollingBack {
		u.RollingBack = true
		if err := m.recordProgress(u); err != nil {
			m.log.Error("Cannot record the rollback of the update", "error", err)
			return maxRestartDelay
		}
		*delivered = "" // The host's part follows, with the previous limits.
	}
	if *delivered != u.ID {
		known := u.Delivered
		if step, err := m.applyUpdate(ctx, u); err != nil {
			return m.notApplied(ctx, u, known, step, err)
		}
		*delivered = u.ID
		return 0
	}
	phase, step, message := decideUpdate(heard, u, time.Now())
	if phase != hostpb.UpdateStatus_RUNNING {
		return m.endUpdate(ctx, u, phase, step, message)
	}
	m.noteUpdate(u.ID, step, message)
	return machineapi.UpdateStalled
}

// notApplied follows a failed step of the host and returns the pause before the next try. known is true if an earlier try delivered the
// request: capstan-init may carry the update out then, so the step is repeated until it succeeds or the machine reports another end.
func (m *machine) notApplied(ctx context.Context, u *updaterecord.Record, known bool, step string, err error) time.Duration {
	if !m.runs(ctx) {
		return pauseAfter(0) // Its next life begins again.
	}
	if !known {
		return m.endUpdate(ctx, u, hostpb.UpdateStatus_ROLLED_BACK, step, err.Error())
	}
	phase, at, message := decideUpdate(m.lastReport(), u, time.Now())
	if phase == hostpb.UpdateStatus_ROLLED_BACK || phase == hostpb.UpdateStatus_FAILED {
		return m.endUpdate(ctx, u, phase, at, message)
	}
	m.noteUpdate(u.ID, step, oneLine(err.Error(), maxUpdateMessage))
	m.log.Warn("A step of the update failed and is repeated", "update", u.ID, "step", step, "error", err)
	return maxRestartDelay
}

// report is the report of PID 1 about an update.
type report struct {
	// heard is false until PID 1 has reported its state.
	heard  bool
	status machineapi.Status
	// changedAt is the time of the last change of the update.
	changedAt time.Time
}

// rollsBack returns whether PID 1 undoes this update.
func (r report) rollsBack(u *updaterecord.Record) bool {
	reported := r.status.Update
	return reported != nil && reported.ID == u.ID && reported.Phase == machineapi.UpdateRunning && reported.RollingBack
}

// recordProgress records a change of the update before its effect.
func (m *machine) recordProgress(u *updaterecord.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deleted.Err() != nil {
		return nil
	}
	if err := u.Save(m.dir); err != nil {
		return err
	}
	recorded := *u
	m.setUpdate(&recorded)
	return nil
}

// decideUpdate returns the phase of an update that the machine has got. The machine is not trusted: only the report of this update
// counts, and its texts are bounded.
func decideUpdate(r report, u *updaterecord.Record, now time.Time) (phase hostpb.UpdateStatus_Phase, step, message string) {
	reported := r.status.Update
	switch {
	case r.heard && !r.status.Updates:
		return hostpb.UpdateStatus_ROLLED_BACK, "delivery", "the running capstan-init of the machine is too old to update it in place; restart the machine, or replace it"
	case reported != nil && reported.ID == u.ID && reported.Phase == machineapi.UpdateSucceeded:
		return hostpb.UpdateStatus_SUCCEEDED, "", oneLine(reported.Message, maxUpdateMessage) // capstand may hear it late.
	case now.Sub(r.changedAt) >= machineapi.UpdateStalled:
		return hostpb.UpdateStatus_FAILED, u.Step, fmt.Sprintf("the machine has reported no progress for %s; read its logs `init` and `update`", machineapi.UpdateStalled)
	case reported == nil || reported.ID != u.ID:
		return hostpb.UpdateStatus_RUNNING, "delivery", ""
	}
	step, message = oneLine(reported.Step, maxStep), oneLine(reported.Message, maxUpdateMessage)
	switch reported.Phase {
	case machineapi.UpdateRolledBack:
		return hostpb.UpdateStatus_ROLLED_BACK, step, message
	case machineapi.UpdateFailed:
		return hostpb.UpdateStatus_FAILED, step, message
	default:
		return hostpb.UpdateStatus_RUNNING, step, message
	}
}

// oneLine returns printable text of at most limit bytes.
func oneLine(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, " "))
	return shorten.To(text, limit)
}

// hearUpdate keeps the report of PID 1 about its update; m.mu is held.
func (m *machine) hearUpdate(s machineapi.Status) {
	before := m.reported.status.Update
	if !m.reported.heard || (before == nil) != (s.Update == nil) || before != nil && *before != *s.Update {
		m.reported.changedAt = time.Now()
	}
	m.reported.heard, m.reported.status = true, machineapi.Status{Update: s.Update, Updates: s.Updates}
	if !m.update.Ended() {
		m.updates.Send()
	}
}

func (m *machine) lastReport() report {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reported
}

// applyUpdate does the host's part: the disk, the limits, and the delivery to capstan-init. It returns the step that failed.
func (m *machine) applyUpdate(ctx context.Context, u *updaterecord.Record) (string, error) {
	for _, step := range []struct {
		name string
		do   func(context.Context, *updaterecord.Record) error
	}{
		{"disk", m.growDisk},
		{"limits", func(ctx context.Context, u *updaterecord.Record) error { return m.applyLimits(ctx, u.Spec()) }},
		{"delivery", m.deliverUpdate},
	} {
		m.noteUpdate(u.ID, step.name, "")
		if err := step.do(ctx, u); err != nil {
			return step.name, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reported.changedAt = time.Now() // The machine's time begins now.
	return "", nil
}

func (m *machine) growDisk(ctx context.Context, u *updaterecord.Record) error {
	size := admission.DiskBytes(u.To)
	if u.Grown || size <= admission.DiskBytes(u.From) {
		return nil
	}
	if err := m.disk().Grow(ctx, size); err != nil {
		return err
	}
	u.Grown = true
	return m.recordProgress(u)
}

// applyLimits changes the limits of the running machine, and the files with which programs in it read its size.
func (m *machine) applyLimits(ctx context.Context, spec *hostpb.MachineSpec) error {
	params, err := m.limits(spec)
	if err != nil {
		return err
	}
	if err := m.host.runc.Update(ctx, m.spec.Id, params); err != nil {
		return fmt.Errorf("changing the limits of the machine: %w", err)
	}
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	return runc.UpdateViews(params, string(cpuinfo))
}

// limits returns the parameters of the container that an update can change.
func (m *machine) limits(spec *hostpb.MachineSpec) (runc.Params, error) {
	p := runc.Params{CPUs: spec.Cpus, ControlPlane: spec.ControlPlane, MemoryBytes: spec.MemoryBytes, PidsLimit: admission.PidsLimit(spec), Cgroup: m.cgroup(), Views: m.viewsDir()}
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return p, err
	}
	p.SwapBytes, err = swapLimit(cgroup.Version(), string(meminfo), spec.MemoryBytes)
	return p, err
}

// deliverUpdate writes the metadata, the data and last the request into the folder that the machine shares with capstand.
func (m *machine) deliverUpdate(_ context.Context, u *updaterecord.Record) error {
	data, err := os.ReadFile(m.updateData())
	if err != nil {
		return err
	}
	metadata, err := json.MarshalIndent(m.metadata(u.Spec()), "", "  ")
	if err != nil {
		return err
	}
	request, err := json.Marshal(machineapi.UpdateRequest{ID: u.ID, Previous: machineapi.Size{CPUs: u.From.Cpus, MemoryBytes: u.From.MemoryBytes}})
	if err != nil {
		return err
	}
	if !u.Delivered {
		u.Delivered = true
		if err := m.recordProgress(u); err != nil {
			return err
		}
	}
	dir, err := os.OpenRoot(m.runDir())
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	for _, file := range []struct {
		name    string
		content []byte
		mode    os.FileMode
	}{
		{machineapi.MetadataFile, metadata, 0o644},
		{machineapi.UpdateDataFile, data, 0o600},
		{machineapi.UpdateRequestFile, request, 0o644}, // The machine begins with it.
	} {
		if err := foreignfile.Replace(dir, file.name, file.content, file.mode); err != nil {
			return err
		}
	}
	return nil
}

// noteUpdate publishes the progress. The record on disk does not need it.
func (m *machine) noteUpdate(id, step, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.update == nil || m.update.ID != id || m.update.Ended() {
		return
	}
	u := *m.update
	u.Phase, u.Step, u.Message = hostpb.UpdateStatus_RUNNING, step, message
	m.setUpdate(&u)
}

// endUpdate records the result. Without success, the machine gets its previous limits again. It returns when to try again.
func (m *machine) endUpdate(ctx context.Context, u *updaterecord.Record, phase hostpb.UpdateStatus_Phase, step, message string) time.Duration {
	ended := *u
	ended.RollingBack = false
	ended.Phase, ended.Step, ended.Message, ended.CompletedAt = phase, step, oneLine(message, maxUpdateMessage), time.Now()
	if phase != hostpb.UpdateStatus_SUCCEEDED {
		if err := m.undoLimits(ctx, ended.Spec()); err != nil {
			if !m.runs(ctx) {
				return pauseAfter(0) // The next life of the machine, or of capstand, ends the update.
			}
			ended.Phase, ended.Message = hostpb.UpdateStatus_FAILED, oneLine(fmt.Sprintf("the limits were not restored: %v; %s", err, message), maxUpdateMessage)
		}
	}
	if err := m.recordEnd(&ended); err != nil {
		m.log.Error("Cannot record the end of the update", "error", err)
		return maxRestartDelay
	}
	m.log.Info("Update ended", "update", ended.ID, "phase", ended.Phase, "step", ended.Step, "message", ended.Message)
	m.resized()
	return 0
}

// runs returns whether PID 1 runs and capstand watches it.
func (m *machine) runs(ctx context.Context) bool {
	running, err := m.hasProcess(ctx)
	return err == nil && running && ctx.Err() == nil
}

// undoLimits restores the limits and the metadata.
func (m *machine) undoLimits(ctx context.Context, spec *hostpb.MachineSpec) error {
	if err := m.applyLimits(ctx, spec); err != nil {
		return err
	}
	data, err := json.MarshalIndent(m.metadata(spec), "", "  ")
	if err != nil {
		return err
	}
	dir, err := os.OpenRoot(m.runDir())
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return foreignfile.Replace(dir, machineapi.MetadataFile, data, 0o644)
}

// recordEnd records the result. The spec comes first: after the end, the removal of a package of programs regards only the spec.
func (m *machine) recordEnd(u *updaterecord.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deleted.Err() != nil {
		return nil
	}
	if err := writeSpec(specFile(m.dir), u.Spec()); err != nil {
		return err
	}
	if err := u.Save(m.dir); err != nil {
		return err
	}
	m.eraseUpdateData() // Before the end is visible: the next update can begin then, with data in the same files.
	m.setUpdate(u)
	return nil
}
