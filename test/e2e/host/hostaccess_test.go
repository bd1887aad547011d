//go:build e2e

package host_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A machine sees a folder and a file of the host read-only, a writable folder, a device node and a CDI device, also after its PID 1
// was killed. A machine that requests nothing sees none of them.
func TestHostMountsAndDevices(t *testing.T) {
	leavesNothing(t)
	dir := t.TempDir()
	expect.NoError(t, os.Chmod(dir, 0o755))
	for _, folder := range []string{"models/sub", "out", "cdi"} {
		expect.NoError(t, os.MkdirAll(filepath.Join(dir, folder), 0o755))
	}
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "models/sub/one"), []byte("weights"), 0o644))
	expect.NoError(t, os.Symlink("/etc", filepath.Join(dir, "out/escape")))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "cdi/gpu.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": [
		{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/zero"}]}}]}`), 0o644))
	c := newCapstand(t, "--cdi-dirs", filepath.Join(dir, "cdi"))
	info, err := c.GetInfo(c.ctx(), &hostpb.GetInfoRequest{})
	expect.NoError(t, err)
	if len(info.Devices) != 1 || info.Devices[0].Name != "example.com/gpu" || info.Devices[0].Count != 1 || !info.HostMounts {
		t.Fatalf("the host reports %v", info)
	}

	plain := blue.machine(11)
	c.make(plain)
	spec := blue.machine(10)
	spec.HostMounts = []*hostpb.HostMount{
		{Source: filepath.Join(dir, "models"), Path: "/mnt/models", ReadOnly: true},
		{Source: filepath.Join(dir, "models/sub/one"), Path: "/srv/one", ReadOnly: true},
		{Source: filepath.Join(dir, "out"), Path: "/data/out"},
	}
	spec.Devices = []*hostpb.MachineDevice{{Name: "/dev/loop-control", Count: 1}, {Name: "example.com/gpu", Count: 1}}
	c.make(spec)
	look := `cat /mnt/models/sub/one /srv/one; touch /mnt/models/new 2>&1 || true; echo result > /data/out/result; ls -d /dev/loop-control /dev/gpu0; head -c 3 /dev/gpu0 | od -An -tx1; cat /run/capstan/cdi/example.com-gpu.json`
	want := func(out string) {
		t.Helper()
		for _, part := range []string{"weightsweights", "Read-only file system", "/dev/loop-control", "/dev/gpu0", "00 00 00", `"kind": "example.com/gpu"`} {
			if !strings.Contains(out, part) {
				t.Errorf("the machine sees %q, expected %q", out, part)
			}
		}
		if data, err := os.ReadFile(filepath.Join(dir, "out/result")); err != nil || string(data) != "result\n" {
			t.Errorf("the host sees %q, %v", data, err)
		}
	}
	want(inside(t, blue.address(10), look))
	if out := inside(t, blue.address(11), `ls -d /mnt/models /srv/one /data/out /dev/loop-control /dev/gpu0 2>/dev/null || true`); out != "" {
		t.Errorf("a machine without mounts and devices sees %s", out)
	}

	other := blue.machine(12)
	other.Devices = []*hostpb.MachineDevice{{Name: "example.com/gpu", Count: 1}}
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: other}); err == nil || !strings.Contains(err.Error(), "0 of 1 are free") {
		t.Errorf("a second machine with the same device: %v", err)
	}
	other.Devices, other.HostMounts = nil, []*hostpb.HostMount{{Source: filepath.Join(dir, "out/escape/ssl"), Path: "/mnt/x", ReadOnly: true}}
	if _, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: other}); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link that a machine could have made: %v", err)
	}

	c.kill()
	c.start()
	before := c.await(spec.Id, func(m *hostpb.Machine) bool { return m.Status.Pid != 0 })
	expect.NoError(t, os.Remove(filepath.Join(dir, "out/result")))
	host(t, "kill -9 "+strconv.Itoa(int(before.Status.Pid)))
	c.await(spec.Id, func(m *hostpb.Machine) bool {
		return m.Status.Phase == hostpb.MachineStatus_RUNNING && m.Status.Restarts > before.Status.Restarts && len(m.Status.Services) > 0
	})
	want(inside(t, blue.address(10), look))
}
