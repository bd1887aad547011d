package host

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/machineapi"
)

// onDisk returns a recorded machine with bootstrap data, as a new capstand loads it.
func onDisk(t *testing.T, h *Host) *machine {
	t.Helper()
	spec := goodSpec()
	if !atomicfile.Exists(h.store.path(machinesDir, spec.Id)) {
		if err := h.store.create(machinesDir, spec.Id, spec, map[string][]byte{"bootstrap-data": []byte("secret")}); err != nil {
			t.Fatal(err)
		}
	}
	return newMachine(h.platform, spec, h.machines.forget)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// capstand does not change a disk after the start of PID 1 from it. The files of an interrupted bootstrap stay, after a crash
// of the machine, the host or capstand. If the disk is lost later, capstand reports it as lost (ALL-16).
func TestDiskIsMadeOnce(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	for range 2 { // A start that failed before PID 1 is repeated.
		if err := m.ensureDisk(t.Context(), runc.HostSystem()); err != nil {
			t.Fatal(err)
		}
	}
	if id := read(t, filepath.Join(m.rootfs(), "etc/machine-id")); id != machineapi.MachineID(m.spec.Id) {
		t.Errorf("capstan-init would write another machine-id than %q", id)
	}
	if err := m.noteStart(); err != nil {
		t.Fatal(err)
	}
	passwd := filepath.Join(m.rootfs(), "etc/passwd")
	write(t, passwd, "the user's")
	again := onDisk(t, h)
	if err := again.ensureDisk(t.Context(), runc.HostSystem()); err != nil {
		t.Fatal(err)
	}
	if got := read(t, passwd); got != "the user's" {
		t.Errorf("the machine's file was replaced: %q", got)
	}
	if err := os.RemoveAll(m.rootfs()); err != nil {
		t.Fatal(err)
	}
	if err := again.ensureDisk(t.Context(), runc.HostSystem()); err == nil || onDisk(t, h).state.Failed == "" {
		t.Errorf("a lost disk was created again: %v", err)
	}
	next := onDisk(t, h) // as the next capstand loads it
	if run, _ := next.toRun(); run || !again.status.DiskLost || !next.status.DiskLost {
		t.Errorf("disk lost: %v, after a restart of capstand %v", again.status.DiskLost, next.status.DiskLost)
	}
	if err := next.startAgain(); err != nil || next.status.DiskLost {
		t.Errorf("a machine that is started again: %v, %v", err, next.status)
	}
}

// The check of a large file system can take hours. The status shows it, and only the end of the machine or of capstand ends it.
func TestLongCheckOfTheDisk(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	write(t, m.disk().Image, "a file system")
	bin := t.TempDir()
	write(t, filepath.Join(bin, "e2fsck"), "#!/bin/sh\nexec sleep 600\n")
	if err := os.Chmod(filepath.Join(bin, "e2fsck"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	changes, end := h.broadcaster.Subscribe()
	defer end()
	life, endLife := context.WithCancel(t.Context())
	defer endLife()
	started := make(chan error, 1)
	go func() {
		_, err := m.start(life)
		started <- err
	}()
	waiting, stop := context.WithTimeout(t.Context(), 30*time.Second) // Less than startTimeout.
	defer stop()
	if _, err := changes.Take(waiting); err != nil {
		t.Fatalf("the status does not show the check: %v", err)
	}
	if got := m.snapshot().Status.Message; !strings.HasPrefix(got, "checking the file system of ") {
		t.Errorf("the message is %q", got)
	}
	endLife()
	select {
	case err := <-started:
		if err == nil || strings.Contains(err.Error(), "damaged") {
			t.Errorf("a check that was ended: %v", err)
		}
	case <-waiting.Done():
		t.Error("the check continues after the end of the machine")
	}
}

// A capstand that ends during a deletion has recorded it. The next capstand removes the machine and does not start it before.
func TestDeletedMachineDoesNotStart(t *testing.T) {
	h := recorded(t)
	if run, _ := onDisk(t, h).toRun(); !run {
		t.Error("a machine that exists does not start")
	}
	if err := h.store.bury(machineTombstone(goodSpec().Id)); err != nil {
		t.Fatal(err)
	}
	if run, pause := onDisk(t, h).toRun(); run || pause != forever {
		t.Errorf("a deleted machine: start %v, next decision after %v", run, pause)
	}
}

// Links in a machine's disk never give access to the host's files.
func TestDiskIsNoWayToTheHost(t *testing.T) {
	for name, link := range map[string]struct{ from, to string }{
		"a file":    {"etc/passwd", "passwd"},
		"a folder":  {"etc", "."},
		"a mode":    {"etc/shadow", "passwd"},
		"a sibling": {"etc/ssl/certs", "."},
	} {
		t.Run(name, func(t *testing.T) {
			outside, rootfs := t.TempDir(), filepath.Join(t.TempDir(), "rootfs")
			write(t, filepath.Join(outside, "passwd"), "the host's")
			path := filepath.Join(rootfs, link.from)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(filepath.Join(outside, link.to), path); err != nil {
				t.Fatal(err)
			}
			if err := makeDisk(rootfs, goodSpec(), runc.System{}); err == nil {
				t.Error("no error")
			}
			entries, err := os.ReadDir(outside)
			if got := read(t, filepath.Join(outside, "passwd")); err != nil || len(entries) != 1 || got != "the host's" {
				t.Errorf("the host's folder has %v, its file %q, %v", entries, got, err)
			}
		})
	}
}

// IM-08: capstand records the end of the bootstrap only after the bootstrap's files are on disk, even if other state is saved
// before. It repeats a failed record and then removes the data.
func TestBootstrapIsRecorded_IM08(t *testing.T) {
	h := recorded(t)
	errs := make(chan struct{}, 100)
	h.log = slog.New(errorHandler{h.log.Handler(), errs})
	m := onDisk(t, h)
	if err := os.MkdirAll(m.rootfs(), 0o755); err != nil {
		t.Fatal(err)
	}
	m.state.Bootstrap, m.unsynced = hostpb.MachineStatus_SUCCEEDED, true
	m.died()
	if again := onDisk(t, h); !m.state.bootstrapped() || again.state.bootstrapped() || again.state.Deaths == nil {
		t.Errorf("while the disk is not safe: in memory %+v, on disk %+v", m.state, again.state)
	}
	// A file cannot replace a folder.
	state := filepath.Join(m.dir, "state.json")
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); m.recordBootstrap(context.Background()) }()
	<-errs
	if !atomicfile.Exists(m.bootstrapFile()) {
		t.Error("the data was removed before the end of the bootstrap was recorded")
	}
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	<-done
	if !onDisk(t, h).state.bootstrapped() || atomicfile.Exists(m.bootstrapFile()) {
		t.Error("the end of the bootstrap is not recorded, or the data still exists")
	}
}

// errorHandler sends every logged error to errs.
type errorHandler struct {
	slog.Handler
	errs chan struct{}
}

func (h errorHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h errorHandler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h errorHandler) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelError {
		h.errs <- struct{}{}
	}
	return nil
}
