package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/host/updaterecord"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/expect"
)

// updatable returns a capstand whose machine m-1 is bootstrapped and recorded on disk, and an update of it.
func updatable(t *testing.T) (*Host, *hostpb.UpdateMachineRequest) {
	t.Helper()
	h := recorded(t)
	h.capacity, h.config.Assets = 8<<30, t.TempDir()
	folder := filepath.Join(h.config.Assets, "kubernetes", goodSpec().KubernetesVersion)
	if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, "kubelet"), nil, 0o755)); err != nil {
		t.Fatal(err)
	}
	onDisk(t, h)
	m := h.machines.byID["m-1"]
	m.state.Bootstrap = hostpb.MachineStatus_SUCCEEDED
	if err := m.save(); err != nil {
		t.Fatal(err)
	}
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Phase, s.Bootstrap = hostpb.MachineStatus_RUNNING, hostpb.MachineStatus_SUCCEEDED
	})
	req := &hostpb.UpdateMachineRequest{Spec: goodSpec(), UpdateId: "u", Data: []byte("secret")}
	req.Spec.MemoryBytes = 2 << 30
	return h, req
}

// The running and the desired spec are on disk before anything happens, so the next capstand continues the update.
func TestUpdateIsRecorded(t *testing.T) {
	h, req := updatable(t)
	if _, err := h.UpdateMachine(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	m := h.machines.byID["m-1"]
	if data, err := os.ReadFile(m.updateData()); err != nil || string(data) != "secret" {
		t.Errorf("%q, %v", data, err)
	}
	if info, err := os.Stat(m.updateData()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	again := newMachine(h.platform, goodSpec(), h.machines.forget)
	if u := again.lastUpdate(); u.Ended() || u.From.MemoryBytes != 1<<30 || u.To.MemoryBytes != 2<<30 {
		t.Errorf("the next capstand has %+v", u)
	}
	if got := again.snapshot(); got.Spec.MemoryBytes != 2<<30 || got.Status.Update.GetId() != "u" || got.Status.Update.Phase != hostpb.UpdateStatus_PENDING {
		t.Errorf("%v", got)
	}
	if got := again.reservedMemory(); got != 2<<30 {
		t.Errorf("%d bytes are reserved", got)
	}
	other := proto.CloneOf(req)
	other.UpdateId = "v"
	if _, err := h.UpdateMachine(t.Context(), other); refusal.Of(err).Reason != hostpb.Refusal_UPDATE_IN_PROGRESS {
		t.Errorf("a second update: %v", err)
	}
	for _, memory := range []int64{1 << 30, 2 << 30} {
		spec := goodSpec()
		spec.MemoryBytes = memory
		if _, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec}); err != nil {
			t.Errorf("a client with %d bytes of memory: %v", memory, err)
		}
	}
}

// TestUpdateIsDeliveredInOrder: the machine gets no request for an update whose data it does not have.
func TestUpdateIsDeliveredInOrder(t *testing.T) {
	h, req := updatable(t)
	_, err := h.UpdateMachine(t.Context(), req)
	expect.NoError(t, err)
	m := h.machines.byID["m-1"]
	expect.NoError(t, h.store.makeRunDir("m-1", m.metadata(m.spec), nil, nil))
	obstacle, request := filepath.Join(m.runDir(), machineapi.UpdateDataFile), filepath.Join(m.runDir(), machineapi.UpdateRequestFile)
	expect.NoError(t, os.Mkdir(obstacle, 0o700)) // in place of the data
	if err := m.deliverUpdate(t.Context(), m.lastUpdate()); err == nil || atomicfile.Exists(request) {
		t.Errorf("without the data: %v, the request exists: %v", err, atomicfile.Exists(request))
	}
	// The record comes before the request: after a crash between them, capstand does not end an update that the machine has begun.
	recorded, err := updaterecord.Load(m.dir)
	expect.NoError(t, err)
	if !recorded.Delivered {
		t.Error("the record has no delivery")
	}
	expect.NoError(t, os.Remove(obstacle))
	if err := m.deliverUpdate(t.Context(), m.lastUpdate()); err != nil || !atomicfile.Exists(request) {
		t.Errorf("with the data: %v, the request exists: %v", err, atomicfile.Exists(request))
	}
}

