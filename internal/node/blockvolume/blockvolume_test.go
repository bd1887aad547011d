package blockvolume

import (
	"bytes"
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

	"capstan.dev/capstan/internal/node/localvolume"
	"capstan.dev/capstan/internal/testenv/expect"
)

const (
	volume = "pvc-01234567-89ab-cdef-0123-456789abcdef"
	other  = "pvc-11234567-89ab-cdef-0123-456789abcdef"
	size   = 1 << 20
)

// machine returns the devices of a machine with a disk. They are gone at the end of the test, as at the end of PID 1.
func machine(t *testing.T, disk string) *Devices {
	t.Helper()
	d := &Devices{Control: "/dev/loop-control", Dir: t.TempDir(), Folders: localvolume.Folders{Dir: filepath.Join(disk, "block-volumes"), Top: disk}}
	expect.NoError(t, unix.Mount("tmpfs", d.Dir, "tmpfs", 0, "mode=700"))
	t.Cleanup(func() {
		end(d)
		expect.NoError(t, unix.Unmount(d.Dir, 0))
	})
	return d
}

// end closes all files of PID 1, as the kernel does when it ends.
func end(d *Devices) {
	for _, devices := range []map[string]*device{d.holds, d.volumes} {
		for name, device := range devices {
			_ = device.loop.Close()
			delete(devices, name)
		}
	}
}

// attached returns the loop devices of the kernel whose file is below a folder.
func attached(t *testing.T, dir string) (files []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	expect.NoError(t, err)
	for _, path := range paths {
		if file, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(file), dir+"/") {
			files = append(files, strings.TrimSpace(string(file)))
		}
	}
	return files
}

// loopOf returns the loop device that the kubelet finds for a path.
func loopOf(t *testing.T, path string) string {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	expect.NoError(t, err)
	for _, at := range paths {
		if file, err := os.ReadFile(at); err == nil && strings.TrimSpace(string(file)) == path {
			return "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(at)))
		}
	}
	t.Fatalf("no loop device has %s", path)
	return ""
}

// TestVolume: data outlives the end of the machine at any time, and nothing outlives the volume. A device in use stays.
func TestVolume(t *testing.T) {
	disk := t.TempDir()
	d := machine(t, disk)
	for range 2 {
		expect.NoError(t, d.Provide(volume, size-1))
	}
	expect.NoError(t, d.Provide(other, 1))
	node := filepath.Join(d.Dir, volume)
	if info, err := os.Stat(node); err != nil || info.Mode() != os.ModeDevice|0o666 {
		t.Fatalf("the node is %v, %v", info.Mode(), err)
	}
	if got := length(t, node); got != size {
		t.Errorf("the device has %d bytes, want %d", got, size)
	}
	write(t, node, "precious")
	if got := read(t, filepath.Join(d.Dir, other)); got != "\x00\x00\x00\x00\x00\x00\x00\x00" {
		t.Errorf("the other volume has %q", got)
	}

	// The machine ends while its kubelet holds the device.
	expect.NoError(t, d.Hold(node))
	end(d)
	if left := attached(t, disk); len(left) > 0 {
		t.Fatalf("loop devices have %v after the end of the machine", left)
	}
	d = machine(t, disk)
	expect.NoError(t, d.restore())
	node = filepath.Join(d.Dir, volume)
	if got := read(t, node); got != "precious" {
		t.Errorf("the volume has %q after a restart", got)
	}
	expect.NoError(t, d.Provide(volume, size))

	testInUse(t, d, node)
	for range 2 {
		expect.NoError(t, d.Withdraw(volume))
		expect.NoError(t, d.Folders.Remove(volume))
	}
	if left := attached(t, disk); len(left) != 1 || !strings.Contains(left[0], other) {
		t.Errorf("loop devices have %v, want only that of the other volume", left)
	}
	if left, err := os.ReadDir(d.Dir); err != nil || len(left) != 1 {
		t.Errorf("the nodes are %v, %v", left, err)
	}
	if names, err := d.Folders.Images(); err != nil || !slices.Equal(names, []string{other}) {
		t.Errorf("the volumes are %v, %v", names, err)
	}
}

