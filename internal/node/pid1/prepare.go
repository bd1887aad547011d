package pid1

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/blockvolume"
	"capstan.dev/capstan/internal/node/machine"
)

// programPath is the search path for programs: the machine's assets first, after the program for block volumes, if the machine has it.
const programPath = blockvolume.Programs + ":" + machineapi.SearchPath

// prepare performs the steps that a machine needs before its services. Each step can be repeated. It returns each error by
// the name of its step.
func prepare(m machine.Metadata) iter.Seq2[string, error] {
	steps := []struct {
		name string
		do   func() error
	}{
		{"PATH", func() error { return os.Setenv("PATH", programPath) }},
		{"folders", makeFolders},
		{"mount propagation", shareMounts},
		{"mounts for user namespaces", mountForUserNamespaces},
		{"cgroup", func() error { return leaveRootCgroup("/sys/fs/cgroup") }},
		{"loopback", loopbackUp},
		{"host name", func() error { return restoreHostname(m) }},
		{"/etc/hosts", func() error { return writeHosts(m) }},
		{"/etc/resolv.conf", func() error { return copyResolvConf(machine.ResolvConfPath, "/etc/resolv.conf") }},
		{"/etc/machine-id", func() error { return writeMachineID("/etc/machine-id", m) }},
		{"/etc", func() error { return writeTables(tables) }},
		{"users of services", addAccounts},
	}
	return func(yield func(string, error) bool) {
		for _, step := range steps {
			if !yield(step.name, step.do()) {
				return
			}
		}
	}
}

// makeFolders creates the folders that programs expect, and reports mounts that capstand did not provide.
func makeFolders() error {
	var errs []error
	for _, dir := range []string{"/run/lock", "/run/cluster-api", "/var/log", "/var/lib", "/var/tmp", "/etc", "/root"} {
		errs = append(errs, os.MkdirAll(dir, 0o755))
	}
	for _, path := range []string{"/proc/self", "/sys/fs/cgroup", "/dev/null", "/tmp", "/run"} {
		if _, err := os.Stat(path); err != nil {
			errs = append(errs, fmt.Errorf("expected a mount at %s: %w", path, err))
		}
	}
	return errors.Join(append(errs, os.Chmod("/var/tmp", 0o1777))...)
}

// shareMounts makes mounts shared, so that mounts from pods with bidirectional propagation reach the kubelet.
func shareMounts() error { return unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, "") }

// mountForUserNamespaces makes pods with "hostUsers: false" possible. A process in a user namespace may mount proc and sysfs only
// if one mount of each is visible in full, and read-only paths cover parts of /proc and other mounts parts of /sys. The folders are
// not below /dev: containerd copies devices from there. PID 1 may mount proc anyway, so the mounts give it no new rights.
func mountForUserNamespaces() error {
	var errs []error
	for _, fs := range []string{"proc", "sysfs"} {
		dir := filepath.Join("/run/visible", fs)
		errs = append(errs, os.MkdirAll(dir, 0o700), unix.Mount(fs, dir, fs, unix.MS_NOSUID|unix.MS_NOEXEC|unix.MS_NODEV, ""))
	}
	return errors.Join(errs...)
}

func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// leaveRootCgroup moves the processes out of the machine's root cgroup on cgroup v2, because a cgroup with its own processes
// cannot enable controllers for its children. On v1 it does nothing.
func leaveRootCgroup(root string) error {
	controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	leaf := filepath.Join(root, "capstan")
	if err := os.MkdirAll(leaf, 0o755); err != nil {
		return err
	}
	if err := moveProcesses(filepath.Join(root, "cgroup.procs"), filepath.Join(leaf, "cgroup.procs")); err != nil {
		return err
	}
	var errs []error
	for _, controller := range strings.Fields(string(controllers)) {
		// Enable the controllers one by one: a controller that the host does not delegate must not block the others.
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+controller), 0); err != nil {
			errs = append(errs, fmt.Errorf("enabling the cgroup controller %s: %w", controller, err))
		}
	}
	return errors.Join(errs...)
}

func moveProcesses(from, to string) error {
	procs, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	for _, pid := range strings.Fields(string(procs)) {
		// 0 is a process outside of this pid namespace, which does not belong to the machine. ESRCH: the process has ended.
		if err := os.WriteFile(to, []byte(pid), 0); err != nil && pid != "0" && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("moving process %s to %s: %w", pid, to, err)
		}
	}
	return nil
}

// restoreHostname sets the host name that the bootstrap data chose, or else the one from capstand.
func restoreHostname(m machine.Metadata) error {
	chosen, err := os.ReadFile("/etc/hostname")
	if name := strings.TrimSpace(string(chosen)); err == nil && name != "" {
		return setHostname(name)
	}
	if m.Hostname == "" {
		return nil
	}
	return setHostname(m.Hostname)
}

