//go:build e2e

package host_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

func running(pidNot int32) func(*hostpb.Machine) bool {
	return func(m *hostpb.Machine) bool {
		return m.Status.Phase == hostpb.MachineStatus_RUNNING && m.Status.Pid != pidNot && len(m.Status.Services) > 0
	}
}

// capstand is killed and started again. The machine does not restart, and the output of its init in the meantime is
// kept.
func TestCapstandKilled(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	c.kill()
	if got := inside(t, blue.address(10), "echo while away > /proc/1/fd/1; echo alive"); got != "alive" {
		t.Fatalf("the output of the machine without capstand is %q", got)
	}
	c.start()
	now := c.await(was.Spec.Id, running(0))
	if now.Status.Pid != was.Status.Pid || now.Status.Restarts != 0 || !proto.Equal(now.Spec, was.Spec) {
		t.Errorf("another machine was adopted: was %v, is %v", was, now)
	}
	if log := c.logs(was.Spec.Id, "init", 1); log != "while away\n" {
		t.Errorf("init log ends with %q", log)
	}
	// The same holds after SIGTERM.
	c.end(syscall.SIGTERM)
	c.start()
	if now := c.await(was.Spec.Id, running(0)); now.Status.Pid != was.Status.Pid {
		t.Errorf("PID 1 is %d after a restart of capstand, want %d", now.Status.Pid, was.Status.Pid)
	}
}

// A machine whose PID 1 dies starts again at once, from its own disk, with its address and without bootstrap data, also
// if capstand did not run when PID 1 died.
func TestPID1Killed(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	mac := inside(t, blue.address(10), "cat /sys/class/net/eth0/address; echo kept > /var/lib/kept")

	died := time.Now()
	expect.NoError(t, syscall.Kill(int(was.Status.Pid), syscall.SIGKILL))
	now := c.await(was.Spec.Id, running(was.Status.Pid))
	t.Logf("runs again after %s", time.Since(died).Round(time.Millisecond))
	if now.Status.Restarts != 1 || now.Status.Bootstrap != hostpb.MachineStatus_SUCCEEDED {
		t.Errorf("status after restart: %v", now.Status)
	}
	eventually(t, "the machine answers", func() error { _, _, err := get(blue.address(10), "/name"); return err })
	if got := inside(t, blue.address(10), "cat /sys/class/net/eth0/address /var/lib/kept; ls --ignore=resolv.conf /run/capstan"); got != mac+"\nkept\ninit.sock\nmetadata.json" {
		t.Errorf("after restart: %q", got)
	}

	c.kill()
	expect.NoError(t, syscall.Kill(int(now.Status.Pid), syscall.SIGKILL))
	c.start()
	again := c.await(was.Spec.Id, running(now.Status.Pid))
	if again.Status.Restarts != 2 {
		t.Errorf("restarts %d, want 2", again.Status.Restarts)
	}
}

// After a reboot of the host, there are no processes, links, mounts or rules, and /run is empty. capstand creates all of
// them again, with the same addresses.
func TestReboot(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	c.make(blue.machine(11))
	c.balancer(blue, 10)
	// A reboot ends every process. The test finds the balancer's process by its cgroup, which capstand sets after the
	// start.
	eventually(t, "the balancer serves", func() error { return answers(blue.address(1), "blue-10") })
	c.kill()
	reboot(t, c, blue, 10, 11)
	c.start()
	now := c.await(was.Spec.Id, running(was.Status.Pid))
	c.await(blue.machine(11).Id, running(0))
	if now.Status.Bootstrap != hostpb.MachineStatus_SUCCEEDED {
		t.Errorf("status after reboot: %v", now.Status)
	}
	eventually(t, "the balancer serves", func() error { return answers(blue.address(1), "blue-10") })
	if got := inside(t, blue.address(10), "cat /var/lib/bootstrapped"); got != "#cloud-config" {
		t.Errorf("the disk holds %q", got)
	}
}

// reboot removes everything that a reboot would remove, for the named machines of one capstand that does not run.
func reboot(t *testing.T, c *capstand, k cluster, machines ...int) {
	t.Helper()
	killGroup(t, hostID(t, c))
	host(t, "ip link del "+bridge(k))
	for _, n := range machines {
		host(t, "umount -l /run/capstan/netns/"+hash(k.machine(n).Id))
		expect.NoError(t, os.Remove("/run/capstan/netns/"+hash(k.machine(n).Id)))
		host(t, "umount "+filepath.Join(c.root, "machines", k.machine(n).Id, "rootfs"))
		host(t, "umount "+filepath.Join(c.root, "run", k.machine(n).Id))
	}
	expect.NoError(t, os.RemoveAll("/run/capstan/networks/"+hash(k.id)))
	host(t, "nft delete table inet capstan-"+hash(k.id))
	expect.NoError(t, os.WriteFile(filepath.Join(c.root, "boot-id"), []byte("another boot"), 0o644))
}

