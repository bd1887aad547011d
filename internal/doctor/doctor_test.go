package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fit returns a machine without problems.
func fit() Facts {
	f := Facts{
		Root: true, Kernel: "6.1.0", Architecture: "amd64", Capabilities: append([]string{"CAP_SYS_RESOURCE"}, capabilities...),
		Probes: map[string]string{}, Seccomp: true, CgroupVersion: 2, Controllers: []string{"cpu", "memory", "pids"},
		Sysctls: map[string]int64{"net.ipv4.ip_forward": 1}, OpenFiles: 1 << 20, Tools: map[string]string{},
		MemoryTotal: 16 * gib, MemoryAvailable: 15 * gib, DiskFree: 100 * gib, DiskType: "ext4",
		FreePorts: WantedPorts, Versions: []string{"v1.36.3"},
	}
	for _, feature := range features {
		f.Probes[feature.name] = ""
	}
	for _, l := range limits {
		f.Sysctls[l.sysctl] = l.comfort
	}
	for _, t := range tools {
		f.Tools[t.name] = "/usr/sbin/" + t.name
	}
	return f
}

func TestFitBox(t *testing.T) {
	for _, r := range Check(fit()) {
		if r.Level == Warn || r.Level == Fail || r.Mend != "" {
			t.Errorf("got %+v on a machine without problems", r)
		}
	}
	if !Fit(Check(fit())) {
		t.Error("a machine without problems is not fit")
	}
}

