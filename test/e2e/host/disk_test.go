//go:build e2e

package host_test

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// small returns a machine with a disk of 32 MiB. Two such disks fit on the disks of these tests.
func small(n int) *hostpb.MachineSpec {
	spec := blue.machine(n)
	spec.DiskBytes = 32 << 20
	return spec
}

// A host whose disk fails keeps its machines, also across a restart of capstand, and refuses new ones with the reason.
// It recovers with the disk.
func TestDiskFails(t *testing.T) {
	for name, disk := range harness.Disks {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			dir, fail, mend := disk(t, "96")
			c := newCapstandIn(t, filepath.Join(dir, "host"), "--preallocate-disks")
			was := c.make(small(10))
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
			c.make(small(11))
			expect.NoError(t, answers(blue.address(10), "blue-10"))
		})
	}
}

// refusedByDisk checks that a new machine is refused and leaves no trace, and that the existing machine answers.
func refusedByDisk(t *testing.T, c *capstand) {
	t.Helper()
	spec := small(11)
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: make([]byte, 1<<20)}); err == nil {
		t.Error("a machine is created on a disk that cannot be written to")
	} else {
		t.Log(err)
	}
	list, err := c.ListMachines(c.ctx(), &hostpb.ListMachinesRequest{})
	expect.NoError(t, err)
	if len(list.Machines) != 1 || list.Machines[0].Status.Phase != hostpb.MachineStatus_RUNNING {
		t.Errorf("machines: %v", list.Machines)
	}
	expect.NoError(t, gone(filepath.Join(c.root, "machines", spec.Id)))
	expect.NoError(t, answers(blue.address(10), "blue-10"))
}

// A machine that fills its disk gets ENOSPC. Its neighbour keeps its space. The host loses only the size of the disk,
// and gets it back when the machine is deleted.
func TestMachineFillsItsDisk(t *testing.T) {
	leavesNothing(t)
	dir, _, _ := harness.Disks["no space"](t, "256")
	c := newCapstandIn(t, filepath.Join(dir, "host"))
	full := blue.machine(10)
	c.make(full)
	c.make(blue.machine(11))
	free := func() int64 {
		t.Helper()
		_, free, err := machinedisk.Space(dir)
		expect.NoError(t, err)
		return free
	}
	before := free()
	if out := inside(t, blue.address(10), "dd if=/dev/zero of=/var/lib/full bs=1M 2>&1; sync; df -k --output=size / | tail -1"); !strings.Contains(out, "No space left on device") {
		t.Fatalf("the machine writes more than its disk has: %s", out)
	}
	if used := before - free(); used > full.DiskBytes || used < full.DiskBytes/2 {
		t.Errorf("a full disk of %d bytes takes %d bytes of the host", full.DiskBytes, used)
	}
	inside(t, blue.address(11), "dd if=/dev/zero of=/var/lib/some bs=1M count=20 conv=fsync && rm /var/lib/some")
	c.kill() // A full machine does not prevent the next start of capstand.
	c.start()
	c.await(full.Id, running(0))
	c.deleteMachine(full)
	eventually(t, "the host has its space again", func() error {
		if free() < before {
			return fmt.Errorf("%d of %d bytes", free(), before)
		}
		return nil
	})
}

// A machine whose disk returns I/O errors is restarted to repair its file system. It reports the error until the repair
// succeeds.
func TestMachineDiskErrors(t *testing.T) {
	leavesNothing(t)
	dir, fail, mend := harness.Disks["I/O errors"](t, "96")
	c := newCapstandIn(t, filepath.Join(dir, "host"))
	was := c.make(blue.machine(10))
	inside(t, blue.address(10), "echo kept > /var/lib/kept; sync")
	fail()
	eventually(t, "the machine is restarted", func() error {
		_, _, _ = get(blue.address(10), "/run", "command", "dd if=/dev/zero of=/var/lib/much bs=1M count=20 conv=fsync; rm /var/lib/much; sync")
		m, err := c.GetMachine(c.ctx(), &hostpb.GetMachineRequest{Id: was.Spec.Id})
		if err == nil && m.Status.Phase != hostpb.MachineStatus_RESTARTING && m.Status.Restarts == 0 {
			err = fmt.Errorf("%v", m.Status)
		}
		return err
	})
	mend()
	c.await(was.Spec.Id, running(was.Status.Pid))
	eventually(t, "the machine writes again", func() error {
		code, out, err := get(blue.address(10), "/run", "command", "cat /var/lib/kept && touch /var/lib/more && sync")
		if err == nil && (code != http.StatusOK || !strings.Contains(out, "kept")) {
			err = errors.New(out)
		}
		return err
	})
}
