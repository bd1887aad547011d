//go:build e2e

package harness

import (
	"bufio"
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
)

// Holdings contains the number of each object of Capstan on a host.
type Holdings map[string]int

// Look lists the processes, links, mounts, cgroups, nftables tables and namespaces of the host that may belong to
// Capstan.
func Look() (Holdings, error) {
	h := Holdings{}
	for _, look := range []func(Holdings) error{processes, links, mounts, cgroups, tables, runtimeFiles} {
		if err := look(h); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// Minus returns the objects of which h has more than other, sorted.
func (h Holdings) Minus(other Holdings) []string {
	var more []string
	for _, thing := range slices.Sorted(maps.Keys(h)) {
		if n := h[thing] - other[thing]; n > 0 {
			more = append(more, fmt.Sprintf("%d x %s", n, thing))
		}
	}
	return more
}

// Process is a process on the host.
type Process struct {
	PID     int
	Name    string   // base name of its first argument
	Args    []string // its arguments
	Machine string   // /etc/hostname below its root folder
}

// Processes lists the processes that run a program of Capstan or run in a machine. It omits processes that end
// meanwhile.
func Processes() ([]Process, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile("/etc/hostname")
	if err != nil {
		return nil, err
	}
	var found []Process
	for _, dir := range dirs {
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(cmdline) == 0 {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, err
		}
		args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		p := Process{PID: pid, Name: filepath.Base(args[0]), Args: args}
		if host, err := os.ReadFile(filepath.Join(dir, "root/etc/hostname")); err == nil && !bytes.Equal(host, own) {
			p.Machine = strings.TrimSpace(string(host))
		}
		if p.Machine != "" || ourPrograms[p.Name] {
			found = append(found, p)
		}
	}
	return found, nil
}

var ourPrograms = map[string]bool{
	"capstan": true, "capstand": true, "manager": true, "capi-core-manager": true, "capstan-init": true,
	"etcd": true, "kube-apiserver": true, "kube-controller-manager": true, "kube-scheduler": true,
	"kubelet": true, "kube-proxy": true, "containerd": true, "containerd-shim-runc-v2": true,
	"coredns": true, "metrics-server": true, "runc": true, "pause": true,
}

func processes(h Holdings) error {
	found, err := Processes()
	for _, p := range found {
		h["process "+p.Name+" of "+p.Machine]++
	}
	return err
}

func links(h Holdings) error {
	all, err := netlink.LinkList()
	for _, l := range all {
		h["link "+l.Attrs().Name]++
	}
	return err
}

func mounts(h Holdings) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 {
			h["mount "+fields[4]]++
		}
	}
	return lines.Err()
}

func cgroups(h Holdings) error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // The cgroup was removed meanwhile.
		}
		if d.IsDir() && strings.Contains(path, "capstan") {
			h["cgroup "+path]++
		}
		return nil
	})
}

func tables(h Holdings) error {
	out, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(out)) {
		h["nftables "+strings.TrimSpace(line)]++
	}
	return nil
}

// runtimeFiles lists the files below /run/capstan. The installations of a host share it. The folder and its locks may
// stay.
func runtimeFiles(h Holdings) error {
	return filepath.WalkDir("/run/capstan", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Base(path) != "lock" && filepath.Ext(path) != ".lock" {
			h["file "+path]++
		}
		return nil
	})
}
