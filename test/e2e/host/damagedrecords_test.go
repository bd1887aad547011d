//go:build e2e

package host_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// damages are contents of a damaged JSON file; nil removes the file.
var damages = map[string][]byte{
	"truncated": []byte(`{"id": "e2e-bl`), "garbage": {0, 0xff, 7, 0, 13}, "empty": {}, "wrong type": []byte(`["id"]`), "empty object": []byte(`{}`), "gone": nil,
}

func damage(t *testing.T, path string, data []byte) {
	t.Helper()
	if data == nil {
		_ = unix.Unmount(filepath.Join(filepath.Dir(path), "rootfs"), 0) // Only machines have a disk.
		expect.NoError(t, os.RemoveAll(filepath.Dir(path)))
		return
	}
	expect.NoError(t, os.WriteFile(path, data, 0o600))
}

// A machine with a damaged record is reported as failed. Its process continues. Its address is not given to another
// machine. Only a deletion by its owner removes it.
func TestDamagedMachine(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	failed := func(name, file string, n int, pid int32) {
		spec := blue.machine(n)
		m := c.await(spec.Id, func(m *hostpb.Machine) bool { return m.Status.Phase == hostpb.MachineStatus_FAILED })
		if m.Spec.Namespace != spec.Namespace || m.Spec.Name != spec.Name || m.Status.Message == "" {
			t.Errorf("%s %s: %v", file, name, m)
		}
		if err := syscall.Kill(int(pid), 0); err != nil {
			t.Errorf("%s %s: its PID 1: %v", file, name, err)
		}
		thief := deletion(spec)
		thief.Namespace = "thief"
		if _, err := c.HostClient.DeleteMachine(c.ctx(), thief); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s %s: deletion by another: %v", file, name, err)
		}
		rival := blue.machine(19)
		rival.Addresses = spec.Addresses
		if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: rival}); status.Code(err) != codes.AlreadyExists {
			t.Errorf("%s %s: its address was given to another machine: %v", file, name, err)
		}
		c.deleteMachine(spec)
		// A zombie process has ended.
		if stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); len(stat) > 0 && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("%s %s: PID 1 runs after the deletion", file, name)
		}
	}
	for _, file := range []string{"spec.json", "state.json"} {
		pids := map[int]int32{}
		var names []string
		for name, data := range damages {
			if file == "state.json" && (data == nil || name == "empty object") {
				continue // The machine was never started.
			}
			names = append(names, name)
		}
		for i := range names {
			m := c.make(blue.machine(10 + i))
			pids[10+i] = m.Status.Pid
			eventually(t, "state recorded", func() error {
				return gone(filepath.Join(c.root, "machines", m.Spec.Id, "bootstrap-data"))
			})
		}
		c.kill()
		for i, name := range names {
			damage(t, filepath.Join(c.root, "machines", blue.machine(10+i).Id, file), damages[name])
		}
		c.start()
		for i, name := range names {
			failed(name, file, 10+i, pids[10+i])
		}
		expect.NoError(t, os.RemoveAll(filepath.Join(c.root, "tombstones"))) // The ids can be used again.
		expect.NoError(t, os.Mkdir(filepath.Join(c.root, "tombstones"), 0o700))
	}
}

// A network with a damaged record stays, with its machines and load balancer. A load balancer with a damaged record
// continues, and its owner's next request restores the record.
func TestDamagedNetworkAndBalancer(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	c.balancer(blue, 10)
	eventually(t, "the balancer serves", func() error { return answers(blue.address(1), "blue-10") })
	// It can serve a moment before it is in its cgroup.
	var process string
	eventually(t, "the balancer's process is in its cgroup", func() error {
		if process = balancers(t); process == "" {
			return errors.New("no process")
		}
		return nil
	})
	for name, data := range damages {
		c.kill()
		damage(t, filepath.Join(c.root, "networks", blue.id, "spec.json"), data)
		if data == nil {
			data = []byte("gone") // The folder of the load balancer also belongs to its process.
		}
		damage(t, filepath.Join(c.root, "balancers", blue.id, "spec.json"), data)
		c.start()
		if now := c.await(was.Spec.Id, running(0)); now.Status.Pid != was.Status.Pid {
			t.Fatalf("%s: PID 1 has changed", name)
		}
		expect.NoError(t, answers(blue.address(1), "blue-10"))
		if _, err := c.DeleteNetwork(c.ctx(), &hostpb.DeleteNetworkRequest{Id: blue.id, Namespace: "default", Name: blue.name}); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: deletion of a network with a machine: %v", name, err)
		}
		if _, err := c.DeleteLoadBalancer(c.ctx(), &hostpb.DeleteLoadBalancerRequest{Id: blue.id, Namespace: "thief", Name: blue.name}); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: deletion by another: %v", name, err)
		}
		c.balancer(blue, 10)
		eventually(t, "the balancer serves", func() error { return answers(blue.address(1), "blue-10") })
		if now := balancers(t); now != process {
			t.Errorf("%s: the balancer's process changed from %s to %s", name, process, now)
		}
	}
	c.kill()
	damage(t, filepath.Join(c.root, "balancers", blue.id, "spec.json"), []byte{})
	c.start()
	_, err := c.DeleteLoadBalancer(c.ctx(), &hostpb.DeleteLoadBalancerRequest{Id: blue.id, Namespace: "default", Name: blue.name})
	expect.NoError(t, err)
}

// balancers lists the processes of load balancers of this test's network.
func balancers(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(host(t, fmt.Sprintf("grep -l balancer-%s /proc/[0-9]*/cgroup 2>/dev/null || true", blue.id)))
}