// testInUse: a volume keeps its device while its kubelet holds it, and while a process has it open.
func testInUse(t *testing.T, d *Devices, node string) {
	for range 2 {
		expect.NoError(t, d.Hold(node))
	}
	loop := loopOf(t, node)
	if content, err := os.ReadFile("/sys/block/" + filepath.Base(loop) + "/size"); err != nil || string(content) != "0\n" {
		t.Errorf("programs of the host find %q sectors in the device of the hold, %v", content, err)
	}
	if err := d.Withdraw(volume); err == nil || !strings.Contains(err.Error(), "the kubelet holds it") {
		t.Errorf("a held volume goes: %v", err)
	}
	if err := d.Release("/dev/loop"); err == nil {
		t.Error("a device of another is released")
	}
	expect.NoError(t, d.Release(loop))
	if err := d.Release(loop); err == nil {
		t.Error("a device is released twice")
	}

	file, err := os.Open(node)
	expect.NoError(t, err)
	if err := d.Withdraw(volume); err == nil || !strings.Contains(err.Error(), "found one: end the pod") {
		t.Errorf("an open volume goes: %v", err)
	}
	expect.NoError(t, file.Close())
	if got := read(t, node); got != "precious" {
		t.Errorf("the volume has %q after a refused removal", got)
	}
}

// TestFollow: volumes that cannot be attached at the start of the machine are attached later, except for one that goes. Until then,
// they keep their data.
func TestFollow(t *testing.T) {
	disk := t.TempDir()
	d := machine(t, disk)
	for _, name := range []string{volume, other} {
		expect.NoError(t, d.Provide(name, size))
	}
	write(t, filepath.Join(d.Dir, volume), "precious")
	end(d)

	d = machine(t, disk)
	d.Control = "/dev/null"
	if err := d.restore(); err == nil || !strings.Contains(err.Error(), "no free loop device") {
		t.Fatalf("%v", err)
	}
	if err := d.Provide(volume, size); err == nil {
		t.Error("a volume is there without a device")
	}
	expect.NoError(t, d.Withdraw(other))
	d.Control = "/dev/loop-control"
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d.Follow(ctx, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if got := read(t, filepath.Join(d.Dir, volume)); got != "precious" {
		t.Errorf("the volume has %q", got)
	}
	if left := attached(t, disk); len(left) != 1 || !strings.Contains(left[0], volume) {
		t.Errorf("loop devices have %v, want only that of the volume that stays", left)
	}
}

// TestRefused: without the device for it, with too many volumes, or without space, nothing of a volume is left.
func TestRefused(t *testing.T) {
	disk := t.TempDir()
	d := machine(t, disk)
	full := map[string]*device{}
	for n := range most {
		full[fmt.Sprint(n)] = nil
	}
	for name, test := range map[string]struct {
		change func(*Devices)
		size   int64
		want   string
	}{
		"no device":    {func(d *Devices) { d.Control = filepath.Join(disk, "none") }, size, "name it in spec.devices of the CapstanMachine"},
		"too many":     {func(d *Devices) { d.volumes = full }, size, "expected at most 64 block volumes"},
		"too large":    {func(*Devices) {}, 1 << 60, "reserving"},
		"no size":      {func(*Devices) {}, 0, "larger than 0"},
		"wrong device": {func(d *Devices) { d.Control = "/dev/null" }, size, "no free loop device"},
	} {
		changed := &Devices{Control: d.Control, Dir: d.Dir, Folders: d.Folders}
		test.change(changed)
		if err := changed.Provide(volume, test.size); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
		if left, err := os.ReadDir(d.Folders.Dir); err == nil && len(left) > 0 {
			t.Errorf("%s: %v is left", name, left)
		}
	}
	d.holds = full
	if err := d.Hold("/dev/null"); err == nil || !strings.Contains(err.Error(), "expected at most 64 block volumes in pods") {
		t.Errorf("too many holds: %v", err)
	}
	d.holds = nil
	for _, path := range []string{disk, "/dev/null", filepath.Join(disk, "none")} {
		if d.Hold(path) == nil {
			t.Errorf("%s is held", path)
		}
	}
	for _, bad := range []string{"", "..", "../" + volume, volume + "/..", "free"} {
		if d.Provide(bad, size) == nil {
			t.Errorf("%q is a volume", bad)
		}
	}
}

func length(t *testing.T, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	expect.NoError(t, err)
	defer func() { _ = f.Close() }()
	n, err := f.Seek(0, 2)
	expect.NoError(t, err)
	return n
}

func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	expect.NoError(t, err)
	_, err = f.WriteString(text)
	expect.NoError(t, errors.Join(err, f.Sync(), f.Close()))
}

func read(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	expect.NoError(t, err)
	defer func() { _ = f.Close() }()
	text := make([]byte, len("precious"))
	_, err = f.ReadAt(text, 0)
	expect.NoError(t, err)
	return string(bytes.Clone(text))
}