func TestCheck(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Facts)
		check  string
		level  Level
		found  string
		mend   string
	}{
		"running plane": {func(f *Facts) {
			f.Running, f.PlaneLog, f.CertificatesExpiring = true, "the journal", []string{"a.crt expires"}
		}, "certificates", Warn, "a.crt expires", "the journal"},
		"stopped plane":        {func(f *Facts) { f.CertificatesExpiring = []string{"a.crt expires"} }, "certificates", Warn, "a.crt expires", "capstan up"},
		"old authority":        {func(f *Facts) { f.AuthoritiesExpiring = []string{"ca.crt expires"} }, "authorities", Warn, "ca.crt expires", "does not renew"},
		"only an authority":    {func(f *Facts) { f.AuthoritiesExpiring = []string{"ca.crt expires"} }, "certificates", OK, "none is due", ""},
		"failed start":         {func(f *Facts) { f.Running, f.PlaneProblem = true, "no space left on device" }, "management plane", Warn, "no space left on device", "starts by itself"},
		"not root":             {func(f *Facts) { f.Root = false }, "root", Fail, "not root", "sudo"},
		"capability":           {func(f *Facts) { f.Capabilities = capabilities[1:] }, "capabilities", Fail, "CAP_SYS_ADMIN", "container"},
		"no CAP_SYS_RESOURCE":  {func(f *Facts) { f.Capabilities = capabilities }, "CAP_SYS_RESOURCE", Info, "OOM", "nothing to do"},
		"overlay":              {func(f *Facts) { f.Probes["overlay"] = "no such device" }, "overlay", Fail, "no such device", "modprobe overlay"},
		"probe did not run":    {func(f *Facts) { delete(f.Probes, "veth") }, "veth", Fail, "does not work", "modprobe veth"},
		"bridge":               {func(f *Facts) { f.Probes["bridge"] = "not supported" }, "bridge", Fail, "networks", "kernel 6.1.0"},
		"nftables":             {func(f *Facts) { f.Probes["nftables"] = "not supported" }, "nftables", Fail, "Services", "nf_tables"},
		"no loop devices":      {func(f *Facts) { f.Probes["disks of machines"] = "no loop devices" }, "disks of machines", Info, "fixed size", "modprobe loop"},
		"no vxlan, one host":   {func(f *Facts) { f.Probes["vxlan"] = "not supported" }, "vxlan", Info, "several boxes", "modprobe vxlan"},
		"seccomp":              {func(f *Facts) { f.Seccomp = false }, "seccomp", Fail, "seccomp", "CONFIG_SECCOMP_FILTER"},
		"no cgroups":           {func(f *Facts) { f.CgroupVersion = 0 }, "cgroups", Fail, "none", "cgroup2"},
		"cgroup v1":            {func(f *Facts) { f.CgroupVersion = 1 }, "cgroups", Warn, "about to drop version 1", "unified_cgroup_hierarchy=1"},
		"memory controller":    {func(f *Facts) { f.Controllers = []string{"cpu", "pids"} }, "cgroups", Fail, "memory", "cgroup_enable=memory"},
		"inotify too low":      {func(f *Facts) { f.Machines, f.Sysctls["fs.inotify.max_user_instances"] = true, 64 }, "fs.inotify.max_user_instances", Fail, "at least 128", "sysctl -w fs.inotify.max_user_instances=1024"},
		"inotify of a new box": {func(f *Facts) { f.Sysctls["fs.inotify.max_user_instances"] = 128 }, "fs.inotify.max_user_instances", Info, "128", "capstand raises it"},
		"inotify low":          {func(f *Facts) { f.Machines, f.Sysctls["fs.inotify.max_user_instances"] = true, 128 }, "fs.inotify.max_user_instances", Warn, "machines need 1024", "/etc/sysctl.d"},
		"open files":           {func(f *Facts) { f.OpenFiles = 1000 }, "open files", Fail, "at least 1024", "ulimit"},
		"forwarding off":       {func(f *Facts) { f.Sysctls["net.ipv4.ip_forward"] = 0 }, "net.ipv4.ip_forward", Info, "off", "capstand turns it on"},
		"forwarding unknown":   {func(f *Facts) { delete(f.Sysctls, "net.ipv4.ip_forward") }, "net.ipv4.ip_forward", Fail, "cannot be read", "kernel"},
		"bridged firewall":     {func(f *Facts) { f.Sysctls["net.bridge.bridge-nf-call-iptables"] = 1 }, "net.bridge.bridge-nf-call-iptables", Info, "on:", ""},
		"tool":                 {func(f *Facts) { f.Tools["conntrack"] = "" }, "tool conntrack", Fail, "not found", "with conntrack (Debian: `apt-get install conntrack`)"},
		"memory":               {func(f *Facts) { f.MemoryAvailable = gib }, "memory", Fail, "1.0 GiB of 16.0 GiB", "stop other programs"},
		"memory in use":        {func(f *Facts) { f.MemoryAvailable, f.Running, f.Machines = gib, true, true }, "memory", Warn, "the box is in use", "stop other programs"},
		"memory of a plane":    {func(f *Facts) { f.MemoryAvailable, f.Running = gib, true }, "memory", Fail, "1.0 GiB", "stop other programs"},
		"memory of a host":     {func(f *Facts) { f.Host, f.MemoryTotal, f.MemoryAvailable = true, 2*gib, 7*gib/4 }, "memory", Warn, "1.8 GiB of 2.0 GiB", "1.0 GiB free of machines"},
		"no room on a host":    {func(f *Facts) { f.Host, f.MemoryTotal, f.MemoryAvailable = true, 3*gib/2-1, gib }, "memory", Fail, "1.0 GiB of 1.5 GiB", "add memory"},
		"a host in use":        {func(f *Facts) { f.Host, f.MemoryAvailable = true, gib/4 }, "memory", Fail, "0.2 GiB of 16.0 GiB", "stop other programs"},
		"quickstart needs 5":   {func(f *Facts) { f.MemoryAvailable = 5*gib - 1 }, "memory", Warn, "small cluster", "stop other programs"},
		"disk in use":          {func(f *Facts) { f.DiskFree, f.Machines, f.Host = gib, true, true }, "disk", Warn, "the box is in use", "--root"},
		"little memory":        {func(f *Facts) { f.MemoryAvailable = 3 * gib }, "memory", Warn, "small cluster", "stop other programs"},
		"disk":                 {func(f *Facts) { f.DiskFree = gib }, "disk", Fail, "1.0 GiB free (ext4)", "--root"},
		"root folder":          {func(f *Facts) { f.RootProblem = "/x is mounted read-only" }, "root folder", Fail, "read-only", "--root"},
		"tmpfs":                {func(f *Facts) { f.DiskType = "tmpfs" }, "file system", Warn, "tmpfs", "real disk"},
		"ports":                {func(f *Facts) { f.FreePorts = 3 }, "ports", Fail, "3 free", "ss -ltnp"},
		"ports of its own":     {func(f *Facts) { f.FreePorts, f.Running = 3, true }, "ports", OK, "runs", ""},
		"missing binaries":     {func(f *Facts) { f.MissingAssets = []string{"bin/manager"} }, "binaries", Fail, "bin/manager", "install the packages"},
		"binaries of a host":   {func(f *Facts) { f.Host, f.MissingAssets = true, []string{"node"} }, "binaries", Fail, "of a host only", "--assets"},
		"closed folder":        {func(f *Facts) { f.Assets = Folder{"/a", os.ModeDir | 0o750, 0} }, "folder of the binaries", Fail, "/a has mode -rwxr-x---", "chmod -R go+rX /a"},
		"folder of a user":     {func(f *Facts) { f.Assets = Folder{"/a", os.ModeDir | 0o755, 1000} }, "folder of the binaries", Warn, "/a belongs to the user 1000", "chown -R root: /a"},
		"folder of a group":    {func(f *Facts) { f.Assets = Folder{"/a", os.ModeDir | 0o775, 0} }, "folder of the binaries", Warn, "has mode -rwxrwxr-x", "chmod -R go-w /a"},
		"folder of root":       {func(f *Facts) { f.Assets = Folder{"/a", os.ModeDir | 0o755, 0} }, "binaries", OK, "v1.36.3", ""},
		"build of a host":      {func(f *Facts) { f.Host, f.FreePorts = true, 0 }, "binaries", OK, "v1.36.3 for amd64, of a host only", ""},
		"versions are printed": {func(*Facts) {}, "binaries", OK, "v1.36.3 for amd64", ""},
	} {
		t.Run(name, func(t *testing.T) {
			facts := fit()
			test.change(&facts)
			for _, r := range Check(facts) {
				if r.Name != test.check {
					continue
				}
				if r.Level != test.level || !strings.Contains(r.Found, test.found) || !strings.Contains(r.Mend, test.mend) {
					t.Errorf("got %+v, want level %s, finding %q, solution %q", r, test.level, test.found, test.mend)
				}
				if (r.Level == Fail || r.Level == Warn) && r.Mend == "" {
					t.Errorf("%s has no solution", r.Name)
				}
				if Fit(Check(facts)) == (test.level == Fail) {
					t.Errorf("Fit does not match level %s", test.level)
				}
				return
			}
			t.Errorf("no result named %s", test.check)
		})
	}
}

