package devices

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestDistinct(t *testing.T) {
	for name, test := range map[string]struct {
		nodes map[string][]string
		want  []string
	}{
		"none":          {nil, nil},
		"without nodes": {map[string][]string{"a": {}, "b": {}}, []string{"a", "b"}},
		"two, with serial numbers and a name for all": {map[string][]string{
			"0": {"/dev/n0"}, "1": {"/dev/n1"}, "GPU-a": {"/dev/n0"}, "GPU-b": {"/dev/n1"}, "all": {"/dev/n0", "/dev/n1"},
		}, []string{"0", "1"}},
		"one, with other names":            {map[string][]string{"0": {"/dev/n0"}, "GPU-a": {"/dev/n0"}, "all": {"/dev/n0", "/dev/ctl"}}, []string{"0"}},
		"only all":                         {map[string][]string{"all": {"/dev/n0"}}, []string{"all"}},
		"a node of the driver in each":     {map[string][]string{"0": {"/dev/kfd", "/dev/r0"}, "1": {"/dev/kfd", "/dev/r1"}}, []string{"0", "1"}},
		"a name for two of three":          {map[string][]string{"0": {"/dev/n0"}, "1": {"/dev/n1"}, "2": {"/dev/n2"}, "pair": {"/dev/n0", "/dev/n1"}}, []string{"0", "1", "2"}},
		"numbers in their order":           {map[string][]string{"10": {"/dev/n10"}, "9": {"/dev/n9"}}, []string{"9", "10"}},
		"the order of nodes has no effect": {map[string][]string{"a": {"/dev/x", "/dev/y"}, "b": {"/dev/y", "/dev/x"}}, []string{"a"}},
	} {
		if got := distinct(test.nodes); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

const gpus = `{"cdiVersion": "0.6.0", "kind": "example.com/gpu", "containerEdits": {"env": ["GPU_DRIVER=1"]}, "devices": [
  {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}]}},
  {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu1", "hostPath": "/dev/zero"}], "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/opt/gpu/config", "options": ["ro", "bind"]}]}},
  {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}, {"path": "/dev/gpu1", "hostPath": "/dev/zero"}]}}
]}`

func TestCDI(t *testing.T) {
	dir := t.TempDir()
	c, err := NewCDI(filepath.Join(dir, "missing"), dir)
	if err != nil || len(c.Kinds()) != 0 {
		t.Fatalf("without a specification: %v, %v", c.Kinds(), err)
	}
	// Pods can exhaust the inotify instances of the host: see package changes.
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range open {
		if target, _ := os.Readlink(fd); strings.Contains(target, "inotify") {
			t.Errorf("%s is %s", fd, target)
		}
	}
	write(t, filepath.Join(dir, "gpu.json"), gpus)
	write(t, filepath.Join(dir, "broken.json"), "{")
	changed, err := c.Scan()
	if !changed || err == nil || !slices.Equal(c.Kinds()["example.com/gpu"], []string{"0", "1"}) {
		t.Fatalf("changed %t, kinds %v, error %v", changed, c.Kinds(), err)
	}
	if changed, _ := c.Scan(); changed {
		t.Error("a second look finds a change")
	}
	if got := c.Choose("example.com/gpu", 1, map[string]bool{"example.com/gpu=0": true}); !slices.Equal(got, []string{"example.com/gpu=1"}) {
		t.Errorf("chosen: %v", got)
	}
	if got := c.Choose("example.com/gpu", 2, map[string]bool{"example.com/gpu=0": true}); got != nil {
		t.Errorf("two of one: %v", got)
	}
	checkMachineSpecs(t, c)
	spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	if err := c.Inject(spec, []string{"example.com/gpu=1"}); err != nil {
		t.Fatal(err)
	}
	if d := spec.Linux.Devices; len(d) != 1 || d[0].Path != "/dev/gpu1" || d[0].Major != 1 || d[0].Minor != 5 {
		t.Errorf("devices: %+v", d)
	}
	if len(spec.Mounts) != 1 || spec.Mounts[0].Destination != "/opt/gpu/config" || !slices.Contains(spec.Process.Env, "GPU_DRIVER=1") {
		t.Errorf("mounts %v, environment %v", spec.Mounts, spec.Process.Env)
	}
	if err := c.Inject(spec, []string{"example.com/gpu=7"}); err == nil || !strings.Contains(err.Error(), "expected the CDI devices example.com/gpu=7 on the host, found none") {
		t.Errorf("unknown device: %v", err)
	}
	var none *CDI
	if err := none.Inject(spec, nil); err != nil || none.Kinds() != nil {
		t.Errorf("no devices: %v, %v", err, none.Kinds())
	}
}

func TestNode(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink("/dev/zero", link); err != nil {
		t.Fatal(err)
	}
	if n, err := Node(link); err != nil || n.Path != link || n.Type != "c" || n.Major != 1 || n.Minor != 5 || *n.FileMode != 0o666 {
		t.Errorf("%+v, %v", n, err)
	}
	for path, want := range map[string]string{"/dev/no-such-device": "found none", "/etc": "another kind of file"} {
		if _, err := Node(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// checkMachineSpecs: in a machine, the devices are where the specification of the host has put them, and no other device is named.
func checkMachineSpecs(t *testing.T, host *CDI) {
	t.Helper()
	got, err := host.MachineSpecs([]string{"example.com/gpu=1", "example.com/gpu=missing"}, false)
	if err != nil || len(got) != 1 {
		t.Fatalf("%s, %v", got, err)
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "gpu.json"), string(got["example.com-gpu.json"]))
	machine, err := NewCDI(dir)
	if err != nil || !slices.Equal(machine.Kinds()["example.com/gpu"], []string{"1"}) {
		t.Fatalf("%s: %v, %v", got, machine.Kinds(), err)
	}
	edits := machine.cache.GetDevice("example.com/gpu=1").ContainerEdits
	if n := edits.DeviceNodes; len(n) != 1 || n[0].Path != "/dev/gpu1" || n[0].HostPath != "" {
		t.Errorf("nodes: %+v", n)
	}
	if m := edits.Mounts; len(m) != 1 || m[0].HostPath != "/opt/gpu/config" || m[0].ContainerPath != "/opt/gpu/config" {
		t.Errorf("mounts: %+v", m)
	}
	if !slices.Equal(edits.Env, []string{"GPU_DRIVER=1"}) {
		t.Errorf("environment: %v", edits.Env)
	}
}
