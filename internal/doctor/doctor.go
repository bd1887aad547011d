// Package doctor finds the problems that prevent Capstan from working on a box, with their solutions.
// Gather collects facts. Check evaluates them with pure functions.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package doctor

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/version"
)

// Level of a finding.
type Level string

// Levels of findings. Only Fail changes the exit code of `capstan doctor`.
const (
	// OK: the box meets the requirement.
	OK Level = "ok"
	// Info: a fact that needs no action.
	Info Level = "info"
	// Warn: Capstan works, with the limits that the finding names.
	Warn Level = "warn"
	// Fail: Capstan does not work until the finding is fixed.
	Fail Level = "fail"
)

// Result of one check.
type Result struct {
	Name  string `json:"name"`
	Level Level  `json:"level"`
	Found string `json:"found"`
	// Mend is the solution; empty when no action is needed.
	Mend string `json:"mend,omitempty"`
}

// Fit reports whether no result has level Fail.
func Fit(results []Result) bool {
	return !slices.ContainsFunc(results, func(r Result) bool { return r.Level == Fail })
}

// Facts describe a box.
type Facts struct {
	// Root: this process runs as root. Otherwise Probes is empty.
	Root bool
	// Kernel release and Architecture, as Go names it.
	Kernel, Architecture string
	// Capabilities in effect, for example CAP_SYS_ADMIN.
	Capabilities []string
	// Probes maps the name of a kernel feature to its error; empty when the feature works.
	Probes map[string]string
	// Seccomp: the kernel supports seccomp filters.
	Seccomp bool
	// CgroupVersion is 1 (also for hybrid), 2, or 0 when no cgroups are mounted.
	CgroupVersion int
	// Controllers of cgroups that can be used.
	Controllers []string
	// Sysctls maps names to values. It has no entry for a sysctl that the kernel does not have.
	Sysctls map[string]int64
	// OpenFiles is the hard limit of open files per process.
	OpenFiles int64
	// Tools maps the name of a program to its path; empty when it is missing.
	Tools map[string]string
	// Refusing are the chains of the firewall that drop or reject packets by default.
	Refusing []Chain
	// MemoryTotal, MemoryAvailable and DiskFree (below the root folder) in bytes.
	MemoryTotal, MemoryAvailable, DiskFree int64
	// DiskType is the file system of the root folder.
	DiskType string
	// FreePorts is the number of free ports in the range of the management plane, at most WantedPorts.
	FreePorts int
	// Running: the management plane of this root folder runs, and already has its ports.
	Running bool
	// Machines: this box has machines, of its own plane or of another one. They use its memory and its disk.
	Machines bool
	// PlaneProblem is the reason why the running management plane, or one of its components, does not start; empty without a problem.
	PlaneProblem string
	// PlaneLog names the log of the running management plane.
	PlaneLog string
	// Host: the box is only a host of a remote management plane, and needs no ports.
	Host bool
	// CertificatesExpiring lists the leaf certificates of the management plane that are due for renewal, with their expiry.
	// AuthoritiesExpiring lists its authorities after two thirds of their validity.
	CertificatesExpiring, AuthoritiesExpiring []string
	// RootProblem is the reason why the root folder cannot be used.
	RootProblem string
	// Versions of Kubernetes in the assets folder, and the files that it lacks.
	Versions      []string
	MissingAssets []string
	// Assets is the folder with the programs. Other users must be able to enter it, because services in machines run as such users.
	Assets Folder
}

// Folder is a folder with programs that root runs. The mode is 0 if the folder is not known.
type Folder struct {
	Path  string
	Mode  os.FileMode
	Owner uint32
}

