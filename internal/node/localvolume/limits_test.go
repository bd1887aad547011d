package localvolume

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/projectquota"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/thread"
)

const (
	mebi       = 1 << 20
	volumeSize = 8 * mebi
)

// disk returns folders of volumes on a disk with project quotas.
func disk(t *testing.T) Folders {
	t.Helper()
	dir := t.TempDir()
	image, top := filepath.Join(dir, "disk.img"), filepath.Join(dir, "top")
	expect.NoError(t, os.WriteFile(image, nil, 0o600))
	expect.NoError(t, os.Truncate(image, 64*mebi))
	expect.NoError(t, os.Mkdir(top, 0o755))
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "quota,project", "-E", "quotatype=prjquota", image},
		{"mount", "-t", "ext4", "-o", "loop,prjquota", image, top},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			if os.Getenv("CAPSTAN_KERNEL") == "" {
				t.Skip("this kernel has no project quotas, or the test is not root: run make test-quota")
			}
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(top, 0)) })
	f := Folders{Dir: filepath.Join(top, "volumes"), Top: top}
	expect.NoError(t, f.Enforced())
	expect.NoError(t, os.Chmod(f.Dir, 0o711)) // Pods enter a volume by a mount; the users of this test need the path.
	for parent := dir; parent != "/"; parent = filepath.Dir(parent) {
		expect.NoError(t, os.Chmod(parent, 0o755))
	}
	return f
}

func nameOf(n int) string { return fmt.Sprintf("pvc-%08d%s", n, uid[8:]) }

// create makes the volume n and returns its folder and its project id.
func create(t *testing.T, f Folders, n int, size int64) (string, uint32) {
	t.Helper()
	expect.NoError(t, f.Create(nameOf(n)))
	expect.NoError(t, f.Limit(nameOf(n), size))
	path := filepath.Join(f.Dir, nameOf(n))
	return path, project(t, path)
}

// remove takes the steps of the node agent.
func remove(t *testing.T, f Folders, n int) {
	t.Helper()
	for _, step := range []func(string) error{f.Empty, f.Unlimit, f.Remove} {
		expect.NoError(t, step(nameOf(n)))
	}
}

func project(t *testing.T, path string) uint32 {
	t.Helper()
	f, err := os.Open(path)
	expect.NoError(t, err)
	defer func() { _ = f.Close() }()
	id, err := projectquota.ID(f)
	expect.NoError(t, err)
	return id
}

func quota(t *testing.T, f Folders, id uint32) projectquota.Quota {
	t.Helper()
	dir, err := os.Open(f.Dir)
	expect.NoError(t, err)
	defer func() { _ = dir.Close() }()
	q, err := projectquota.Get(dir, id)
	expect.NoError(t, err)
	return q
}

// as runs f in a thread of another user, or of root with the capabilities of a container.
func as(t *testing.T, user int, f func() error) error {
	t.Helper()
	var err error
	thread.Throwaway(func() {
		if err = become(user); err == nil {
			err = f()
		}
	})
	return err
}

// become changes this thread only.
func become(user int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	data[0].Permitted, data[0].Inheritable = data[0].Effective, 0
	if err := unix.Capset(&header, &data[0]); err != nil {
		return err
	}
	if user == 0 {
		return nil
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(user), uintptr(user), uintptr(user)); errno != 0 {
		return errno
	}
	return nil
}

// fill writes to a file until an error. It returns the number of bytes in the file.
func fill(path string, most int) (written int, err error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 256<<10)
	for written < most {
		n, err := f.Write(block[:min(len(block), most-written)])
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, f.Sync()
}

func full(err error) bool { return errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) }

// TestLimits: a pod of any user fills its volume up to its size and its number of files. Another volume and the rest of the disk
// keep their space. The file system shows the size of the claim.
func TestLimits(t *testing.T) {
	f := disk(t)
	first, id := create(t, f, 1, volumeSize)
	second, other := create(t, f, 2, 2*volumeSize)
	if id < firstProject || other < firstProject || id == other {
		t.Fatalf("projects %d and %d", id, other)
	}
	sizeOf := func(path string, want int64) {
		var fs unix.Statfs_t
		expect.NoError(t, unix.Statfs(path, &fs))
		if got := int64(fs.Blocks) * fs.Bsize; got != want {
			t.Errorf("%s has %d bytes, want %d", path, got, want)
		}
		if fs.Files != maxFiles(want) {
			t.Errorf("%s has %d files, want %d", path, fs.Files, maxFiles(want))
		}
	}
	sizeOf(first, volumeSize)
	sizeOf(second, 2*volumeSize)
	if unwritten, err := f.Unwritten(false); err != nil || unwritten > 3*volumeSize || unwritten < 3*volumeSize*9/10 {
		t.Errorf("%d bytes of both volumes are not written: %v", unwritten, err)
	}
	if taken, err := f.Taken(nameOf(2), false); err != nil || taken != 2*volumeSize {
		t.Errorf("the second volume has taken %d bytes: %v", taken, err)
	}
	for _, user := range []int{1000, 0} {
		folder := filepath.Join(first, fmt.Sprint("of-", user))
		file, neighbour := filepath.Join(folder, "file"), filepath.Join(second, fmt.Sprint("of-", user))
		written := 0
		err := as(t, user, func() (err error) {
			if err = os.Mkdir(folder, 0o755); err == nil {
				written, err = fill(file, 2*volumeSize)
			}
			return err
		})
		if !full(err) || written > volumeSize || written < volumeSize*9/10 {
			t.Errorf("user %d wrote %d bytes to a volume of %d: %v", user, written, volumeSize, err)
		}
		if project(t, folder) != id || project(t, file) != id {
			t.Errorf("user %d: the project of a folder is %d, of a file %d, want %d", user, project(t, folder), project(t, file), id)
		}
		expect.NoError(t, as(t, user, func() error {
			_, err := fill(neighbour, mebi)
			return err
		}))
		expect.NoError(t, os.Remove(file))
	}
	expect.NoError(t, as(t, 0, func() error {
		_, err := fill(filepath.Join(f.Top, "other"), 2*volumeSize)
		return err
	}))
	made := 0
	err := as(t, 1000, func() (err error) {
		for ; err == nil && made <= 2*int(maxFiles(volumeSize)); made++ {
			err = os.WriteFile(filepath.Join(first, fmt.Sprint("empty-", made)), nil, 0o600)
		}
		return err
	})
	if !full(err) || made > int(maxFiles(volumeSize)) || made < int(maxFiles(volumeSize))*9/10 {
		t.Errorf("%d files in a volume with %d: %v", made, maxFiles(volumeSize), err)
	}
	// No file moves to another project.
	expect.NoError(t, os.WriteFile(filepath.Join(f.Top, "outside"), nil, 0o600))
	expect.NoError(t, os.WriteFile(filepath.Join(second, "inside"), nil, 0o600))
	for from, to := range map[string]string{filepath.Join(f.Top, "outside"): filepath.Join(second, "a"), filepath.Join(second, "inside"): filepath.Join(first, "b")} {
		if err := os.Link(from, to); !errors.Is(err, unix.EXDEV) {
			t.Errorf("a hard link into a volume: %v", err)
		}
		if err := unix.Rename(from, to); !errors.Is(err, unix.EXDEV) {
			t.Errorf("a rename into a volume: %v", err)
		}
	}
}

