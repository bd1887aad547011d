package host

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
)

// onDisk is a machine that is recorded, with bootstrap data, as a capstand finds it that starts now.
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

// Once PID 1 was started from it, the disk is the machine's own: what its bootstrap has done there stays, however far
// it was when the machine, the host or capstand ended. A disk that is lost after that is reported as lost (ALL-16).
func TestDiskIsMadeOnce(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	for range 2 { // a start that did not get as far as PID 1 is made again
		if err := m.ensureDisk(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.noteStart(); err != nil {
		t.Fatal(err)
	}
	passwd := filepath.Join(m.rootfs(), "etc/passwd")
	write(t, passwd, "the user's")
	again := onDisk(t, h)
	if err := again.ensureDisk(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := read(t, passwd); got != "the user's" {
		t.Errorf("the machine's file was replaced: %q", got)
	}
	if err := os.RemoveAll(m.rootfs()); err != nil {
		t.Fatal(err)
	}
	if err := again.ensureDisk(t.Context()); err == nil || onDisk(t, h).state.Failed == "" {
		t.Errorf("a lost disk was made anew: %v", err)
	}
	next := onDisk(t, h) // of the next capstand
	if run, _ := next.toRun(); run || !again.status.DiskLost || !next.status.DiskLost {
		t.Errorf("disk lost: %v, after a restart of capstand %v", again.status.DiskLost, next.status.DiskLost)
	}
	if err := next.startAgain(); err != nil || next.status.DiskLost {
		t.Errorf("a machine that is started again: %v, %v", err, next.status)
	}
}

// Links in a machine's disk, whoever made them, never lead to the host's files.
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
				t.Error("no complaint")
			}
			entries, err := os.ReadDir(outside)
			if got := read(t, filepath.Join(outside, "passwd")); err != nil || len(entries) != 1 || got != "the host's" {
				t.Errorf("the host's folder has %v, its file %q, %v", entries, got, err)
			}
		})
	}
}

// IM-08: that the bootstrap data was used is on disk only after what the bootstrap has made, whatever is saved meanwhile, and it
// gets there, and the data goes, even if that fails at first.
func TestBootstrapIsRecorded_IM08(t *testing.T) {
	h := recorded(t)
	errs := make(chan struct{}, 100)
	h.log = slog.New(told{h.log.Handler(), errs})
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
		t.Error("the data is gone before that is recorded")
	}
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	<-done
	if !onDisk(t, h).state.bootstrapped() || atomicfile.Exists(m.bootstrapFile()) {
		t.Error("not recorded, or the data is still there")
	}
}

// told tells of every error that is logged.
type told struct {
	slog.Handler
	errs chan struct{}
}

func (h told) Enabled(context.Context, slog.Level) bool { return true }
func (h told) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h told) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelError {
		h.errs <- struct{}{}
	}
	return nil
}
