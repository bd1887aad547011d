// Package doctor looks at a box and says what keeps Capstan from working on it, and how to mend it.
// Gathering facts and judging them are apart: checks are pure functions.
//
// Layer: tool.
package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	// Mend says how to make it right; empty when there is nothing to do.
	Mend string `json:"mend,omitempty"`
}

// Fit tells whether nothing must be mended.
func Fit(results []Result) bool {
	return !slices.ContainsFunc(results, func(r Result) bool { return r.Level == Fail })
}

// Facts are what was found on a box.
type Facts struct {
	// Root: this runs as root. Without it the probes below are empty.
	Root bool
	// Kernel release and Architecture, as Go names it.
	Kernel, Architecture string
	// Capabilities in effect, for example CAP_SYS_ADMIN.
	Capabilities []string
	// Probes of kernel features: name to what went wrong, empty when it works.
	Probes map[string]string
	// Seccomp filters can be used.
	Seccomp bool
	// CgroupVersion is 1 (or hybrid), 2, or 0 when nothing is mounted.
	CgroupVersion int
	// Controllers that cgroups can use.
	Controllers []string
	// Sysctls by name; absent when the kernel has none of the name.
	Sysctls map[string]int64
	// OpenFiles is the hard limit of open files of a process.
	OpenFiles int64
	// Tools by name, with their path; empty when missing.
	Tools map[string]string
	// ForwardDrop names the firewall chains that drop forwarded packets by default.
	ForwardDrop []string
	// MemoryTotal, MemoryAvailable and DiskFree (below the root folder) in bytes.
	MemoryTotal, MemoryAvailable, DiskFree int64
	// DiskType is the file system of the root folder.
	DiskType string
	// FreePorts are how many of the plane's range are free, up to WantedPorts.
	FreePorts int
	// Running: the plane of this root runs, and has its ports already.
	Running bool
	// Host: the box is only to be a host of a management plane elsewhere, and needs no ports.
	Host bool
	// CertificatesExpiring are those of the management plane that should have been renewed, each with its end.
	CertificatesExpiring []string
	// RootProblem is why the root folder cannot be used.
	RootProblem string
	// Versions of Kubernetes in the assets, and what is missing from the assets folder.
	Versions      []string
	MissingAssets []string
}

// WantedPorts is how many ports on loopback a management plane takes.
const WantedPorts = 10

const (
	gib = int64(1) << 30
	// A management plane needs about 1 GiB, the first control plane and two workers about 2.
	leastMemory   = 2 * gib
	comfortMemory = 4 * gib
	leastDisk     = 2 * gib
	comfortDisk   = 10 * gib
)

// Check judges the facts.
func Check(f Facts) []Result {
	var results []Result
	for _, check := range []func(Facts) []Result{
		checkRoot, checkCapabilities, checkFeatures, checkSeccomp, checkCgroups, checkLimits, checkSysctls,
		checkTools, checkForward, checkMemory, checkDisk, checkPorts, checkAssets, checkCertificates,
	} {
		results = append(results, check(f)...)
	}
	return results
}

// checkCertificates: the plane renews its leaves while it runs, and its authorities last ten years.
func checkCertificates(f Facts) []Result {
	switch {
	case f.Host || !f.Root:
		return nil
	case len(f.CertificatesExpiring) == 0:
		return []Result{ok("certificates", "none waits for its renewal")}
	case f.Running:
		return []Result{{"certificates", Warn, "not renewed: " + strings.Join(f.CertificatesExpiring, ", "), "read logs/plane.log below the root folder: it contains the reason"}}
	}
	return []Result{{"certificates", Warn, "not renewed: " + strings.Join(f.CertificatesExpiring, ", "), "start the management plane, which renews them: capstan up"}}
}

func ok(name, found string) Result { return Result{Name: name, Level: OK, Found: found} }

func checkRoot(f Facts) []Result {
	if !f.Root {
		return []Result{{"root", Fail, "not root; kernel features could not be tried", "run it again with sudo"}}
	}
	return []Result{ok("root", "yes")}
}

// capabilities that machines need: they get all that root has.
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
		results = append(results, ok("capabilities", "all that machines need"))
	}
	if !slices.Contains(f.Capabilities, "CAP_SYS_RESOURCE") {
		results = append(results, Result{"CAP_SYS_RESOURCE", Info, "root lacks it: pods keep the OOM score of their machine", "nothing to do; only the order in which the kernel kills under memory pressure differs"})
	}
	return results
}