// A step of the host that fails ends an update that the machine does not have. An update that the machine may have got from an earlier
// life of capstand continues: the step is repeated until the machine reports that it has undone the update.
func TestFailedStepOfHost(t *testing.T) {
	for name, test := range map[string]struct {
		delivered bool
		report    machineapi.UpdatePhase
		want      hostpb.UpdateStatus_Phase
	}{
		"not delivered":          {false, "", hostpb.UpdateStatus_FAILED}, // runc does not restore the limits either.
		"nothing heard yet":      {true, "", hostpb.UpdateStatus_RUNNING},
		"the machine updates":    {true, machineapi.UpdateRunning, hostpb.UpdateStatus_RUNNING},
		"the machine has ended":  {true, machineapi.UpdateSucceeded, hostpb.UpdateStatus_RUNNING},
		"the machine has undone": {true, machineapi.UpdateRolledBack, hostpb.UpdateStatus_FAILED},
	} {
		h, req := updatable(t)
		_, err := h.UpdateMachine(t.Context(), req)
		expect.NoError(t, err)
		bin := t.TempDir()
		h.runc = runc.Runc{Binary: filepath.Join(bin, "runc"), Root: filepath.Join(bin, "state")}
		state := filepath.Join(h.runc.Root, "m-1", "state.json")
		script := fmt.Sprintf(`#!/bin/sh
case "$*" in *state*) echo '{"status":"running","pid":%d}';; *) exit 1;; esac
`, os.Getpid())
		expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(state), 0o700), os.WriteFile(state, nil, 0o600), os.WriteFile(h.runc.Binary, []byte(script), 0o700)))
		u := h.machines.byID["m-1"].lastUpdate()
		u.Delivered = test.delivered
		expect.NoError(t, u.Save(h.machines.byID["m-1"].dir))
		m := newMachine(h.platform, goodSpec(), h.machines.forget) // the next capstand
		if test.report != "" {
			m.reported = heardUpdate(&machineapi.Update{ID: "u", Phase: test.report, Step: "kubelet"}, time.Now())
		}
		delivered := ""
		pause := m.stepUpdate(t.Context(), &delivered)
		if got := m.lastUpdate(); got.Phase != test.want || got.Ended() == (pause == maxRestartDelay) || !got.Ended() && got.Step != "limits" {
			t.Errorf("%s: %s at %s, next try after %s: %s", name, got.Phase, got.Step, pause, got.Message)
		}
	}
}