// No module of the kernel mends a test that lacks its program.
func TestCheckWithoutMkfs(t *testing.T) {
	facts := fit()
	facts.Tools["mkfs.ext4"] = ""
	features := []string{"disks of machines", "project quotas"}
	for _, name := range features {
		facts.Probes[name] = `exec: "mkfs.ext4": executable file not found in $PATH`
	}
	for _, r := range Check(facts) {
		if slices.Contains(features, r.Name) && (r.Level != Info || r.Mend != "install the package e2fsprogs") {
			t.Errorf("%+v", r)
		}
	}
}

// A host of a remote management plane is not judged as a plane.
func TestCheckHost(t *testing.T) {
	facts := fit()
	facts.Host, facts.FreePorts, facts.PlaneProblem, facts.CertificatesExpiring = true, 0, "no space left", []string{"a.crt"}
	facts.AuthoritiesExpiring = []string{"ca.crt"}
	facts.Tools["useradd"] = ""
	for _, r := range Check(facts) {
		if r.Level == Warn || r.Level == Fail {
			t.Errorf("%+v", r)
		}
	}
}

func TestCgroups(t *testing.T) {
	write := func(dir string, files map[string]string) string {
		for name, content := range files {
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	const proc = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\nmemory\t2\t1\t0\npids\t3\t1\t1\n"
	for name, test := range map[string]struct {
		files   map[string]string
		version int
		found   string
	}{
		"version 2":                   {map[string]string{"cgroup.controllers": "cpu memory pids\n"}, 2, "cpu memory pids"},
		"version 1, memory disabled":  {map[string]string{"cpu/x": "", "memory/x": "", "pids/x": "", "p": proc}, 1, "cpu pids"},
		"version 1, pids not mounted": {map[string]string{"cpu/x": "", "p": proc}, 1, "cpu"},
		"no cgroup mounted":           {map[string]string{"p": proc}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := write(t.TempDir(), test.files)
			version, controllers := cgroups(dir, filepath.Join(dir, "p"))
			if version != test.version || strings.Join(controllers, " ") != test.found {
				t.Errorf("found version %d with %v", version, controllers)
			}
		})
	}
}

// TestGatherThisBox checks that Gather works on any machine.
func TestGatherThisBox(t *testing.T) {
	facts := Gather(filepath.Join(t.TempDir(), "not", "there", "yet"))
	if facts.MemoryTotal < gib/4 || facts.MemoryAvailable > facts.MemoryTotal || facts.DiskFree == 0 || facts.DiskType == "" || facts.Kernel == "" || facts.OpenFiles == 0 {
		t.Errorf("facts are missing: %+v", facts)
	}
	if facts.Root != (os.Geteuid() == 0) {
		t.Error("the effective user is wrong")
	}
	if facts.Root && len(facts.Probes) != len(features) {
		t.Errorf("want a probe for each of %d features, got %v", len(features), facts.Probes)
	}
	for _, link := range []string{"a", "b", "br", "vx"} {
		if _, err := os.Stat("/sys/class/net/" + link); err == nil {
			t.Errorf("the probe left the interface %s", link)
		}
	}
}