// features of the kernel, and what they are for.
var features = []struct {
	name, purpose, module string
	optional              bool
}{
	{"namespaces", "machines", "", false},
	{"overlay", "container images", "overlay", false},
	{"veth", "the machines' network interfaces", "veth", false},
	{"bridge", "the clusters' networks", "bridge", false},
	{"nftables", "Services, outbound NAT and isolation", "nf_tables", false},
	{"vxlan", "clusters that span several boxes", "vxlan", true},
}

func checkFeatures(f Facts) []Result {
	if !f.Root {
		return nil
	}
	var results []Result
	for _, feature := range features {
		problem, tried := f.Probes[feature.name]
		switch {
		case tried && problem == "":
			results = append(results, ok(feature.name, "works"))
		case feature.optional:
			results = append(results, Result{feature.name, Info, "does not work, needed only for " + feature.purpose + ": " + problem, mendModule(feature.module, f.Kernel)})
		default:
			results = append(results, Result{feature.name, Fail, "does not work, needed for " + feature.purpose + ": " + problem, mendModule(feature.module, f.Kernel)})
		}
	}
	return results
}

func mendModule(module, kernel string) string {
	if module == "" {
		return "use a kernel with namespaces of every kind"
	}
	return fmt.Sprintf("modprobe %s; if kernel %s does not have it, use Debian's own", module, kernel)
}

func checkSeccomp(f Facts) []Result {
	if !f.Seccomp {
		return []Result{{"seccomp", Fail, "the kernel has no seccomp filters, which containers' default profile needs", "use a kernel with CONFIG_SECCOMP_FILTER"}}
	}
	return []Result{ok("seccomp", "works")}
}

func checkCgroups(f Facts) []Result {
	switch f.CgroupVersion {
	case 0:
		return []Result{{"cgroups", Fail, "none are mounted", "mount -t cgroup2 cgroup2 /sys/fs/cgroup, or boot with systemd"}}
	case 1, 2:
	}
	wanted := []string{"cpu", "memory", "pids"}
	if missing := without(wanted, f.Controllers); len(missing) > 0 {
		return []Result{{"cgroups", Fail, fmt.Sprintf("version %d without the controllers %s", f.CgroupVersion, strings.Join(missing, ", ")),
			"boot with cgroup_enable=memory, and without cgroup_disable"}}
	}
	result := ok("cgroups", fmt.Sprintf("version %d with %s", f.CgroupVersion, strings.Join(f.Controllers, ", ")))
	if f.CgroupVersion == 1 {
		result.Level, result.Mend = Info, "nothing to do; Kubernetes prefers version 2 (systemd.unified_cgroup_hierarchy=1)"
	}
	return []Result{result}
}

// limits that many machines on one box run into.
var limits = []struct {
	sysctl    string
	least     int64
	comfort   int64
	namespace string
}{
	{"fs.inotify.max_user_instances", 128, 1024, "kubelets and containerds watch files"},
	{"fs.inotify.max_user_watches", 8192, 262144, "kubelets and containerds watch files"},
	{"fs.file-max", 65536, 262144, "every connection is an open file"},
	{"kernel.pid_max", 16384, 32768, "every process of every pod has an id here"},
	{"kernel.keys.maxkeys", 100, 200, "every container takes a key"},
}

func checkLimits(f Facts) []Result {
	var results []Result
	for _, l := range limits {
		value, found := f.Sysctls[l.sysctl]
		if !found {
			continue
		}
		results = append(results, atLeast(l.sysctl, value, l.least, l.comfort, l.namespace, fmt.Sprintf("sysctl -w %s=%d, and the same in /etc/sysctl.d/90-capstan.conf", l.sysctl, l.comfort)))
	}
	return append(results, atLeast("open files", f.OpenFiles, 1024, 65536, "etcd, API servers and containerd keep many open", "raise LimitNOFILE of the service, or `ulimit -n 65536` before `capstan up`"))
}

func atLeast(name string, value, least, comfort int64, purpose, mend string) Result {
	switch {
	case value < least:
		return Result{name, Fail, fmt.Sprintf("%d, needed are %d: %s", value, least, purpose), mend}
	case value < comfort:
		return Result{name, Warn, fmt.Sprintf("%d is enough for a few machines; %d for many: %s", value, comfort, purpose), mend}
	}
	return ok(name, strconv.FormatInt(value, 10))
}

