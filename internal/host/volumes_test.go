package host

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv/expect"
)

const volumeSize = 16 << 20

func goodVolume() *hostpb.Volume {
	return &hostpb.Volume{Id: "v-1", Namespace: "default", Name: "data", SizeBytes: volumeSize}
}

// withVolumes returns a capstand without objects, on the state of a folder. A second one on the same folder is the next capstand.
func withVolumes(t *testing.T, root string) *Host {
	t.Helper()
	h := newHost(&platform{log: slog.New(slog.DiscardHandler), store: store{root}, broadcaster: events.New(), diskBackend: diskImage})
	h.ctx, h.config = t.Context(), Config{Root: root, Assets: t.TempDir(), RunDir: t.TempDir()}
	if _, err := h.store.open(); err != nil {
		t.Fatal(err)
	}
	if err := h.volumes.load(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.running.Wait)
	return h
}

func ensureVolume(t *testing.T, h *Host) {
	t.Helper()
	if _, err := h.EnsureVolume(t.Context(), goodVolume()); err != nil {
		t.Fatal(err)
	}
}

func deleteVolume(t *testing.T, h *Host) error {
	t.Helper()
	_, err := h.DeleteVolume(t.Context(), &hostpb.DeleteVolumeRequest{Id: "v-1", Namespace: "default", Name: "data"})
	return err
}

func wantRefusal(t *testing.T, err error, want hostpb.Refusal_Reason) {
	t.Helper()
	if got := refusal.Of(err).Reason; got != want {
		t.Errorf("got the refusal %s (%v), want %s", got, err, want)
	}
}

// attached mounts the volume of a machine on the host until the test ends, and returns the machine and the folder of the volume.
func attached(t *testing.T, h *Host) (*machine, string) {
	t.Helper()
	spec := goodSpec()
	spec.Volumes = []*hostpb.VolumeMount{{Id: "v-1", Path: "/srv/data"}}
	m := &machine{host: h.platform, spec: spec}
	if err := m.attachVolumes(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.detachVolumes(ctx); err != nil {
			t.Error(err)
		}
	})
	return m, m.volumeMounts()["/srv/data"]
}

// The data of a volume outlives its machine and capstand. The host reserves the whole size, and the deletion frees it.
func TestVolumeOutlivesItsMachine(t *testing.T) {
	root := t.TempDir()
	h := withVolumes(t, root)
	ensureVolume(t, h)
	var stat syscall.Stat_t
	image := h.volumeDisk("v-1").Image
	if err := syscall.Stat(image, &stat); err != nil || stat.Blocks*512 < volumeSize {
		t.Errorf("the file of the volume has %d bytes reserved (%v), want %d", stat.Blocks*512, err, volumeSize)
	}
	m, dir := attached(t, h)
	write(t, filepath.Join(dir, "file"), "data")
	if err := m.detachVolumes(t.Context()); err != nil {
		t.Fatal(err)
	}

	h = withVolumes(t, root)
	if info := h.machines.info(); info.VolumeBytes != volumeSize || info.AllocatedDiskBytes != volumeSize {
		t.Errorf("the host reports %d bytes of volumes and %d of disks, want %d", info.VolumeBytes, info.AllocatedDiskBytes, volumeSize)
	}
	ensureVolume(t, h)
	m, dir = attached(t, h)
	if got := read(t, filepath.Join(dir, "file")); got != "data" {
		t.Errorf("the successor reads %q", got)
	}
	if err := m.detachVolumes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := deleteVolume(t, h); err != nil {
		t.Fatal(err)
	}
	if atomicfile.Exists(image) || h.machines.info().VolumeBytes != 0 {
		t.Error("the deleted volume is still there")
	}
}

// The processes of a machine end although root in the machine has frozen its disk and a volume.
func TestFrozenMachineEnds(t *testing.T) {
	h := withVolumes(t, t.TempDir())
	ensureVolume(t, h)
	m, content := attached(t, h)
	m.dir = t.TempDir()
	disk := m.disk()
	expect.NoError(t, disk.Create(t.Context(), volumeSize))
	expect.NoError(t, disk.Attach(t.Context()))
	t.Cleanup(func() { expect.NoError(t, disk.Detach(context.Background())) })
	const fifreeze = 0xc0045877
	freeze := func(dir string) {
		t.Helper()
		f, err := os.Open(dir)
		expect.NoError(t, err)
		expect.NoError(t, errors.Join(unix.IoctlSetInt(int(f.Fd()), fifreeze, 0), f.Close())) // The kernel refuses a second freeze.
	}
	for _, end := range []func(context.Context) error{m.kill, m.clear} {
		freeze(disk.Dir)
		freeze(content)
		expect.NoError(t, end(t.Context()))
	}
	freeze(disk.Dir)
	freeze(content)
}

