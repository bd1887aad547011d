package machinedisk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

const size = 256 << 20

func ctx(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newDisk returns a disk that does not exist yet, and removes it after the test.
func newDisk(t *testing.T) Disk {
	t.Helper()
	dir := t.TempDir()
	d := Disk{Image: filepath.Join(dir, "disk.img"), Dir: filepath.Join(dir, "rootfs"), Quotas: os.Getenv("CAPSTAN_KERNEL") != ""}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		expect.NoError(t, d.Detach(ctx))
	})
	return d
}

func attached(t *testing.T) Disk {
	t.Helper()
	d := newDisk(t)
	expect.NoError(t, d.Create(ctx(t), size))
	expect.NoError(t, d.Attach(ctx(t)))
	return d
}

// The file system has the size of the disk. A full disk refuses writes. Freed blocks return to the host.
func TestSize(t *testing.T) {
	d := attached(t)
	total, free, err := Space(d.Dir)
	expect.NoError(t, err)
	if total > size || free < size*8/10 {
		t.Errorf("%d of %d bytes are free, want at most %d in all and most of it free", free, total, size)
	}
	file := filepath.Join(d.Dir, "full")
	f, err := os.Create(file)
	expect.NoError(t, err)
	for chunk := make([]byte, 1<<20); err == nil; {
		_, err = f.Write(chunk)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v, want ENOSPC", err)
	}
	expect.NoError(t, f.Sync())
	expect.NoError(t, f.Close())
	if used := occupied(t, d); used < free/2 || used > size {
		t.Errorf("the image of a full disk occupies %d bytes, want at most %d", used, size)
	}
	expect.NoError(t, os.Remove(file))
	syncDisk(t, d)
	expect.Eventually(t, "the image of an emptied disk shrinks", func() error {
		if used := occupied(t, d); used > size/4 {
			return fmt.Errorf("it occupies %d bytes, want at most %d", used, size/4)
		}
		return nil
	})
}

func occupied(t *testing.T, d Disk) int64 {
	t.Helper()
	var s unix.Stat_t
	expect.NoError(t, unix.Stat(d.Image, &s))
	return s.Blocks * 512
}

func syncDisk(t *testing.T, d Disk) {
	t.Helper()
	f, err := os.Open(d.Dir)
	expect.NoError(t, err)
	expect.NoError(t, unix.Syncfs(int(f.Fd())))
	expect.NoError(t, f.Close())
}

// Every step can be repeated after a crash at any point.
func TestRepeated(t *testing.T) {
	d := newDisk(t)
	expect.NoError(t, d.Detach(ctx(t)))                                                  // of a disk that does not exist
	expect.NoError(t, os.WriteFile(d.Image+".new", []byte("killed during mkfs"), 0o600)) // left by a process that was killed
	if d.Exists() {
		t.Error("an unfinished image counts as a disk")
	}
	expect.NoError(t, d.Create(ctx(t), size))
	expect.NoError(t, d.Attach(ctx(t)))
	file := filepath.Join(d.Dir, "kept")
	expect.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	expect.NoError(t, d.Create(ctx(t), size))
	expect.NoError(t, d.Attach(ctx(t)))
	expect.NoError(t, unix.Unmount(d.Dir, 0)) // A second mount would remain here.
	if _, err := os.Stat(file); err == nil {
		t.Error("the second call mounted the disk a second time")
	}
	loop, err := newLoop(d.Image) // A process was killed between the device and the mount. Its device still exists.
	expect.NoError(t, err)
	found, err := findLoop(d.Image)
	expect.NoError(t, err)
	flags, err := unix.FcntlInt(found.Fd(), unix.F_GETFL, 0)
	if err = errors.Join(err, found.Close()); err != nil || found.Name() != loop.Name() || flags&unix.O_ACCMODE != unix.O_RDONLY {
		t.Errorf("found %s with the flags %#o, %v; the device is %s, and each open for writing causes an event of udev", found.Name(), flags, err, loop.Name())
	}
	expect.NoError(t, d.Attach(ctx(t)))
	if device, err := d.mounted(); err != nil || "/dev/"+device != loop.Name() {
		t.Errorf("the disk is on %s, %v; its device is %s", device, err, loop.Name())
	}
	expect.NoError(t, loop.Close())
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	expect.NoError(t, d.Detach(ctx(t)))
	if loop, err := findLoop(d.Image); loop != nil || err != nil {
		t.Errorf("the device of a detached disk: %v, %v", loop, err)
	}
	expect.NoError(t, d.Detach(ctx(t)))
}

// A file system with an error is reported. It works after the next Attach.
func TestErrors(t *testing.T) {
	d := attached(t)
	expect.NoError(t, os.WriteFile(filepath.Join(d.Dir, "kept"), []byte("x"), 0o600))
	syncDisk(t, d)
	ended, end := context.WithCancel(ctx(t))
	end()
	if err := d.AwaitError(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("a disk without errors: %v", err)
	}
	found := make(chan error, 1)
	go func() { found <- d.AwaitError(ctx(t)) }()
	device, err := d.mounted()
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile("/sys/fs/ext4/"+device+"/trigger_fs_error", []byte("a test"), 0))
	expect.NoError(t, <-found)
	if err := os.WriteFile(filepath.Join(d.Dir, "more"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write after an error: %v, want EROFS", err)
	}
	reader, err := os.Open(filepath.Join(d.Dir, "kept"))
	expect.NoError(t, err)
	d.Releasing = func() { expect.NoError(t, reader.Close()) }
	expect.NoError(t, d.Attach(ctx(t)))
	expect.NoError(t, os.WriteFile(filepath.Join(d.Dir, "more"), nil, 0o600))
	if _, err := os.Stat(filepath.Join(d.Dir, "kept")); err != nil {
		t.Error(err)
	}
	if err := d.AwaitError(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("a repaired disk: %v", err)
	}
}