// TestProjects: agents that end anywhere give no project id twice, and the limits go with the volume.
func TestProjects(t *testing.T) {
	f := disk(t)
	path, id := create(t, f, 1, volumeSize)
	// An agent that ended before the limits were set.
	expect.NoError(t, os.Mkdir(filepath.Join(f.Dir, nameOf(2)), 0o777))
	root, err := os.OpenRoot(f.Dir)
	expect.NoError(t, err)
	defer func() { _ = root.Close() }()
	half, err := root.Open(nameOf(2))
	expect.NoError(t, err)
	halfID, err := freeProject(root, half)
	expect.NoError(t, err)
	expect.NoError(t, projectquota.SetID(half, halfID))
	expect.NoError(t, half.Close())
	_, third := create(t, Folders{Dir: f.Dir, Top: f.Top}, 3, volumeSize)
	_, again := create(t, f, 2, 2*volumeSize)
	_, same := create(t, f, 1, volumeSize)
	if again != halfID || same != id || id == halfID || third == id || third == halfID {
		t.Errorf("projects %d, %d then %d, %d then %d", third, halfID, again, id, same)
	}
	if q := quota(t, f, halfID); q.MaxBytes != 2*volumeSize || q.MaxFiles != maxFiles(2*volumeSize) {
		t.Errorf("the volume of two agents has the limits %+v", q)
	}
	// A process that still has a file of a volume that is gone: the next volume does not count it.
	open, err := os.Create(filepath.Join(path, "open"))
	expect.NoError(t, err)
	_, err = open.Write(make([]byte, mebi))
	expect.NoError(t, err)
	remove(t, f, 1)
	if q := quota(t, f, id); q.MaxBytes != 0 || q.MaxFiles != 0 || q.Files == 0 {
		t.Errorf("a volume that is gone has %+v", q)
	}
	if _, next := create(t, f, 4, volumeSize); next == id {
		t.Errorf("the project %d has a file of another volume", next)
	}
	expect.NoError(t, open.Close())
	// An agent that ended after the limits were removed.
	expect.NoError(t, f.Empty(nameOf(2)))
	expect.NoError(t, f.Unlimit(nameOf(2)))
	if _, next := create(t, f, 5, volumeSize); next == halfID {
		t.Errorf("the project %d has a folder", next)
	}
	remove(t, f, 2)
	if q := quota(t, f, halfID); q != (projectquota.Quota{}) {
		t.Errorf("a volume that is gone has %+v", q)
	}
	// A pod without a seccomp profile has given its volume the id of another one.
	thief, err := root.Open(nameOf(4))
	expect.NoError(t, err)
	defer func() { _ = thief.Close() }()
	expect.NoError(t, projectquota.SetID(thief, third))
	remove(t, f, 4)
	if q := quota(t, f, third); q.MaxBytes != volumeSize {
		t.Errorf("the limits of another volume are %+v", q)
	}
}

func TestClears(t *testing.T) {
	for _, c := range []struct {
		id   uint32
		used []uint32
		want bool
	}{
		{firstProject, []uint32{firstProject}, true},
		{firstProject, []uint32{firstProject + 1, firstProject}, true},
		{firstProject, []uint32{firstProject, firstProject}, false},
		{0, []uint32{0}, false},
		{1048577, []uint32{1048577}, false},
	} {
		used := slices.Clone(c.used)
		if got := clears(c.id, c.used); got != c.want || !slices.Equal(used, c.used) {
			t.Errorf("%d of %v: %t", c.id, c.used, got)
		}
	}
}

// TestNotEnforced: a folder of a larger disk has no limits, also if that disk has quotas.
func TestNotEnforced(t *testing.T) {
	dir := t.TempDir()
	f := Folders{Dir: filepath.Join(dir, "volumes"), Top: dir}
	if err := f.Enforced(); err == nil || !strings.Contains(err.Error(), "not on a disk of its own") {
		t.Errorf("a folder is a disk: %v", err)
	}
}