// A capstand that ends while it makes or deletes a volume leaves the whole volume or nothing.
func TestVolumeAfterCrash(t *testing.T) {
	root := t.TempDir()
	h := withVolumes(t, root)
	// The crash of makeVolume before the rename, with and without a record.
	for _, file := range []string{"disk.img.new", "disk.img", "spec.json"} {
		dir, _, err := h.store.unfinished(volumesDir, "v-1")
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, file), "{}")
		h = withVolumes(t, root)
		if len(h.volumes.byID)+len(h.volumes.damaged) > 0 || atomicfile.Exists(dir) {
			t.Errorf("after a crash behind the write of %s: %v, %v", file, h.volumes.byID, h.volumes.damaged)
		}
	}
	// A crash after the rename.
	if err := h.volumes.makeVolume(t.Context(), goodVolume()); err != nil {
		t.Fatal(err)
	}
	h = withVolumes(t, root)
	ensureVolume(t, h)
	// A crash of the deletion behind its tombstone, and one while the volume was mounted.
	attached(t, h)
	if err := h.store.bury(volumeTombstone("v-1")); err != nil {
		t.Fatal(err)
	}
	h = withVolumes(t, root)
	ensureVolume(t, h)
	if err := deleteVolume(t, h); err != nil {
		t.Fatal(err)
	}
	_, err := h.EnsureVolume(t.Context(), goodVolume())
	wantRefusal(t, err, hostpb.Refusal_DELETED)
	if h.store.machineDeleted("v-1", time.Now()) {
		t.Error("a machine with the id of the deleted volume is taken for a deleted one")
	}
}

// A volume that the host cannot reserve leaves nothing.
func TestVolumeWithoutSpace(t *testing.T) {
	h := withVolumes(t, t.TempDir())
	h.config.ReserveDisk = 1 << 60
	_, err := h.EnsureVolume(t.Context(), goodVolume())
	wantRefusal(t, err, hostpb.Refusal_NO_DISK_SPACE)
	huge := goodVolume()
	huge.SizeBytes = 1 << 60
	h.config.ReserveDisk = 0
	_, err = h.EnsureVolume(t.Context(), huge)
	wantRefusal(t, err, hostpb.Refusal_NO_DISK_SPACE)
	if err := h.volumes.makeVolume(t.Context(), huge); err == nil {
		t.Error("a volume larger than every disk was made")
	}
	for _, dir := range []string{volumesDir, newDir} {
		if left, err := os.ReadDir(h.store.path(dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}

// With preallocation, a volume does not take the space of a machine whose disk is not made yet.
func TestVolumeLeavesSpaceForMachines(t *testing.T) {
	root := t.TempDir()
	expect.NoError(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=64g"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(root, 0)) })
	h := withVolumes(t, root)
	h.machines.add(goodSpec()) // Its disk has 20 GiB.
	h.config.ReserveDisk, h.config.PreallocateDisks = 50<<30, true
	_, err := h.EnsureVolume(t.Context(), goodVolume())
	wantRefusal(t, err, hostpb.Refusal_NO_DISK_SPACE)
	h.config.PreallocateDisks = false
	ensureVolume(t, h)
}

// Lost data is reported, and never replaced by an empty volume.
func TestLostVolume(t *testing.T) {
	h := withVolumes(t, t.TempDir())
	ensureVolume(t, h)
	if err := os.Remove(h.volumeDisk("v-1").Image); err != nil {
		t.Fatal(err)
	}
	_, err := h.EnsureVolume(t.Context(), goodVolume())
	wantRefusal(t, err, hostpb.Refusal_DAMAGED)
	spec := goodSpec()
	spec.Volumes = []*hostpb.VolumeMount{{Id: "v-1", Path: "/srv/data"}}
	if err := (&machine{host: h.platform, spec: spec}).attachVolumes(t.Context()); err == nil {
		t.Error("a machine starts without the data of its volume")
	}
	if err := deleteVolume(t, h); err != nil {
		t.Errorf("the record of a lost volume stays: %v", err)
	}
}

// A volume with a damaged record is neither made again nor deleted. Its data may be repaired.
func TestDamagedRecordOfVolume(t *testing.T) {
	root := t.TempDir()
	h := withVolumes(t, root)
	ensureVolume(t, h)
	write(t, h.store.path(volumesDir, "v-1", "spec.json"), "{")
	h = withVolumes(t, root)
	_, err := h.EnsureVolume(t.Context(), goodVolume())
	wantRefusal(t, err, hostpb.Refusal_DAMAGED)
	wantRefusal(t, deleteVolume(t, h), hostpb.Refusal_DAMAGED)
	if !h.volumeDisk("v-1").Exists() {
		t.Error("the data is gone")
	}
}

// A machine without a readable record may have each volume that is mounted.
func TestVolumeOfDamagedMachine(t *testing.T) {
	h := withVolumes(t, t.TempDir())
	ensureVolume(t, h)
	attached(t, h)
	broken := goodSpec()
	broken.Id = "m-9"
	h.machines.add(broken).broken = "the test says so"
	wantRefusal(t, deleteVolume(t, h), hostpb.Refusal_VOLUME_IN_USE)
	spec := goodSpec()
	spec.Volumes = []*hostpb.VolumeMount{{Id: "v-1", Path: "/srv/data"}}
	wantRefusal(t, h.machines.mounts(spec), hostpb.Refusal_VOLUME_IN_USE)
	delete(h.machines.byID, "m-9")
	if err := h.machines.mounts(spec); err != nil {
		t.Error(err)
	}
}
