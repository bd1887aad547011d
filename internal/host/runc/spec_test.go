package runc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/machineapi"
)

func params() Params {
	return Params{
		Hostname: "one", Rootfs: "/r", Assets: "/a", Run: "/s", Views: "/v", NetNS: "/n", Cgroup: "/capstan/h/one",
		Backups: "/b", BackupsIn: "/var/lib/capstan/backups/ns/one", CPUs: 2, MemoryBytes: 3 << 30, PidsLimit: 2000, Capabilities: []string{"CAP_SYS_ADMIN"},
		System: System{Folders: []string{"/usr"}},
	}
}

func TestSpec(t *testing.T) {
	s := Spec(params())
	if r := s.Linux.Resources; *r.Memory.Limit != 3<<30 || *r.CPU.Quota != 200_000 || *r.CPU.Period != 100_000 || *r.Pids.Limit != 2000 {
		t.Errorf("limits %+v %+v", r.Memory, r.CPU)
	}
	if s.Linux.Resources.Memory.Swap != nil {
		t.Error("a limit of swap without one in the parameters")
	}
	for _, swap := range []int64{0, 1 << 30} {
		p := params()
		p.SwapBytes = &swap
		if got := Spec(p).Linux.Resources.Memory.Swap; got == nil || *got != 3<<30+swap {
			t.Errorf("swap of %d bytes: memory and swap %v", swap, got)
		}
	}
	if !s.Linux.Resources.Devices[0].Allow || s.Linux.Seccomp != nil || s.Linux.MaskedPaths != nil {
		t.Error("a machine lacks the confinement of a pod")
	}
	var types []specs.LinuxNamespaceType
	for _, n := range s.Linux.Namespaces {
		types = append(types, n.Type)
		if (n.Type == specs.NetworkNamespace) != (n.Path == "/n") {
			t.Errorf("namespace %v", n)
		}
	}
	for _, want := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.CgroupNamespace, specs.NetworkNamespace, specs.UTSNamespace, specs.IPCNamespace} {
		if !slices.Contains(types, want) {
			t.Errorf("no namespace of its own: %s", want)
		}
	}
	if slices.Contains(s.Linux.ReadonlyPaths, "/proc/sys") || !slices.Contains(s.Linux.ReadonlyPaths, "/proc/sys/kernel") {
		t.Errorf("read-only: %v", s.Linux.ReadonlyPaths)
	}
	if s.Linux.RootfsPropagation != "rshared" || s.Linux.CgroupsPath != "/capstan/h/one" || s.Process.Args[0] != machineapi.InitPath {
		t.Error("propagation, cgroup or init")
	}
}

func TestShares(t *testing.T) {
	for _, c := range []struct {
		p    Params
		want uint64
	}{
		{Params{}, 1024},
		{Params{ControlPlane: true}, 8192},
		{Params{CPUs: 2}, 2048},
		{Params{CPUs: 2, ControlPlane: true}, 16384},
		{Params{CPUs: 128, ControlPlane: true}, 262144},
	} {
		if got := *Spec(c.p).Linux.Resources.CPU.Shares; got != c.want {
			t.Errorf("%d CPUs, control plane %v: %d shares, want %d", c.p.CPUs, c.p.ControlPlane, got, c.want)
		}
	}
}

func TestMounts(t *testing.T) {
	find := func(all []specs.Mount, to string) *specs.Mount {
		i := slices.IndexFunc(all, func(m specs.Mount) bool { return m.Destination == to })
		if i < 0 {
			return nil
		}
		return &all[i]
	}
	all := mounts(params())
	for to, want := range map[string]string{"/usr": "ro", "/opt/capstan": "ro", "/var/lib/capstan/backups/ns/one": "rw", "/run/capstan": "rw", "/dev/kmsg": "rw", "/proc/meminfo": "ro", "/sys/devices/system/cpu": "ro"} {
		m := find(all, to)
		if m == nil || !slices.Contains(m.Options, want) || !slices.Contains(m.Options, "rprivate") {
			t.Errorf("%s: %+v, want %s", to, m, want)
		}
	}
	unlimited := params()
	unlimited.CPUs = 0
	all = mounts(unlimited)
	if find(all, "/proc/meminfo") == nil || find(all, "/proc/cpuinfo") != nil || Spec(unlimited).Linux.Resources.CPU.Quota != nil {
		t.Error("a machine without a CPU limit must see the cpuinfo of the host and have no quota")
	}
}

// TestAppArmor: a machine sees AppArmor, writable, if its host has it and the machine can load profiles.
func TestAppArmor(t *testing.T) {
	for _, test := range []struct {
		host         bool
		capabilities []string
		want         bool
	}{
		{false, []string{"CAP_MAC_ADMIN", "CAP_SYS_ADMIN"}, false},
		{true, []string{"CAP_SYS_ADMIN"}, false},
		{true, nil, false},
		{true, []string{"CAP_MAC_ADMIN", "CAP_SYS_ADMIN"}, true},
	} {
		p := params()
		p.System.AppArmor, p.Capabilities = test.host, test.capabilities
		all := mounts(p)
		i := slices.IndexFunc(all, func(m specs.Mount) bool { return m.Destination == "/sys/kernel/security" })
		if (i >= 0) != test.want || i >= 0 && (!slices.Contains(all[i].Options, "rw") || all[i].Source != "/sys/kernel/security") {
			t.Errorf("%+v: mount %d of %v", test, i, all)
		}
		if sys := slices.IndexFunc(all, func(m specs.Mount) bool { return m.Destination == "/sys" }); i >= 0 && i < sys {
			t.Error("/sys covers securityfs")
		}
	}
}

