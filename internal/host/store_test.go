package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/boundedfolder"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/version"
)

func newStore(t *testing.T) store {
	t.Helper()
	s := store{filepath.Join(t.TempDir(), "root")}
	if _, err := s.open(); err != nil {
		t.Fatal(err)
	}
	unmountAfter(t, s)
	return s
}

// unmountAfter ends the folders that the store shares with machines when the test ends.
func unmountAfter(t *testing.T, s store) {
	t.Helper()
	t.Cleanup(func() {
		for _, dir := range []string{s.path(runDir, "*"), s.path(balancersDir, "*", "shared")} {
			paths, _ := filepath.Glob(dir)
			for _, path := range paths {
				if err := boundedfolder.Unmount(path); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

func specs(t *testing.T, s store) []*hostpb.MachineSpec {
	t.Helper()
	all, _, err := load(s, machinesDir, func() *hostpb.MachineSpec { return &hostpb.MachineSpec{} }, checkRecord)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestStore(t *testing.T) {
	s := newStore(t)
	id, _ := s.hostID()
	data := map[string][]byte{"bootstrap-data": []byte("secret")}
	if err := s.create(machinesDir, "m-1", goodSpec(), data); err != nil {
		t.Fatal(err)
	}
	if all := specs(t, s); len(all) != 1 || !proto.Equal(all[0], goodSpec()) {
		t.Errorf("read back %v", all)
	}
	for _, name := range []string{"spec.json", "bootstrap-data"} {
		if info, err := os.Stat(s.path(machinesDir, "m-1", name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, info.Mode(), err)
		}
	}
	// A crash during a write and a crash during a removal.
	if err := os.MkdirAll(s.path(newDir, "machines-m-2"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.discard(s.path(machinesDir, "m-1")); err != nil {
		t.Fatal(err)
	}
	again, err := s.open()
	if err != nil || again != id {
		t.Errorf("host id %q then %q, %v", id, again, err)
	}
	// Unreadable records are ignored and stay unchanged.
	if err := os.Mkdir(s.path(machinesDir, "broken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if all := specs(t, s); len(all) != 0 {
		t.Errorf("the list contains an unreadable record: %v", all)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := s.emptyTrash(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("capstand does not end before the trash is empty: %v", err)
	}
	if err := s.emptyTrash(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{newDir, trashDir} {
		if left, _ := os.ReadDir(s.path(dir)); len(left) != 0 {
			t.Errorf("%s holds %v", dir, left)
		}
	}
}

func TestTombstones(t *testing.T) {
	s, now := newStore(t), time.Now()
	if err := s.bury("m-1"); err != nil {
		t.Fatal(err)
	}
	if !s.buried("m-1", now.Add(tombstoneLife-time.Minute)) || s.buried("m-1", now.Add(tombstoneLife+time.Minute)) || s.buried("m-2", now) {
		t.Error("a tombstone must last a day")
	}
	s.buryOld(now)
	if !s.buried("m-1", now) {
		t.Error("a fresh tombstone was dropped")
	}
	s.buryOld(now.Add(tombstoneLife + time.Minute))
	if _, err := os.Stat(s.path(tombstonesDir, "m-1")); !os.IsNotExist(err) {
		t.Errorf("an old tombstone is kept: %v", err)
	}
}

// Many deletions in a row read the old tombstones once: the requests of all namespaces wait for that.
func TestOldTombstonesAreReadOnce(t *testing.T) {
	h := recorded(t)
	remove := func(id string) {
		t.Helper()
		if m, err := h.machines.bury(t.Context(), &hostpb.DeleteMachineRequest{Id: id, Namespace: "ns", Name: id}); m != nil || err != nil {
			t.Fatal(m, err)
		}
	}
	h.networks.byID = map[string]*hostpb.Network{}
	old := time.Now().Add(-tombstoneLife - time.Minute)
	for _, kept := range []bool{false, true} {
		if err := h.store.bury("old"); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(h.store.path(tombstonesDir, "old"), old, old); err != nil {
			t.Fatal(err)
		}
		remove(fmt.Sprint("m-", kept))
		if _, err := os.Stat(h.store.path(tombstonesDir, "old")); (err == nil) != kept {
			t.Errorf("the old tombstone is kept: %v, want %v", err == nil, kept)
		}
	}
	h.machines.tombstonesRead = h.machines.tombstonesRead.Add(-tombstonePause)
	remove("m-later")
	if _, err := os.Stat(h.store.path(tombstonesDir, "old")); !os.IsNotExist(err) {
		t.Errorf("an old tombstone is kept: %v", err)
	}
}

// A machine with the id of one that was deleted more than a day ago is not taken for the deleted one by the next capstand.
func TestExpiredTombstone(t *testing.T) {
	h := onBox(t)
	old := time.Now().Add(-tombstoneLife - time.Minute)
	tombstone := machineTombstone("m-1")
	expect.NoError(t, h.store.bury(tombstone))
	expect.NoError(t, os.Chtimes(h.store.path(tombstonesDir, tombstone), old, old))
	expect.NoError(t, recordOnly(t, h, func() {}))
	if m := newMachine(h.platform, goodSpec(), h.machines.forget); m.deleted.Err() != nil {
		t.Error("the next capstand deletes the machine")
	}
}

// The tombstone that a former capstand left may be that of a volume with the id of a machine. It refuses a new machine, and deletes none.
func TestFormerTombstone(t *testing.T) {
	h := onBox(t)
	expect.NoError(t, h.store.bury("m-1"))
	wantRefusal(t, h.machines.admit(goodSpec()), hostpb.Refusal_DELETED)
	expect.NoError(t, h.store.create(machinesDir, "m-1", goodSpec(), nil))
	if m := newMachine(h.platform, goodSpec(), h.machines.forget); m.deleted.Err() != nil {
		t.Error("capstand deletes the machine")
	}
	// A deletion that this capstand begins continues, although its tombstone is old.
	expect.NoError(t, h.store.bury(machineTombstone("m-1")))
	h.store.buryOld(time.Now().Add(tombstoneLife + time.Minute))
	if atomicfile.Exists(h.store.path(tombstonesDir, "m-1")) {
		t.Error("the tombstone of the former capstand is kept")
	}
	if m := newMachine(h.platform, goodSpec(), h.machines.forget); m.deleted.Err() == nil {
		t.Error("the deletion does not continue")
	}
}

// TestIncompleteFiles: capstand that was killed while it wrote a file leaves it under another name, with its secrets. The next start removes
// it, and no file of a machine.
func TestIncompleteFiles(t *testing.T) {
	h := recorded(t)
	h.contacts = afterAbsence(t, time.Now(), 0)
	if err := h.store.create(machinesDir, "m-1", goodSpec(), nil); err != nil {
		t.Fatal(err)
	}
	left := []string{h.store.path(".new-1"), h.store.path(machinesDir, "m-1", ".new-2")}
	of := h.store.path(machinesDir, "m-1", "rootfs", ".new-3")
	if err := os.Mkdir(filepath.Dir(of), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range append(left, of) {
		write(t, path, "secret")
	}
	again := reloaded(t, h)
	for _, path := range left {
		if atomicfile.Exists(path) {
			t.Errorf("%s remains", path)
		}
	}
	if !atomicfile.Exists(of) || again.machines.byID["m-1"] == nil {
		t.Error("a file of the machine, or the machine, is gone")
	}
}

// TestStoreOfNewerRelease: an older capstand does not start with the records of a newer minor release.
func TestStoreOfNewerRelease(t *testing.T) {
	s := newStore(t)
	for _, c := range []struct {
		writer, want string
		refused      bool
	}{
		{"", version.Version + "\n", false}, {"v0.0.9\n", version.Version + "\n", false}, {"v99.1.2\n", "v99.1.2\n", true},
	} {
		write(t, s.path("version"), c.writer)
		err := s.checkWriter()
		if c.refused != (err != nil) {
			t.Errorf("%q: %v", c.writer, err)
		}
		expect.NoError(t, s.recordWriter())
		if got := read(t, s.path("version")); got != c.want {
			t.Errorf("%q became %q", c.writer, got)
		}
	}
	if _, err := New(t.Context(), Config{Root: s.root}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "expected Capstan v99.1 or newer for the machines in "+s.root) {
		t.Errorf("capstand starts: %v", err)
	}
}

// TestFullDiskAfterReboot: capstand starts after a reboot although the disk is full, because it empties the trash. It also forgets that
// balancers were about to start.
func TestFullDiskAfterReboot(t *testing.T) {
	root := t.TempDir()
	expect.NoError(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(root, 0)) })
	h := newHost(&platform{log: slog.New(slog.DiscardHandler), store: store{root}, broadcaster: events.New(), ctx: t.Context()})
	h.contacts = afterAbsence(t, time.Now(), 0)
	_, err := h.store.open()
	expect.NoError(t, err)
	expect.NoError(t, h.store.create(machinesDir, "m-1", goodSpec(), nil)) // The record of its network is lost.
	expect.NoError(t, h.store.create(balancersDir, "n-1", goodBalancer(), nil))
	mark := h.store.path(balancersDir, "n-1", startMarkFile)
	write(t, mark, "")
	write(t, h.store.path("boot-id"), "another boot")
	if err := os.WriteFile(filepath.Join(root, "trash", "large"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	for range 2 {
		again := reloaded(t, h)
		if again.machines.byID["m-1"] == nil || again.networks.byID[goodSpec().Network.Id] == nil {
			t.Error("the machine or its network is not loaded")
		}
		expect.NoError(t, again.forgetOtherBoot())
		if got := read(t, h.store.path("boot-id")); got != proc.BootID() || atomicfile.Exists(mark) {
			t.Errorf("the boot is %q, the mark exists: %v", got, atomicfile.Exists(mark))
		}
	}
}

// TestUnsyncedObject: an object whose rename may not be durable is discarded, because the caller gets an error. An existing one stays.
func TestUnsyncedObject(t *testing.T) {
	s := newStore(t)
	expect.NoError(t, s.create(machinesDir, "m-1", goodSpec(), nil))
	for _, id := range []string{"m-1", "m-2"} {
		dir, _, err := s.unfinished(machinesDir, id)
		expect.NoError(t, err)
		expect.NoError(t, writeSpec(specFile(dir), goodSpec()))
		withoutFiles(t, func() { err = s.publish(dir, machinesDir, id) })
		if err == nil {
			t.Errorf("%s: no error", id)
		}
	}
	if got := folders(s.path(machinesDir)); !slices.Equal(got, []string{"m-1"}) {
		t.Errorf("the objects are %v", got)
	}
}

// withoutFiles calls a function while this process cannot open files.
func withoutFiles(t *testing.T, call func()) {
	t.Helper()
	var before unix.Rlimit
	expect.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}))
	call()
	expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
}