func (f Folder) check() []Result {
	switch {
	case f.Mode == 0:
		return nil
	case f.Mode.Perm()&0o001 == 0:
		return []Result{{"folder of the binaries", Fail, fmt.Sprintf("%s has mode %s: services in machines run as other users and cannot enter it", f.Path, f.Mode.Perm()), "chmod -R go+rX " + f.Path}}
	case f.Owner != 0 || f.Mode.Perm()&0o022 != 0:
		return []Result{{"folder of the binaries", Warn, fmt.Sprintf("%s belongs to the user %d and has mode %s: users other than root can replace programs that root runs", f.Path, f.Owner, f.Mode.Perm()), "chown -R root: " + f.Path + " && chmod -R go-w " + f.Path}}
	}
	return nil
}

// WantedPorts is the number of ports on loopback that a management plane uses.
const WantedPorts = 10

const (
	gib = int64(1) << 30
	// A management plane needs about 1 GiB, the first control plane and two workers about 1.
	leastMemory = 2 * gib
	// The limits of the machines of `capstan quickstart` are 4 GiB, and 1 GiB is reserved for the management plane.
	comfortMemory = 5 * gib
	// A host without a management plane also reserves 1 GiB for itself. The rest is for machines: the smallest one has 512 MiB, and a
	// control plane machine of the templates 2 GiB.
	reservedMemory    = 1 * gib
	leastHostMemory   = gib / 2
	comfortHostMemory = 2 * gib
	leastDisk         = 2 * gib
	comfortDisk       = 10 * gib
)

// Check evaluates the facts.
func Check(f Facts) []Result {
	var results []Result
	for _, check := range []func(Facts) []Result{
		checkRoot, checkCapabilities, checkFeatures, checkSeccomp, checkCgroups, checkLimits, checkSysctls,
		checkTools, checkFirewall, checkMemory, checkDisk, checkPorts, checkAssets, checkCertificates, checkAuthorities, checkPlane,
	} {
		results = append(results, check(f)...)
	}
	return results
}

// checkAuthorities finds authorities that need a new certificate. The plane does not renew them.
func checkAuthorities(f Facts) []Result {
	if f.Host || len(f.AuthoritiesExpiring) == 0 {
		return nil
	}
	return []Result{{"authorities", Warn, strings.Join(f.AuthoritiesExpiring, ", "), "the plane does not renew its authorities: give them new certificates, as docs/embedded.md describes (Certificate authorities)"}}
}

// checkCertificates finds leaf certificates that the plane should have renewed. The plane renews them while it runs.
func checkCertificates(f Facts) []Result {
	switch {
	case f.Host || !f.Root:
		return nil
	case len(f.CertificatesExpiring) == 0:
		return []Result{ok("certificates", "none is due for renewal")}
	case f.Running:
		return []Result{{"certificates", Warn, "not renewed: " + strings.Join(f.CertificatesExpiring, ", "), "read the reason in " + f.PlaneLog}}
	}
	return []Result{{"certificates", Warn, "not renewed: " + strings.Join(f.CertificatesExpiring, ", "), "start the management plane, which renews its certificates: capstan up"}}
}

// checkPlane finds a plane that does not start. It is no reason to refuse the box: the plane tries again, and `capstan up` of another
// build can start it.
func checkPlane(f Facts) []Result {
	if f.Host || f.PlaneProblem == "" {
		return nil
	}
	return []Result{{"management plane", Warn, "does not start: " + f.PlaneProblem, "remove the cause; the plane then starts by itself within a minute. `capstan status` shows its components"}}
}

func ok(name, found string) Result { return Result{Name: name, Level: OK, Found: found} }

func checkRoot(f Facts) []Result {
	if !f.Root {
		return []Result{{"root", Fail, "not root: kernel features cannot be tested", "run the command again with sudo"}}
	}
	return []Result{ok("root", "yes")}
}

// capabilities are those that machines need. Machines get all capabilities of root.
var capabilities = []string{"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_MKNOD", "CAP_SYS_CHROOT", "CAP_KILL"}