func TestHostAppArmor(t *testing.T) {
	for name, test := range map[string]struct {
		enabled string // "" is no file
		folder  bool
		want    bool
	}{
		"no module":          {"", false, false},
		"switched off":       {"N\n", true, false},
		"without securityfs": {"Y\n", false, false},
		"enabled":            {"Y\n", true, true},
	} {
		dir := t.TempDir()
		if test.folder {
			if err := os.Mkdir(filepath.Join(dir, "apparmor"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		enabled := filepath.Join(dir, "enabled")
		if test.enabled != "" {
			if err := os.WriteFile(enabled, []byte(test.enabled), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := hasAppArmor(dir, enabled); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

const cpuinfo = `processor	: 0
model name	: X
physical id	: 0
siblings	: 4
core id		: 0
cpu cores	: 2

processor	: 1
model name	: X
physical id	: 0
siblings	: 4
core id		: 0
cpu cores	: 2

processor	: 2
model name	: X
physical id	: 1
siblings	: 4
core id		: 1
cpu cores	: 2
`

// The views match cadvisor's expressions.
func TestViews(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "views")
	p := Params{Views: dir, CPUs: 2, MemoryBytes: 3 << 30}
	for range 2 { // The second run replaces the views.
		if err := WriteViews(p, cpuinfo); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if m := regexp.MustCompile(`MemTotal:\s*([0-9]+) kB`).FindStringSubmatch(read(viewMeminfo)); len(m) != 2 || m[1] != "3145728" {
		t.Errorf("MemTotal %v", m)
	}
	if m := regexp.MustCompile(`SwapTotal:\s*([0-9]+) kB`).FindStringSubmatch(read(viewMeminfo)); len(m) != 2 || m[1] != "0" {
		t.Errorf("SwapTotal %v", m)
	}
	cores := regexp.MustCompile(`(?m)^core id\s*:\s*([0-9]+)$`).FindAllString(read(viewCPUInfo), -1)
	if slices.Sort(cores); len(slices.Compact(cores)) != 2 || strings.Count(read(viewCPUInfo), "processor") != 2 {
		t.Errorf("cpuinfo %s", read(viewCPUInfo))
	}
	if got := read(viewCPUs + "/online"); got != "0-1\n" {
		t.Errorf("online %q", got)
	}
	for _, parent := range []string{viewCPUs, viewNodes + "/node0"} {
		found, _ := filepath.Glob(filepath.Join(dir, parent, "cpu*[0-9]"))
		if len(found) != 2 {
			t.Errorf("%s has %v", parent, found)
		}
	}
	swap := int64(1 << 30)
	p.SwapBytes = &swap
	if err := UpdateViews(p, cpuinfo); err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`SwapTotal:\s*([0-9]+) kB`).FindStringSubmatch(read(viewMeminfo)); len(m) != 2 || m[1] != "1048576" {
		t.Errorf("SwapTotal of the update %v", m)
	}
	if err := WriteViews(Params{Views: dir, MemoryBytes: 1 << 30}, cpuinfo); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, viewCPUInfo)); !os.IsNotExist(err) {
		t.Error("the old views still exist")
	}
}

// Root in a machine can set attributes of its views that forbid their removal. The machine starts again nevertheless.
func TestFixedViews(t *testing.T) {
	p := Params{Views: filepath.Join(t.TempDir(), "views"), CPUs: 2, MemoryBytes: 1 << 30}
	if err := WriteViews(p, ""); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "chattr", "-R", "+i", filepath.Join(p.Views, viewCPUs)).CombinedOutput(); err != nil {
		t.Logf("without attributes: %s", out)
	}
	t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "chattr", "-R", "-i", p.Views).Run() })
	if err := WriteViews(p, ""); err != nil {
		t.Error(err)
	}
}

// Root in a machine can make its views writable. What it puts there leads capstand to no file of the host, and does not let it wait.
func TestHostileViews(t *testing.T) {
	cpuinfo := strings.Repeat("processor\t: 0\ncore id\t: 0\n\n", 2)
	for name, hostile := range map[string]func(view, outside string) error{
		"a link":      func(v, outside string) error { return errors.Join(os.Remove(v), os.Symlink(outside, v)) },
		"a pipe":      func(v, _ string) error { return errors.Join(os.Remove(v), unix.Mkfifo(v, 0o600)) },
		"a huge file": func(v, _ string) error { return os.Truncate(v, 1<<40) },
		"a folder that is a link": func(v, outside string) error {
			return errors.Join(os.RemoveAll(filepath.Dir(v)), os.Symlink(filepath.Dir(outside), filepath.Dir(v)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := Params{Views: filepath.Join(t.TempDir(), "views"), CPUs: 2, MemoryBytes: 1 << 30}
			if err := WriteViews(p, cpuinfo); err != nil {
				t.Fatal(err)
			}
			// The folder of the host has the names of the view.
			outside := filepath.Join(t.TempDir(), "online")
			processor := filepath.Join(filepath.Dir(outside), "cpu7")
			if err := errors.Join(os.WriteFile(outside, []byte("host"), 0o600), os.Mkdir(processor, 0o700)); err != nil {
				t.Fatal(err)
			}
			if err := hostile(filepath.Join(p.Views, viewCPUs, "online"), outside); err != nil {
				t.Fatal(err)
			}
			p.CPUs = 1
			err := UpdateViews(p, cpuinfo)
			if (err == nil) != (name == "a huge file") {
				t.Errorf("the result of the update is %v", err)
			}
			if data, err := os.ReadFile(outside); err != nil || string(data) != "host" {
				t.Errorf("a file of the host is %q, %v", data, err)
			}
			if _, err := os.Stat(processor); err != nil {
				t.Error("a folder of the host was removed")
			}
		})
	}
}