// A machine whose disk is lost is failed, with a message: with an empty disk it would be another machine.
func TestDiskLost(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	eventually(t, "bootstrap data erased", func() error { return gone(filepath.Join(c.root, "machines", was.Spec.Id, "bootstrap-data")) })
	c.kill()
	expect.NoError(t, syscall.Kill(int(was.Status.Pid), syscall.SIGKILL))
	host(t, "umount "+filepath.Join(c.root, "machines", was.Spec.Id, "rootfs"))
	expect.NoError(t, os.Remove(filepath.Join(c.root, "machines", was.Spec.Id, "disk.img")))
	c.start()
	m := c.await(was.Spec.Id, func(m *hostpb.Machine) bool { return m.Status.Phase == hostpb.MachineStatus_FAILED })
	if !strings.Contains(m.Status.Message, "lost") {
		t.Errorf("message %q", m.Status.Message)
	}
	c.kill()
	c.start()
	c.await(was.Spec.Id, func(m *hostpb.Machine) bool { return m.Status.Phase == hostpb.MachineStatus_FAILED })
}

// capstand is killed while it creates and deletes machines. At its next start it completes its operations, and removes
// all traces of deleted machines.
func TestKilledWhileBusy(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	for n := 10; n < 14; n++ {
		spec := blue.machine(n)
		_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: []byte("#cloud-config\n")})
		expect.NoError(t, err)
		time.Sleep(time.Duration(n-10) * 40 * time.Millisecond) // Each kill is at another moment of the start.
		c.kill()
		c.start()
		m := c.await(spec.Id, running(0))
		if m.Status.Bootstrap != hostpb.MachineStatus_SUCCEEDED {
			t.Errorf("machine %s: %v", spec.Name, m.Status)
		}
	}
	for n := 10; n < 14; n++ {
		id := blue.machine(n).Id
		go func() { _, _ = c.HostClient.DeleteMachine(c.ctx(), deletion(blue.machine(n))) }()
		eventually(t, "tombstone", func() error { _, err := os.Stat(filepath.Join(c.root, "tombstones", "machine."+id)); return err })
		c.kill()
		c.start()
		eventually(t, "machine is removed", func() error {
			if _, err := c.GetMachine(c.ctx(), &hostpb.GetMachineRequest{Id: id}); err == nil {
				return errors.New("it still exists")
			}
			return gone(filepath.Join(c.root, "machines", id))
		})
	}
}

// Bootstrap data is on disk only until its use, readable only by root. A failure is reported (IM-08).
func TestBootstrapData(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	spec := blue.machine(10)
	m, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec})
	expect.NoError(t, err)
	if m.Status.Phase != hostpb.MachineStatus_PENDING || m.Status.Bootstrap != hostpb.MachineStatus_WAITING {
		t.Errorf("without bootstrap data: %v", m.Status)
	}
	_, err = c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: []byte("fail s3cret")})
	expect.NoError(t, err)
	c.await(spec.Id, func(m *hostpb.Machine) bool { return m.Status.Bootstrap == hostpb.MachineStatus_BOOTSTRAP_FAILED })
	eventually(t, "bootstrap data erased", func() error { return gone(filepath.Join(c.root, "machines", spec.Id, "bootstrap-data")) })
	if strings.Contains(c.output.String(), "s3cret") {
		t.Error("capstand logged bootstrap data")
	}
	host(t, fmt.Sprintf("! grep -rl s3cret %s --exclude-dir=rootfs --exclude=disk.img", c.root))
}

// A machine that dies repeatedly is failed after a number of restarts. The message names the log.
func TestRestartsUsedUp(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	path := filepath.Join(c.root, "machines", was.Spec.Id, "state.json")
	eventually(t, "bootstrap recorded", func() error { _, err := os.Stat(path); return err })
	eventually(t, "bootstrap data erased", func() error { return gone(filepath.Join(filepath.Dir(path), "bootstrap-data")) })
	c.end(syscall.SIGTERM)
	// The deaths of the last minutes, as capstand stores them.
	data, err := os.ReadFile(path)
	expect.NoError(t, err)
	state := map[string]any{}
	expect.NoError(t, json.Unmarshal(data, &state))
	deaths := []time.Time{}
	for i := range 10 {
		deaths = append(deaths, time.Now().Add(-time.Duration(i)*time.Second))
	}
	state["deaths"] = deaths
	data, err = json.Marshal(state)
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile(path, data, 0o600))
	c.start()
	now := c.await(was.Spec.Id, running(0))
	expect.NoError(t, syscall.Kill(int(now.Status.Pid), syscall.SIGKILL))
	m := c.await(was.Spec.Id, func(m *hostpb.Machine) bool { return m.Status.Phase == hostpb.MachineStatus_FAILED })
	if !strings.Contains(m.Status.Message, "11 times within 10m0s") {
		t.Errorf("message %q", m.Status.Message)
	}
	_, err = c.StartMachine(c.ctx(), &hostpb.StartMachineRequest{Id: was.Spec.Id, Namespace: was.Spec.Namespace, Name: was.Spec.Name})
	expect.NoError(t, err)
	c.await(was.Spec.Id, running(now.Status.Pid))
}
