//go:build e2e

package host_test

import (
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/test/e2e/harness"
)

// A host whose disk fails keeps the machines that it has, also across a restart of capstand, and refuses new ones
// with the reason. When the disk works again, so does everything.
func TestDiskFails(t *testing.T) {
	for name, disk := range harness.Disks {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			dir, fail, mend := disk(t, "96")
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