// The result is recorded with the spec that the machine has then, and the data is erased.
func TestUpdateEnds(t *testing.T) {
	for phase, want := range map[hostpb.UpdateStatus_Phase]int64{
		hostpb.UpdateStatus_SUCCEEDED: 2 << 30, hostpb.UpdateStatus_ROLLED_BACK: 1 << 30, hostpb.UpdateStatus_FAILED: 1 << 30,
	} {
		h, req := updatable(t)
		if _, err := h.UpdateMachine(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		m := h.machines.byID["m-1"]
		u := m.lastUpdate()
		u.Phase, u.CompletedAt = phase, time.Now()
		if err := m.recordEnd(u); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(m.updateData()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the data is left: %v", phase, err)
		}
		recordedSpec, _, err := load(h.store, machinesDir, func() *hostpb.MachineSpec { return &hostpb.MachineSpec{} }, checkRecord)
		if err != nil || len(recordedSpec) != 1 || recordedSpec[0].MemoryBytes != want {
			t.Errorf("%s: recorded %v, %v", phase, recordedSpec, err)
		}
		for name, machine := range map[string]*machine{"this capstand": m, "the next": newMachine(h.platform, goodSpec(), h.machines.forget)} {
			if got := machine.snapshot(); got.Spec.MemoryBytes != want || got.Status.Update.Phase != phase || machine.reservedMemory() != want {
				t.Errorf("%s, %s: %v", phase, name, got)
			}
		}
		req.UpdateId = "v"
		if _, err := h.UpdateMachine(t.Context(), req); err != nil {
			t.Errorf("%s: the next update: %v", phase, err)
		}
	}
}

// The end of an update is recorded after the spec, and not without it: the removal of a package reads only the spec then.
func TestUpdateEndsAfterSpec(t *testing.T) {
	for file, want := range map[string]int64{"spec.json": 1 << 30, "update.json": 2 << 30} {
		h, req := updatable(t)
		_, err := h.UpdateMachine(t.Context(), req)
		expect.NoError(t, err)
		m := h.machines.byID["m-1"]
		u := m.lastUpdate()
		u.Phase, u.CompletedAt = hostpb.UpdateStatus_SUCCEEDED, time.Now()
		path, away := filepath.Join(m.dir, file), filepath.Join(m.dir, "away")
		expect.NoError(t, os.Rename(path, away))
		end := unrecordable(t, h, machinesDir, filepath.Join("m-1", file))
		if err := m.recordEnd(u); err == nil || m.lastUpdate().Ended() {
			t.Errorf("without %s: %v, ended: %v", file, err, m.lastUpdate().Ended())
		}
		end()
		expect.NoError(t, os.Rename(away, path))
		recorded, spec := newMachine(h.platform, goodSpec(), h.machines.forget), &hostpb.MachineSpec{}
		expect.NoError(t, readSpec(specFile(m.dir), spec))
		if recorded.lastUpdate().Ended() || spec.MemoryBytes != want {
			t.Errorf("after a crash without %s: ended: %v, recorded %v", file, recorded.lastUpdate().Ended(), spec)
		}
		expect.NoError(t, m.recordEnd(u))
	}
}

// A damaged record of an update makes the machine broken: capstand cannot decide which spec it has.
func TestDamagedUpdate(t *testing.T) {
	h, req := updatable(t)
	if _, err := h.UpdateMachine(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	dir := h.machines.byID["m-1"].dir
	for _, content := range []string{"{", `{"id":"u","phase":1,"from":{},"to":{}}`} {
		if err := os.WriteFile(filepath.Join(dir, "update.json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if m := newMachine(h.platform, goodSpec(), h.machines.forget); !strings.Contains(m.broken, "update of the machine") {
			t.Errorf("%s: %q", content, m.broken)
		}
	}
}

// A machine that was updated before a rule for new machines existed runs on.
func TestUpdateUnderFormerRules(t *testing.T) {
	h, req := updatable(t)
	_, err := h.UpdateMachine(t.Context(), req)
	expect.NoError(t, err)
	dir := h.machines.byID["m-1"].dir
	u, err := updaterecord.Load(dir)
	expect.NoError(t, err)
	u.From.Name, u.To.Name = "Former Name", "Former Name"
	if admission.CheckMachine(u.To) == nil {
		t.Fatal("the rule for names has changed")
	}
	expect.NoError(t, u.Save(dir))
	if m := newMachine(h.platform, goodSpec(), h.machines.forget); m.broken != "" {
		t.Error(m.broken)
	}
}

// A disk does not grow if the machine has none of its own.
func TestUpdateWithoutDisk(t *testing.T) {
	h, req := updatable(t)
	req.Spec.DiskBytes = 40 << 30
	h.config.Root = t.TempDir()
	if _, err := h.UpdateMachine(t.Context(), req); refusal.Of(err).Reason != hostpb.Refusal_UNSUPPORTED && refusal.Of(err).Reason != hostpb.Refusal_NO_DISK_SPACE {
		t.Errorf("%v", err)
	}
}

// With preallocation, the host refuses a machine, and the growth of a disk, for which it has not enough space left after the disks that are not
// made yet.
func TestPreallocatedDisksFit(t *testing.T) {
	h, req := updatable(t)
	h.config.Root, h.config.PreallocateDisks, h.diskBackend, h.capabilities = t.TempDir(), true, diskImage, []string{"CAP_SYS_RESOURCE"}
	expect.NoError(t, unix.Mount("tmpfs", h.config.Root, "tmpfs", 0, "size=64g"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(h.config.Root, 0)) })
	second := goodSpec()
	second.Id, second.Name, second.Addresses[0].Address = "m-2", "two", "10.1.0.11"
	admit := func(reserve int64, fits bool) {
		t.Helper()
		h.config.ReserveDisk = reserve
		err := h.machines.admit(second)
		if fits {
			expect.NoError(t, err)
			return
		}
		wantRefusal(t, err, hostpb.Refusal_NO_DISK_SPACE)
	}
	admit(30<<30, false) // Each disk has 20 GiB. The first one is not made yet.
	admit(20<<30, true)
	write(t, h.machines.byID["m-1"].disk().Image, "")
	admit(50<<30, false)
	admit(30<<30, true)

	req.Spec.DiskBytes, h.config.ReserveDisk = 40<<30, 50<<30
	_, err := h.UpdateMachine(t.Context(), req)
	wantRefusal(t, err, hostpb.Refusal_NO_DISK_SPACE)
	h.config.ReserveDisk = 40 << 30
	_, err = h.UpdateMachine(t.Context(), req)
	expect.NoError(t, err)
	admit(30<<30, false) // The growth has not happened yet.
	h.config.PreallocateDisks = false
	admit(60<<30, true)
}

func TestDecideUpdate(t *testing.T) {
	now := time.Now()
	running, succeeded, rolledBack, failed := hostpb.UpdateStatus_RUNNING, hostpb.UpdateStatus_SUCCEEDED, hostpb.UpdateStatus_ROLLED_BACK, hostpb.UpdateStatus_FAILED
	of := func(phase machineapi.UpdatePhase) *machineapi.Update {
		return &machineapi.Update{ID: "u", Phase: phase, Step: "kubelet", Message: "a\nb"}
	}
	for name, test := range map[string]struct {
		report        report
		phase         hostpb.UpdateStatus_Phase
		step, message string
	}{
		"nothing heard yet":    {report{changedAt: now}, running, "delivery", ""},
		"old capstan-init":     {report{heard: true, changedAt: now}, rolledBack, "delivery", "too old"},
		"not begun":            {heardUpdate(nil, now), running, "delivery", ""},
		"of an earlier update": {heardUpdate(&machineapi.Update{ID: "t", Phase: machineapi.UpdateSucceeded}, now), running, "delivery", ""},
		"running":              {heardUpdate(of(machineapi.UpdateRunning), now), running, "kubelet", "a b"},
		"unknown phase":        {heardUpdate(of("Other"), now), running, "kubelet", "a b"},
		"succeeded":            {heardUpdate(of(machineapi.UpdateSucceeded), now), succeeded, "", "a b"},
		"rolled back":          {heardUpdate(of(machineapi.UpdateRolledBack), now), rolledBack, "kubelet", "a b"},
		"failed":               {heardUpdate(of(machineapi.UpdateFailed), now), failed, "kubelet", "a b"},
		"succeeded long ago":   {heardUpdate(of(machineapi.UpdateSucceeded), now.Add(-machineapi.UpdateStalled)), succeeded, "", "a b"},
		"no progress":          {heardUpdate(of(machineapi.UpdateRunning), now.Add(-machineapi.UpdateStalled)), failed, "verify", "no progress"},
	} {
		phase, step, message := decideUpdate(test.report, &updaterecord.Record{ID: "u", Step: "verify"}, now)
		if phase != test.phase || step != test.step || !strings.Contains(message, test.message) {
			t.Errorf("%s: %s %q %q, want %s %q %q", name, phase, step, message, test.phase, test.step, test.message)
		}
	}
}

func heardUpdate(u *machineapi.Update, at time.Time) report {
	return report{heard: true, status: machineapi.Status{Updates: true, Update: u}, changedAt: at}
}

// A machine cannot report texts without limits.
func TestOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"plain": "plain", "two\nlines\x1b[31m": "two lines [31m", "bad\xff": "bad ", strings.Repeat("ä", 3): "ää",
	} {
		limit := 20
		if strings.HasPrefix(text, "ä") {
			limit = 5
		}
		if got := oneLine(text, limit); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