func checkCapabilities(f Facts) []Result {
	if !f.Root {
		return nil
	}
	var results []Result
	missing := without(capabilities, f.Capabilities)
	if len(missing) > 0 {
		results = append(results, Result{"capabilities", Fail, "root lacks " + strings.Join(missing, ", "), "run on the host itself, or in a container with all capabilities"})
	} else {
		results = append(results, ok("capabilities", "root has all that machines need"))
	}
	if !slices.Contains(f.Capabilities, "CAP_SYS_RESOURCE") {
		results = append(results, Result{"CAP_SYS_RESOURCE", Info, "root lacks it: pods keep the OOM score of their machine", "nothing to do: only the order in which the kernel kills processes under memory pressure changes"})
	}
	return results
}

// features of the kernel, with their purpose and their module, and the package of Debian whose programs their test needs.
var features = []struct {
	name, purpose, module, apt string
	optional                   bool
}{
	{"namespaces", "machines", "", "", false},
	{"overlay", "container images", "overlay", "", false},
	{"veth", "the machines' network interfaces", "veth", "", false},
	{"bridge", "the clusters' networks", "bridge", "", false},
	{"nftables", "Services, outbound NAT and isolation", "nf_tables", "", false},
	{"vxlan", "clusters that span several boxes", "vxlan", "", true},
	{"disks of machines", "disks of a fixed size", "loop", "e2fsprogs", true},
	{"project quotas", "the enforcement of the sizes of local volumes", "quota_v2", "e2fsprogs", true},
}

func checkFeatures(f Facts) []Result {
	if !f.Root {
		return nil
	}
	var results []Result
	for _, feature := range features {
		problem, tried := f.Probes[feature.name]
		mend := mendModule(feature.module, f.Kernel)
		if slices.ContainsFunc(tools, func(t tool) bool { return t.apt == feature.apt && f.Tools[t.name] == "" }) {
			mend = "install the package " + feature.apt
		}
		switch {
		case tried && problem == "":
			results = append(results, ok(feature.name, "works"))
		case feature.optional:
			results = append(results, Result{feature.name, Info, "does not work; only needed for " + feature.purpose + ": " + problem, mend})
		default:
			results = append(results, Result{feature.name, Fail, "does not work; needed for " + feature.purpose + ": " + problem, mend})
		}
	}
	return results
}

func mendModule(module, kernel string) string {
	if module == "" {
		return "use a kernel with all kinds of namespaces"
	}
	return fmt.Sprintf("run `modprobe %s`; if kernel %s lacks the module, use a kernel of Debian", module, kernel)
}

func checkSeccomp(f Facts) []Result {
	if !f.Seccomp {
		return []Result{{"seccomp", Fail, "the kernel has no seccomp filters; the default profile of containers needs them", "use a kernel with CONFIG_SECCOMP_FILTER"}}
	}
	return []Result{ok("seccomp", "works")}
}

func checkCgroups(f Facts) []Result {
	switch f.CgroupVersion {
	case 0:
		return []Result{{"cgroups", Fail, "none are mounted", "run `mount -t cgroup2 cgroup2 /sys/fs/cgroup`, or boot with systemd"}}
	case 1, 2:
	}
	wanted := []string{"cpu", "memory", "pids"}
	if missing := without(wanted, f.Controllers); len(missing) > 0 {
		return []Result{{"cgroups", Fail, fmt.Sprintf("version %d lacks the controllers %s", f.CgroupVersion, strings.Join(missing, ", ")),
			"boot with the kernel parameter cgroup_enable=memory, and without cgroup_disable"}}
	}
	result := ok("cgroups", fmt.Sprintf("version %d with %s", f.CgroupVersion, strings.Join(f.Controllers, ", ")))
	if f.CgroupVersion == 1 {
		result.Level, result.Found = Warn, result.Found+"; Kubernetes is about to drop version 1"
		result.Mend = "boot with version 2: systemd with the kernel parameter systemd.unified_cgroup_hierarchy=1"
	}
	return []Result{result}
}

