//go:build e2e

package host_test

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// fullDisk makes a small disk and returns where it is mounted, and what makes writes to it fail and work again.
type fullDisk func(t *testing.T) (dir string, fail, mend func())

// noSpace is a tmpfs: writes fail with ENOSPC.
func noSpace(t *testing.T) (dir string, fail, mend func()) {
	dir = t.TempDir()
	mounted(t, "-t tmpfs -o size=64m,mode=755 tmpfs", dir)
	fail, mend = filler(dir)
	return dir, fail, mend
}

// ioErrors is a loop device over a sparse file whose own disk gets full: the device cannot write and reports EIO. Without
// a journal the file system works again when the device does.
func ioErrors(t *testing.T) (dir string, fail, mend func()) {
	below := t.TempDir()
	mounted(t, "-t tmpfs -o size=96m tmpfs", below)
	image := filepath.Join(below, "image")
	host(t, "truncate -s 256M "+image+" && mkfs.ext4 -q -O ^has_journal -E lazy_itable_init=1 "+image)
	dir = t.TempDir()
	mounted(t, "-o loop,errors=continue "+image, dir)
	fail, mend = filler(below)
	return dir, fail, mend
}

func mounted(t *testing.T, what, dir string) {
	t.Helper()
	host(t, "mount "+what+" "+dir)
	t.Cleanup(func() { host(t, "umount "+dir) })
}

// filler fills a file system to the last byte.
func filler(dir string) (fail, mend func()) {
	file := filepath.Join(dir, "filler")
	return func() { _ = tryHost("cat /dev/zero > " + file + "; sync " + file) }, func() { _ = os.Remove(file) }
}

// A host whose disk fails keeps the machines that it has, also across a restart of capstand, and refuses new ones
// with the reason. When the disk works again, so does everything.
func TestDiskFails(t *testing.T) {
	for name, disk := range map[string]fullDisk{"no space": noSpace, "I/O errors": ioErrors} {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			dir, fail, mend := disk(t)
			c := newCapstandIn(t, filepath.Join(dir, "host"))
			was := c.make(blue.machine(10))
			fail()
			refusedByDisk(t, c)
			c.kill()
			c.start()
			now := c.await(was.Spec.Id, running(0))
			if now.Status.Pid != was.Status.Pid {
				t.Errorf("PID 1 was %d, is %d", was.Status.Pid, now.Status.Pid)
			}
			refusedByDisk(t, c)
			mend()
			c.make(blue.machine(11))
			check(t, answers(blue.address(10), "blue-10"))
		})
	}
}

// refusedByDisk checks that a new machine is refused and leaves nothing, and that the machine of before answers.
func refusedByDisk(t *testing.T, c *capstand) {
	t.Helper()
	spec := blue.machine(11)
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: make([]byte, 1<<20)}); err == nil {
		t.Error("a machine is made on a disk that cannot be written to")
	} else {
		t.Log(err)
	}
	list, err := c.ListMachines(c.ctx(), &hostpb.ListMachinesRequest{})
	check(t, err)
	if len(list.Machines) != 1 || list.Machines[0].Status.Phase != hostpb.MachineStatus_RUNNING {
		t.Errorf("machines: %v", list.Machines)
	}
	check(t, gone(filepath.Join(c.root, "machines", spec.Id)))
	check(t, answers(blue.address(10), "blue-10"))
}
