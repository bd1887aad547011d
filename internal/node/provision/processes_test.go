package provision

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

// The kubelet subtracts its reservation from the limit of the kernel. What remains for all pods is three quarters of the machine's limit.
func TestReservedProcesses(t *testing.T) {
	for name, test := range map[string]struct{ kernel, machine, pods int64 }{
		"limit of the machine":          {4194304, 16384, 12288},
		"a small machine":               {4194304, 1024, 768},
		"not a multiple of four":        {4194304, 1027, 771},
		"a kernel with a smaller limit": {32768, 1048576, 24576},
		"the same limit":                {16384, 16384, 12288},
		"a capstand without the limit":  {4194304, 0, 12288},
	} {
		reserved := reservedProcesses(test.kernel, test.machine)
		if pods := test.kernel - reserved; pods != test.pods {
			t.Errorf("%s: %d processes are reserved, which leaves %d for pods; want %d", name, reserved, pods, test.pods)
		}
	}
	if limit := kernelProcesses(); limit < 1 || limit > 4194304 {
		t.Errorf("the limit of the kernel: %d", limit)
	}
}

// The user's reservation of processes replaces that of Capstan. Other reservations of the user do not.
func TestReservation(t *testing.T) {
	for name, test := range map[string]struct {
		kernel int64
		patch  map[string]any
		want   map[string]string
	}{
		"default":              {4194304, nil, map[string]string{"pid": "4182016"}},
		"unknown kernel":       {0, nil, nil},
		"the user's memory":    {4194304, map[string]any{"systemReserved": map[string]any{"memory": "1Gi"}}, map[string]string{"pid": "4182016", "memory": "1Gi"}},
		"the user's processes": {4194304, map[string]any{"systemReserved": map[string]any{"pid": "1000"}}, map[string]string{"pid": "1000"}},
		"no processes":         {4194304, map[string]any{"systemReserved": map[string]any{"pid": nil}}, nil},
		"no reservation":       {4194304, map[string]any{"systemReserved": nil}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := testNode(nodeconfig.RoleWorker, func(c *nodeconfig.NodeConfiguration) { c.Kubelet.Configuration = test.patch })
			n.machine.PidsLimit, n.kernelProcesses = 16384, test.kernel
			config, err := n.kubeletConfig()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, config.SystemReserved); diff != "" && len(test.want)+len(config.SystemReserved) > 0 {
				t.Error(diff)
			}
		})
	}
}

// A machine that starts on a host with another limit of the kernel gets another reservation. The rest of the file stays.
func TestRenewReservation(t *testing.T) {
	own := map[string]any{"systemReserved": map[string]any{"pid": "1000"}}
	for name, test := range map[string]struct {
		patch      map[string]any
		file, want string
	}{
		"another kernel":       {nil, "maxPods: 7\nsystemReserved:\n  memory: 1Gi\n  pid: \"9\"\n", "maxPods: 7\nsystemReserved:\n  memory: 1Gi\n  pid: \"53248\"\n"},
		"no reservation yet":   {nil, "maxPods: 7\n", "maxPods: 7\nsystemReserved:\n  pid: \"53248\"\n"},
		"the same kernel":      {nil, "systemReserved: {pid: \"53248\"}\n", "systemReserved: {pid: \"53248\"}\n"},
		"the user's processes": {own, "systemReserved: {pid: \"1000\"}\n", "systemReserved: {pid: \"1000\"}\n"},
		"no file":              {nil, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := testNode(nodeconfig.RoleWorker, func(c *nodeconfig.NodeConfiguration) { c.Kubelet.Configuration = test.patch })
			n.machine.PidsLimit, n.kernelProcesses = 16384, 65536
			path := filepath.Join(t.TempDir(), "config.yaml")
			if test.file != "" {
				if err := os.WriteFile(path, []byte(test.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := n.renewReservation(path); err != nil {
				t.Fatal(err)
			}
			got, _ := os.ReadFile(path)
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := testNode(nodeconfig.RoleWorker, nil).renewReservation(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a file that is no YAML: %v", err)
	}
}