// limits are sysctls that limit the number of machines on one box. capstand raises some of them.
var limits = []struct {
	sysctl  string
	least   int64
	comfort int64
	raised  bool
	purpose string
}{
	{"fs.inotify.max_user_instances", 128, 1024, true, "kubelets and containerds watch files"},
	{"fs.inotify.max_user_watches", 8192, 262144, true, "kubelets and containerds watch files"},
	{"fs.file-max", 65536, 262144, false, "each connection is an open file"},
	{"kernel.pid_max", 16384, 32768, true, "each process of each pod has an id on this box"},
	{"kernel.keys.maxkeys", 100, 200, false, "each container uses a key"},
}

func checkLimits(f Facts) []Result {
	var results []Result
	for _, l := range limits {
		value, found := f.Sysctls[l.sysctl]
		if !found {
			continue
		}
		if l.raised && value < l.comfort && !f.Running && !f.Machines {
			results = append(results, Result{l.sysctl, Info, strconv.FormatInt(value, 10), "nothing to do: capstand raises it when it starts, and within seconds while it runs"})
			continue
		}
		results = append(results, atLeast(l.sysctl, value, l.least, l.comfort, l.purpose, fmt.Sprintf("run `sysctl -w %s=%d`, and write the setting to /etc/sysctl.d/90-capstan.conf", l.sysctl, l.comfort)))
	}
	return append(results, atLeast("open files", f.OpenFiles, 1024, 65536, "etcd, API servers and containerd keep many open", "raise LimitNOFILE of the service, or run `ulimit -n 65536` before `capstan up`"))
}

func atLeast(name string, value, least, comfort int64, purpose, mend string) Result {
	switch {
	case value < least:
		return Result{name, Fail, fmt.Sprintf("%d; at least %d is needed: %s", value, least, purpose), mend}
	case value < comfort:
		return Result{name, Warn, fmt.Sprintf("%d: enough for a few machines; many machines need %d: %s", value, comfort, purpose), mend}
	}
	return ok(name, strconv.FormatInt(value, 10))
}

func checkSysctls(f Facts) []Result {
	var results []Result
	switch forward, found := f.Sysctls["net.ipv4.ip_forward"]; {
	case !found:
		results = append(results, Result{"net.ipv4.ip_forward", Fail, "cannot be read", "use a kernel with IPv4 forwarding"})
	case forward == 0:
		results = append(results, Result{"net.ipv4.ip_forward", Info, "off", "nothing to do: capstand turns it on when it starts, and within seconds while it runs"})
	default:
		results = append(results, ok("net.ipv4.ip_forward", "on"))
	}
	bridgeNF := "off: bridged packets do not pass the firewall of the host"
	if f.Sysctls["net.bridge.bridge-nf-call-iptables"] == 1 {
		bridgeNF = "on: bridged packets also pass the iptables rules of the host"
	}
	return append(results, Result{Name: "net.bridge.bridge-nf-call-iptables", Level: Info, Found: bridgeNF + "; Capstan works with both"})
}

// useradd is the only tool that a host without a management plane does not need.
const useradd = "useradd"

type tool struct{ name, apt, purpose string }

// tools are programs of the distribution, with their packages of Debian and their purpose. Machines use those of their host. docs/install.md
// lists them.
var tools = []tool{
	{"nft", "nftables", "capstand sets the firewall rules of networks with it"},
	{"conntrack", "conntrack", "kube-proxy clears stale connections with it"},
	{"mount", "mount", "the kubelet mounts volumes with it"},
	{"umount", "mount", "the kubelet unmounts volumes with it"},
	{"mkfs.ext4", "e2fsprogs", "capstand formats the disks of machines with it"},
	{"e2fsck", "e2fsprogs", "capstand checks the disks of machines with it"},
	{"resize2fs", "e2fsprogs", "capstand enlarges the disks of machines with it"},
	{"modprobe", "kmod", "the kernel loads modules with it"},
	{useradd, "passwd", "the management plane runs as its own user, which this program creates"},
}

