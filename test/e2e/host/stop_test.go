//go:build e2e

package host_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// startDeletion starts the deletion of a machine. giveUp ends the request of the client.
func (c *capstand) startDeletion(spec *hostpb.MachineSpec) (giveUp func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	go func() { _, _ = c.DeleteMachine(ctx, deletion(spec)) }()
	c.t.Cleanup(cancel)
	return cancel
}

// A deleted machine ends when its pods have stopped. A capstand that starts meanwhile continues the deletion.
func TestDeletionWaitsForPods(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t, "--stop-pods-within", "50s")
	m := c.make(blue.machine(10))
	spec := m.Spec
	stopping := func(m *hostpb.Machine) bool {
		return m.Status.Phase == hostpb.MachineStatus_DELETING && strings.Contains(m.Status.Message, "pods of the machine stop, within 50s")
	}
	inside(t, blue.address(10), "touch /tmp/hold")
	giveUp := c.startDeletion(spec)
	c.await(spec.Id, stopping)
	giveUp()
	if asked := inside(t, blue.address(10), "cat /tmp/asked; rm /tmp/asked"); asked != "within=50s" {
		t.Errorf("capstand asked for %q", asked)
	}
	c.kill()
	c.start()
	c.await(spec.Id, stopping)
	eventually(t, "capstand asks again", func() error {
		if asked := inside(t, blue.address(10), "cat /tmp/asked || true"); asked != "within=50s" {
			return fmt.Errorf("it asked for %q", asked)
		}
		return nil
	})
	expect.NoError(t, os.Remove(fmt.Sprintf("/proc/%d/root/tmp/hold", m.Status.Pid))) // A request to the machine can end with the machine.
	c.deleteMachine(spec)
}

// The deletion continues when PID 1 ends while the pods stop.
func TestDeletionOfKilledMachine(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t, "--stop-pods-within", "1h")
	m := c.make(blue.machine(10))
	inside(t, blue.address(10), "touch /tmp/hold")
	giveUp := c.startDeletion(m.Spec)
	eventually(t, "capstand asks PID 1", func() error {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/root/tmp/asked", m.Status.Pid))
		return err
	})
	giveUp()
	expect.NoError(t, syscall.Kill(int(m.Status.Pid), syscall.SIGKILL))
	c.deleteMachine(m.Spec)
}

// With the limit 0, capstand kills the pods. TestStopPods of internal/host proves that it does not ask PID 1.
func TestDeletionWithoutWait(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t, "--stop-pods-within", "0s")
	spec := c.make(blue.machine(10)).Spec
	inside(t, blue.address(10), "touch /tmp/hold")
	c.deleteMachine(spec)
}

// When the host shuts down, capstand stops the pods and then the machines. They start again with the next capstand. Without a
// shutdown, the end of capstand leaves them alone.
func TestHostShutsDown(t *testing.T) {
	leavesNothing(t)
	systemd := t.TempDir()
	state := func(state string) {
		expect.NoError(t, os.WriteFile(filepath.Join(systemd, "systemctl"), []byte("#!/bin/sh\n[ $1 = is-system-running ] && echo "+state+"\nexit 1\n"), 0o755))
	}
	t.Setenv("PATH", systemd+":"+os.Getenv("PATH"))
	state("running")
	c := newCapstand(t)
	before := c.make(blue.machine(10))
	process := fmt.Sprintf("/proc/%d", before.Status.Pid)
	c.end(syscall.SIGTERM)
	if _, err := os.Stat(process); err != nil {
		t.Errorf("the machine ended with capstand: %v", err)
	}
	c.start()
	state("stopping")
	inside(t, blue.address(10), "touch /tmp/hold")
	c.signal(syscall.SIGTERM)
	eventually(t, "capstand asks the machine to stop its pods", func() error { _, err := os.Stat(process + "/root/tmp/asked"); return err })
	expect.NoError(t, os.Remove(process+"/root/tmp/hold")) // It fails if the machine has ended before its pods.
	c.awaitEnd()
	eventually(t, "the end of the machine", func() error { return gone(process) })
	asked, stopped := strings.Index(c.output.String(), "stopping its machines"), strings.Index(c.output.String(), "Machine stopped")
	if asked < 0 || stopped < asked {
		t.Errorf("output of capstand:\n%s", c.output)
	}
	state("running")
	c.start()
	c.await(before.Spec.Id, func(m *hostpb.Machine) bool {
		return m.Status.Phase == hostpb.MachineStatus_RUNNING && m.Status.Pid != before.Status.Pid
	})
}
