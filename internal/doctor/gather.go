package doctor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/moby/sys/capability"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/thread"
)

// FolderOf returns the facts of a folder, or no facts if it cannot be read.
func FolderOf(path string) Folder {
	info, err := os.Stat(path)
	if err != nil {
		return Folder{}
	}
	f := Folder{Path: path, Mode: info.Mode()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Owner = stat.Uid
	}
	return f
}

// Gather collects the facts of this box. root is the folder of the installation. It does not have to exist. The caller
// adds the facts of the installation: its ports, its assets, and whether it runs.
func Gather(root string) Facts {
	f := Facts{
		Root: os.Geteuid() == 0, Architecture: runtime.GOARCH, Kernel: kernel(), Capabilities: effective(),
		Probes: map[string]string{}, Seccomp: readable("/proc/sys/kernel/seccomp/actions_avail"),
		Sysctls: sysctls(), OpenFiles: openFiles(), Tools: map[string]string{}, Refusing: refusingChains(context.Background()),
	}
	f.CgroupVersion, f.Controllers = cgroups("/sys/fs/cgroup", "/proc/cgroups")
	for _, t := range tools {
		f.Tools[t.name], _ = exec.LookPath(t.name)
	}
	f.MemoryTotal, f.MemoryAvailable = memory()
	f.DiskFree, f.DiskType, f.RootProblem = disk(root)
	if f.Root {
		f.Probes = probe()
	}
	return f
}

func kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func readable(path string) bool { _, err := os.ReadFile(path); return err == nil }

// effective capabilities of this process, by their names in capabilities(7).
func effective() []string {
	caps, err := capability.NewPid2(0)
	if err != nil || caps.Load() != nil {
		return nil
	}
	var names []string
	for _, c := range capability.ListKnown() {
		if caps.Get(capability.EFFECTIVE, c) {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	return names
}

func sysctls() map[string]int64 {
	values := map[string]int64{}
	names := []string{"net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables"}
	for _, l := range limits {
		names = append(names, l.sysctl)
	}
	for _, name := range names {
		path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		text := strings.TrimSpace(string(data))
		value, err := strconv.ParseInt(text, 10, 64)
		if errors.Is(err, strconv.ErrRange) {
			value, err = 1<<62, nil // unlimited
		}
		if err == nil {
			values[name] = value
		}
	}
	return values
}

func openFiles() int64 {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 0
	}
	return int64(min(limit.Max, 1<<62))
}

// cgroups returns the version and the controllers. A hybrid box counts as version 1, because version 1 has the controllers.
func cgroups(mount, controllers string) (int, []string) {
	if data, err := os.ReadFile(filepath.Join(mount, "cgroup.controllers")); err == nil {
		return 2, strings.Fields(string(data))
	}
	data, err := os.ReadFile(controllers)
	if err != nil {
		return 0, nil
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 4 || strings.HasPrefix(line, "#") || fields[3] != "1" {
			continue
		}
		if _, err := os.Stat(filepath.Join(mount, fields[0])); err == nil {
			names = append(names, fields[0])
		}
	}
	if len(names) == 0 {
		return 0, nil
	}
	return 1, names
}

func memory() (total, available int64) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	scanner := bufio.NewScanner(bytes.NewReader(data))
	for scanner.Scan() {
		var name string
		var kib int64
		if _, err := fmt.Sscanf(scanner.Text(), "%s %d kB", &name, &kib); err != nil {
			continue
		}
		switch name {
		case "MemTotal:":
			total = kib << 10
		case "MemAvailable:":
			available = kib << 10
		}
	}
	return total, available
}

// disk describes the file system of root, or of its nearest ancestor that exists.
func disk(root string) (free int64, kind, problem string) {
	for dir := root; ; dir = filepath.Dir(dir) {
		var s unix.Statfs_t
		err := unix.Statfs(dir, &s)
		if errors.Is(err, unix.ENOENT) && dir != "/" {
			continue
		}
		if err != nil {
			return 0, "", fmt.Sprintf("%s: %v", dir, err)
		}
		if s.Flags&unix.ST_RDONLY != 0 {
			return 0, "", dir + " is mounted read-only"
		}
		return int64(s.Bavail) * s.Bsize, fsName(int64(s.Type)), "" //nolint:unconvert // its type differs by architecture
	}
}

func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("type %#x", magic)
}

// probe tests kernel features in temporary namespaces. Only a test gives a reliable answer, and it loads modules as the
// creation of a machine does.
func probe() (found map[string]string) {
	thread.Throwaway(func() { found = probeHere() })
	return found
}

func probeHere() map[string]string {
	flags := unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP
	if err := unix.Unshare(flags); err != nil {
		problem := "cannot create namespaces: " + err.Error()
		return map[string]string{"namespaces": problem, "overlay": problem, "veth": problem, "bridge": problem, "nftables": problem, "vxlan": problem, "disks of machines": problem, "project quotas": problem}
	}
	found := map[string]string{"namespaces": ""}
	note := func(name string, err error) {
		found[name] = ""
		if err != nil {
			found[name] = err.Error()
		}
	}
	note("overlay", probeOverlay())
	note("veth", netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}))
	note("bridge", netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}))
	note("vxlan", netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "vx"}, VxlanId: 1, Port: 4789}))
	note("nftables", probeNFTables())
	note("disks of machines", machinedisk.Probe())
	note("project quotas", machinedisk.ProbeQuotas(context.Background(), "/tmp")) // the tmpfs of probeOverlay
	return found
}

// probeOverlay mounts an overlay on its own tmpfs, in the mount namespace of this thread.
func probeOverlay() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir("/tmp/"+d, 0o700); err != nil {
			return err
		}
	}
	return unix.Mount("overlay", "/tmp/merged", "overlay", 0, "lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work")
}

// probeNFTables creates a chain as Services need it, with NAT and connection tracking, and a rule that compares the source of a packet with the
// routes to it, as the machines of pods need it.
func probeNFTables() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "probe"})
	c.AddChain(&nftables.Chain{Name: "nat", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
	both := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "probe"})
	sources := c.AddChain(&nftables.Chain{Name: "sources", Table: both, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityFilter})
	c.AddRule(&nftables.Rule{Table: both, Chain: sources, Exprs: []expr.Any{&expr.Fib{Register: unix.NFT_REG_1, FlagSADDR: true, FlagIIF: true, ResultOIF: true}}})
	return c.Flush()
}