// Thaw ends the freeze of a file system, and a frozen file system is detached. Thaw leaves the file system of an unmounted folder as it is.
func TestFrozen(t *testing.T) {
	d, host := attached(t), attached(t)
	for range 2 { // The kernel refuses a second freeze.
		expect.NoError(t, request(t, d.Dir, fifreeze))
		expect.NoError(t, d.Thaw())
	}
	expect.NoError(t, d.Thaw())
	expect.NoError(t, request(t, d.Dir, fifreeze))
	expect.NoError(t, d.Detach(ctx(t)))
	d.Dir = filepath.Join(host.Dir, "lost+found")
	expect.NoError(t, request(t, host.Dir, fifreeze))
	expect.NoError(t, d.Thaw())
	if err := request(t, host.Dir, fithaw); err != nil {
		t.Errorf("the file system of an unmounted folder was thawed: %v", err)
	}
}

// fifreeze is the request FIFREEZE of ioctl(2), as fsfreeze(8) sends it.
const fifreeze = 0xc0045877

func request(t *testing.T, dir string, number uint) error {
	t.Helper()
	f, err := os.Open(dir)
	expect.NoError(t, err)
	defer func() { _ = f.Close() }()
	return unix.IoctlSetInt(int(f.Fd()), number, 0)
}

// A file system that cannot be repaired is not mounted. The message contains the cause.
func TestDamaged(t *testing.T) {
	d := newDisk(t)
	expect.NoError(t, d.Create(ctx(t), size))
	f, err := os.OpenFile(d.Image, os.O_WRONLY, 0)
	expect.NoError(t, err)
	_, err = f.WriteAt(make([]byte, size/4), 0)
	expect.NoError(t, errors.Join(err, f.Close()))
	if err := d.Attach(ctx(t)); err == nil {
		t.Error("a damaged disk is mounted")
	} else {
		t.Log(err)
	}
}

// A check that did not come to its end says nothing about the file system: its error must not make anybody give up intact data.
func TestCheckResult(t *testing.T) {
	const damaged = "damaged"
	for script, want := range map[string]string{
		"exit 0": "", "exit 1": "", "exit 4": damaged, "exit 5": damaged, "exit 8": damaged,
		"kill -KILL $$": "begins again", "kill -TERM $$": "begins again", "exit 32": "begins again",
	} {
		err := checkResult(run(ctx(t), "sh", "-c", script))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || want != damaged && err != nil && strings.Contains(err.Error(), damaged) {
			t.Errorf("%s: %v, want %q", script, err, want)
		}
	}
	if err := checkResult(run(ctx(t), "no-such-program")); err == nil || strings.Contains(err.Error(), damaged) || !strings.Contains(err.Error(), "e2fsprogs") {
		t.Errorf("without e2fsck: %v", err)
	}
}

// A disk grows in use and keeps its files. The kernel requires CAP_SYS_RESOURCE for it. Without this capability, the disk keeps
// its size and works.
func TestGrow(t *testing.T) {
	d := attached(t)
	file := filepath.Join(d.Dir, "kept")
	expect.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	before, _, err := Space(d.Dir)
	expect.NoError(t, err)
	allowed := hasCapability(t, unix.CAP_SYS_RESOURCE)
	for range 2 {
		if err := d.Grow(ctx(t), 2*size); (err == nil) != allowed {
			t.Fatalf("with CAP_SYS_RESOURCE %v: %v", allowed, err)
		}
	}
	after, _, err := Space(d.Dir)
	expect.NoError(t, err)
	if grown := after > before*3/2; grown != allowed {
		t.Errorf("the disk has %d bytes, had %d", after, before)
	}
	expect.NoError(t, os.WriteFile(filepath.Join(d.Dir, "more"), nil, 0o600))
	expect.NoError(t, d.Detach(ctx(t)))
	expect.NoError(t, d.Attach(ctx(t))) // The check of the file system accepts it.
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// A growth that does not fit leaves the file as it was. The growth of a sparse file reserves only the new part.
func TestGrowthOfTheFile(t *testing.T) {
	const mib = 1 << 20
	host := attached(t)
	d := Disk{Image: filepath.Join(host.Dir, "disk.img"), Preallocate: true}
	expect.NoError(t, Disk{}.newFile(d.Image, 16*mib))
	for _, step := range []struct {
		to, size, occupied int64
		fails              bool
	}{{32 * mib, 32 * mib, 16 * mib, false}, {2 * size, 32 * mib, 16 * mib, true}} {
		if err := d.growFile(step.to); errors.Is(err, unix.ENOSPC) != step.fails {
			t.Errorf("to %d bytes: %v", step.to, err)
		}
		info, err := os.Stat(d.Image)
		expect.NoError(t, err)
		if used := occupied(t, d); info.Size() != step.size || used < step.occupied || used > step.occupied+mib {
			t.Errorf("to %d bytes: the file has %d bytes and occupies %d", step.to, info.Size(), used)
		}
	}
}

func hasCapability(t *testing.T, number int) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	expect.NoError(t, unix.Capget(&header, &data[0]))
	return data[number/32].Effective&(1<<(number%32)) != 0
}