func writeHosts(m machine.Metadata) error {
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	old, err := readIfThere("/etc/hosts")
	if err != nil {
		return err
	}
	return rewrite("/etc/hosts", old, hostsFile(old, hostname, m))
}

// rewrite gives a file another content than old, which is nil if there is no file. A crash in between leaves one of both, unless the disk is
// full or the file is mounted: such a file changes in its place. A link to a file stays.
func rewrite(path string, old, content []byte) error {
	if old != nil && bytes.Equal(old, content) {
		return nil
	}
	// A link of the image can lead to a device.
	if target, err := filepath.EvalSymlinks(path); err == nil {
		if info, err := os.Stat(target); err == nil && info.Mode().IsRegular() {
			path = target
		}
	}
	err := atomicfile.WriteFile(path, content, 0o644)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOSPC) { // A mount cannot be replaced, and a full disk has no place for two files.
		return atomicfile.Overwrite(path, content, 0o644)
	}
	return err
}

// capstan owns the part of a file between these lines.
const partBegin, partEnd = "# capstan begin\n", "# capstan end\n"

// replacePart replaces capstan's part of a file and keeps the user's part. found is true if the file had capstan's part.
func replacePart(old []byte, part string) (out []byte, found bool) {
	before, rest, found := bytes.Cut(old, []byte(partBegin))
	_, after, _ := bytes.Cut(rest, []byte(partEnd))
	return slices.Concat(before, []byte(partBegin+part+partEnd), after), found
}

// hostsFile replaces capstan's part, or adds it before the user's part.
func hostsFile(old []byte, hostname string, m machine.Metadata) []byte {
	part := "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
	for _, a := range m.Addresses {
		part += fmt.Sprintf("%s %s\n", a.Address, hostname)
	}
	if out, found := replacePart(old, part); found {
		return out
	}
	out, _ := replacePart(nil, part)
	return append(out, old...)
}

// copyResolvConf writes the host's current resolver configuration, if capstand provides one.
func copyResolvConf(from, to string) error {
	host, err := readIfThere(from)
	if err != nil {
		return err
	}
	old, err := readIfThere(to)
	if err != nil {
		return err
	}
	content := old
	if host != nil {
		content = resolvConf(old, host)
	}
	return rewrite(to, old, content) // Write an empty file too, because the kubelet needs one.
}

// readIfThere returns nil for a file that does not exist.
func readIfThere(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

// resolvConf replaces the previous configuration of the host by the current one. It keeps a file without capstan's part,
// because the user wrote it, for example with the bootstrap data.
func resolvConf(old, host []byte) []byte {
	out, found := replacePart(old, reachable(host))
	if !found && len(bytes.TrimSpace(old)) > 0 {
		return old
	}
	return out
}

// reachable removes servers on the host's loopback address, which a machine cannot reach.
func reachable(host []byte) string {
	var out strings.Builder
	for line := range strings.Lines(string(host)) {
		fields := strings.Fields(line)
		if len(fields) > 1 && fields[0] == "nameserver" {
			if ip, err := netip.ParseAddr(fields[1]); err != nil || ip.IsLoopback() {
				continue
			}
		}
		out.WriteString(strings.TrimRight(line, "\n") + "\n")
	}
	return out.String()
}

// writeMachineID writes the machine-id again if it is lost. It keeps an existing id.
func writeMachineID(path string, m machine.Metadata) error {
	old, err := readIfThere(path)
	if err != nil || len(bytes.TrimSpace(old)) == 32 {
		return err
	}
	return rewrite(path, old, []byte(machineapi.MachineID(m.ID)))
}

// tables for programs that look up names. Without /etc/protocols, nft prints numbers, and a restarted kube-proxy does not
// recognise its own rules and removes them.
var tables = map[string]string{
	"/etc/passwd":    "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
	"/etc/group":     "root:x:0:\nnogroup:x:65534:\n",
	"/etc/protocols": "ip 0 IP\nicmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nipv6 41 IPv6\nipv6-icmp 58 IPv6-ICMP\nsctp 132 SCTP\n",
}

// writeTables creates the missing tables. A crash of the host can have left an empty one.
func writeTables(tables map[string]string) error {
	var errs []error
	for path, content := range tables {
		old, err := readIfThere(path)
		if err == nil && len(old) == 0 {
			err = rewrite(path, old, []byte(content))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// addAccounts adds the users of the services to /etc/passwd and /etc/group.
func addAccounts() error {
	var errs []error
	for path, complete := range map[string]func([]byte) []byte{"/etc/passwd": accounts.Passwd, "/etc/group": accounts.Group} {
		old, err := readIfThere(path)
		if err == nil && !bytes.Equal(old, complete(old)) {
			err = atomicfile.WriteFile(path, complete(old), 0o644)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