func checkTools(f Facts) []Result {
	var results []Result
	for _, t := range tools {
		if f.Host && t.name == useradd {
			continue
		}
		if path := f.Tools[t.name]; path != "" {
			results = append(results, ok("tool "+t.name, path))
			continue
		}
		results = append(results, Result{"tool " + t.name, Fail, "not found: " + t.purpose, "install the package with " + t.name + " (Debian: `apt-get install " + t.apt + "`)"})
	}
	return results
}

func checkMemory(f Facts) []Result {
	found := fmt.Sprintf("%s of %s available", size(f.MemoryAvailable), size(f.MemoryTotal))
	if f.Host {
		mend := fmt.Sprintf("stop other programs, or add memory; the host keeps %s free of machines, and the smallest machine needs %s", size(reservedMemory), size(leastHostMemory))
		return sized(f, "memory", min(f.MemoryAvailable, f.MemoryTotal-reservedMemory), leastHostMemory, comfortHostMemory, found, mend)
	}
	mend := fmt.Sprintf("stop other programs; a management plane and a small cluster need about %s", size(leastMemory))
	return sized(f, "memory", f.MemoryAvailable, leastMemory, comfortMemory, found, mend)
}

func checkDisk(f Facts) []Result {
	if f.RootProblem != "" {
		return []Result{{"root folder", Fail, f.RootProblem, "choose another folder with --root"}}
	}
	found := fmt.Sprintf("%s free (%s)", size(f.DiskFree), f.DiskType)
	results := sized(f, "disk", f.DiskFree, leastDisk, comfortDisk, found, "delete files, or choose a folder on another file system with --root")
	if f.DiskType == "overlay" || f.DiskType == "tmpfs" {
		results = append(results, Result{"file system", Warn, "the root folder is on " + f.DiskType + ": container images may not unpack on an overlay, and a tmpfs loses its content in a reboot",
			"choose a folder on a real disk with --root"})
	}
	return results
}

// sized judges the free amount of a resource. A box with machines is fit without a free amount, because its machines have theirs already.
func sized(f Facts, name string, value, least, comfort int64, found, mend string) []Result {
	switch {
	case value < least && f.Machines:
		return []Result{{name, Warn, found + ": the box is in use, and has no room for another cluster", mend}}
	case value < least:
		return []Result{{name, Fail, found, mend}}
	case value < comfort:
		return []Result{{name, Warn, found + ": enough for a small cluster only", mend}}
	}
	return []Result{ok(name, found)}
}

func checkPorts(f Facts) []Result {
	switch {
	case f.Host:
		return nil
	case f.Running:
		return []Result{ok("ports", "in use by the management plane of this box, which runs")}
	case f.FreePorts < WantedPorts:
		return []Result{{"ports", Fail, fmt.Sprintf("%d free on 127.0.0.1 between 24000 and 29999; %d are needed", f.FreePorts, WantedPorts), "stop programs that listen there: `ss -ltnp` lists them"}}
	}
	return []Result{ok("ports", fmt.Sprintf("at least %d free on 127.0.0.1", f.FreePorts))}
}

func checkAssets(f Facts) []Result {
	purpose := ""
	if f.Host {
		purpose = ", of a host only (the management plane is remote)"
	}
	if len(f.MissingAssets) > 0 {
		return []Result{{"binaries", Fail, "missing: " + strings.Join(f.MissingAssets, ", ") + purpose, version.InstallPrograms}}
	}
	return append(f.Assets.check(), ok("binaries", "Kubernetes "+strings.Join(f.Versions, ", ")+" for "+f.Architecture+purpose))
}

func size(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/float64(gib)) }

func without(wanted, have []string) []string {
	return slices.DeleteFunc(slices.Clone(wanted), func(s string) bool { return slices.Contains(have, s) })
}