func checkSysctls(f Facts) []Result {
	var results []Result
	switch forward, found := f.Sysctls["net.ipv4.ip_forward"]; {
	case !found:
		results = append(results, Result{"net.ipv4.ip_forward", Fail, "cannot be read", "use a kernel with IPv4 forwarding"})
	case forward == 0:
		results = append(results, Result{"net.ipv4.ip_forward", Info, "off", "nothing to do: capstand turns it on when the first network is made"})
	default:
		results = append(results, ok("net.ipv4.ip_forward", "on"))
	}
	bridgeNF := "off: bridged packets pass no firewall of the host"
	if f.Sysctls["net.bridge.bridge-nf-call-iptables"] == 1 {
		bridgeNF = "on: bridged packets pass the host's iptables as well"
	}
	return append(results, Result{Name: "net.bridge.bridge-nf-call-iptables", Level: Info, Found: bridgeNF + "; both are fine"})
}

// tools of Debian, and the packages that they are in.
var tools = []struct{ name, apt, purpose string }{
	{"nft", "nftables", "the rules of networks"},
	{"conntrack", "conntrack", "kube-proxy clears stale connections with it"},
	{"mount", "mount", "the kubelet mounts volumes with it"},
	{"mkfs.ext4", "e2fsprogs", "each machine has a disk of its own"},
	{"useradd", "passwd", "the management plane runs as a user of its own"},
}

func checkTools(f Facts) []Result {
	var results []Result
	for _, t := range tools {
		if path := f.Tools[t.name]; path != "" {
			results = append(results, ok("tool "+t.name, path))
			continue
		}
		results = append(results, Result{"tool " + t.name, Fail, "not found: " + t.purpose, "apt-get install " + t.apt})
	}
	return results
}

func checkForward(f Facts) []Result {
	if len(f.ForwardDrop) == 0 {
		return []Result{ok("forwarding", "no firewall drops forwarded packets by default")}
	}
	return []Result{{"forwarding", Warn, "dropped by default by " + strings.Join(f.ForwardDrop, ", ") + ": machines may not reach the outside",
		"allow the clusters' networks there, for example `iptables -I FORWARD -s 10.200.0.0/13 -j ACCEPT` and `-d 10.200.0.0/13` (Docker's rules leave DOCKER-USER for it)"}}
}

func checkMemory(f Facts) []Result {
	found := fmt.Sprintf("%s of %s available", size(f.MemoryAvailable), size(f.MemoryTotal))
	mend := fmt.Sprintf("end what is not needed; a management plane and a small cluster take about %s", size(leastMemory))
	return sized("memory", f.MemoryAvailable, leastMemory, comfortMemory, found, mend)
}

func checkDisk(f Facts) []Result {
	if f.RootProblem != "" {
		return []Result{{"root folder", Fail, f.RootProblem, "choose another one with --root"}}
	}
	found := fmt.Sprintf("%s free (%s)", size(f.DiskFree), f.DiskType)
	results := sized("disk", f.DiskFree, leastDisk, comfortDisk, found, "make room, or choose another file system with --root")
	if f.DiskType == "overlay" || f.DiskType == "tmpfs" {
		results = append(results, Result{"file system", Warn, "the root folder lies on " + f.DiskType + ": container images may not unpack on an overlay, and nothing on a tmpfs survives a reboot",
			"choose a real disk with --root"})
	}
	return results
}

func sized(name string, value, least, comfort int64, found, mend string) []Result {
	switch {
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
		return []Result{ok("ports", "taken by the management plane that runs")}
	case f.FreePorts < WantedPorts:
		return []Result{{"ports", Fail, fmt.Sprintf("%d free on 127.0.0.1 between 20000 and 29999, needed are %d", f.FreePorts, WantedPorts), "end what listens there: ss -ltnp"}}
	}
	return []Result{ok("ports", fmt.Sprintf("%d and more free on 127.0.0.1", f.FreePorts))}
}

func checkAssets(f Facts) []Result {
	purpose, mend := "", "make build, or point --assets at the folder that it filled"
	if f.Host {
		purpose, mend = ", of a host only: the management plane is elsewhere", "unpack the release's capstan-host archive again, or point --assets at the folder where it is"
	}
	if len(f.MissingAssets) > 0 {
		return []Result{{"binaries", Fail, "missing: " + strings.Join(f.MissingAssets, ", ") + purpose, mend}}
	}
	return []Result{ok("binaries", "Kubernetes "+strings.Join(f.Versions, ", ")+" for "+f.Architecture+purpose)}
}

func size(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/float64(gib)) }

func without(wanted, have []string) []string {
	return slices.DeleteFunc(slices.Clone(wanted), func(s string) bool { return slices.Contains(have, s) })
}
