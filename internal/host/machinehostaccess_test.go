package host

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
)

const twoGPUs = `{"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}]}},
  {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu1", "hostPath": "/dev/zero"}]}}]}`

// withGPUs gives a host two CDI devices.
func withGPUs(t *testing.T, h *Host) (specs string) {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "gpu.json"), twoGPUs)
	var err error
	if h.cdi, err = devices.NewCDI(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// requesting is the nth machine, with a number of devices.
func requesting(n, gpus int32) *hostpb.MachineSpec {
	s := goodSpec()
	s.Id, s.Name = "g-"+string('0'+n), "g"+string('0'+n)
	s.Devices = []*hostpb.MachineDevice{{Name: "example.com/gpu", Count: gpus}}
	return s
}

// A CDI device belongs to one machine, also after a restart of capstand, until the machine is gone.
func TestDevicesAreExclusive(t *testing.T) {
	h := recorded(t)
	withGPUs(t, h)
	add := func(n, gpus int32) ([]string, error) {
		spec := requesting(n, gpus)
		chosen, err := h.machines.chooseDevices(spec)
		if err != nil {
			return nil, err
		}
		files, err := firstFiles(&hostpb.EnsureMachineRequest{Spec: spec}, chosen)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.store.create(machinesDir, spec.Id, spec, files); err != nil {
			t.Fatal(err)
		}
		return h.machines.add(spec).cdiDevices(), nil
	}
	if got, err := add(1, 1); err != nil || !slices.Equal(got, []string{"example.com/gpu=0"}) {
		t.Fatalf("first machine: %v, %v", got, err)
	}
	h.machines.byID["g-1"] = newMachine(h.platform, requesting(1, 1), h.machines.forget) // as the next capstand does
	if got, err := add(2, 1); err != nil || !slices.Equal(got, []string{"example.com/gpu=1"}) {
		t.Fatalf("second machine: %v, %v", got, err)
	}
	if _, err := add(3, 1); refusal.Of(err).Reason != hostpb.Refusal_NOT_PROVIDED {
		t.Errorf("third machine: %v", err)
	}
	if k := h.machines.deviceKinds(); len(k) != 1 || k[0].Count != 2 || k[0].Allocated != 2 {
		t.Errorf("the host reports %v", k)
	}
	delete(h.machines.byID, "g-1")
	if got, err := add(4, 1); err != nil || !slices.Equal(got, []string{"example.com/gpu=0"}) {
		t.Errorf("after a deletion: %v, %v", got, err)
	}
}

// The devices of a machine whose record is damaged are not known, so no other machine gets one of their kind.
func TestDevicesOfADamagedRecord(t *testing.T) {
	h := recorded(t)
	withGPUs(t, h)
	m := h.machines.add(requesting(1, 1))
	m.broken = "unreadable"
	if k := h.machines.deviceKinds(); len(k) != 1 || k[0].Allocated != k[0].Count {
		t.Errorf("the host reports %v", k)
	}
}

// The container of a machine has the mounts, device nodes and CDI devices of its spec. If one of them is missing on the host, the
// machine does not start without it.
func TestContainerWithHostAccess(t *testing.T) {
	h := recorded(t)
	specs := withGPUs(t, h)
	m := onDisk(t, h)
	source := filepath.Join(t.TempDir(), "models")
	if err := os.Mkdir(source, 0o700); err != nil {
		t.Fatal(err)
	}
	m.spec.HostMounts = []*hostpb.HostMount{{Source: source, Path: "/mnt/models", ReadOnly: true}}
	m.spec.Devices = []*hostpb.MachineDevice{{Name: "/dev/zero", Count: 1}, {Name: "example.com/gpu", Count: 1}}
	m.state.Devices = []string{"example.com/gpu=1"}
	if err := h.machines.hasHostFiles(t.Context(), m.spec); err != nil {
		t.Fatal(err)
	}
	mounts := []runc.HostMount{{Source: "/staged", Path: "/mnt/models", ReadOnly: true}}
	if err := os.MkdirAll(filepath.Dir(m.runDir()), 0o700); err != nil {
		t.Fatal(err)
	}
	bundle, err := m.prepare(runc.System{Root: "/"}, mounts)
	if err != nil {
		t.Fatal(err)
	}
	var config oci.Spec
	if err := json.Unmarshal([]byte(read(t, filepath.Join(bundle, "config.json"))), &config); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(config.Mounts, func(m oci.Mount) bool { return m.Destination == "/mnt/models" })
	if i < 0 || !slices.Equal(config.Mounts[i].Options, []string{"bind", "rprivate", "nosuid", "nodev", "ro"}) || config.Mounts[i].Source != "/staged" {
		t.Errorf("mounts: %v", config.Mounts)
	}
	for _, path := range []string{"/dev/zero", "/dev/gpu1"} {
		if !slices.ContainsFunc(config.Linux.Devices, func(d oci.LinuxDevice) bool { return d.Path == path && d.Minor == 5 }) {
			t.Errorf("no device %s: %v", path, config.Linux.Devices)
		}
	}

	if described := read(t, filepath.Join(m.runDir(), "cdi/example.com-gpu.json")); !strings.Contains(described, `"name": "1"`) || strings.Contains(described, "hostPath") {
		t.Errorf("the machine reads %s", described)
	}

	write(t, filepath.Join(specs, "gpu.json"), "{}")
	if _, err := m.prepare(runc.System{Root: "/"}, mounts); err == nil || !strings.Contains(err.Error(), "expected the CDI devices example.com/gpu=1 on the host") {
		t.Errorf("without the specification: %v", err)
	}
	if err := os.Remove(source); err != nil {
		t.Fatal(err)
	}
	if err := h.machines.hasHostFiles(t.Context(), m.spec); refusal.Of(err).Reason != hostpb.Refusal_NOT_PROVIDED || !strings.Contains(err.Error(), "expected a folder or file") {
		t.Errorf("without the folder: %v", err)
	}
	m.spec.HostMounts, m.spec.Devices = nil, []*hostpb.MachineDevice{{Name: "/dev/no-such-device", Count: 1}}
	if err := h.machines.hasHostFiles(t.Context(), m.spec); refusal.Of(err).Reason != hostpb.Refusal_NOT_PROVIDED || !strings.Contains(err.Error(), "expected the device node /dev/no-such-device") {
		t.Errorf("without the device: %v", err)
	}
}

// No machine can mount the files of capstand, wherever they are.
func TestOwnFilesAreNoMounts(t *testing.T) {
	h := recorded(t)
	h.config.Root, h.config.Backups = h.store.root, t.TempDir()
	for _, source := range []string{h.config.Root, filepath.Join(h.config.Root, machinesDir), h.config.Backups, filepath.Dir(h.config.Root)} {
		spec := goodSpec()
		spec.HostMounts = []*hostpb.HostMount{{Source: source, Path: "/mnt/x"}}
		if err := h.machines.hasHostFiles(t.Context(), spec); refusal.Of(err).Reason != hostpb.Refusal_NOT_PROVIDED || !strings.Contains(err.Error(), "files of capstand") {
			t.Errorf("%s: %v", source, err)
		}
	}
}
