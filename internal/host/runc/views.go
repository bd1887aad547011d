package runc

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"capstan.dev/capstan/internal/clearfolder"
)

// A container sees the size of the whole host in /proc/meminfo, /proc/cpuinfo and /sys/devices/system. cadvisor in the
// kubelet reads the resources of its Node from these files:
//
//   - MemoryCapacity is MemTotal of /proc/meminfo, and SwapCapacity is SwapTotal;
//   - NumCores is the number of cpu<N> folders in the node<N> folders of /sys/devices/system/node
//     that /sys/devices/system/cpu/online lists and that have a topology;
//   - the physical cores are the distinct core ids of /proc/cpuinfo.
//
// Views are files with the machine's own size that are bound over these files.
const (
	viewMeminfo = "proc/meminfo"
	viewCPUInfo = "proc/cpuinfo"
	viewCPUs    = "sys/devices/system/cpu"
	viewNodes   = "sys/devices/system/node"
)

// views lists the views of a machine. A machine without a CPU limit sees the CPUs of the host.
func views(cpus int32) []string {
	if cpus == 0 {
		return []string{viewMeminfo}
	}
	return []string{viewMeminfo, viewCPUInfo, viewCPUs, viewNodes}
}

// clearTime is the time to remove the former views.
const clearTime = 10 * time.Second

// WriteViews writes the views of a machine with these limits into p.Views. cpuinfo is the host's file.
func WriteViews(p Params, cpuinfo string) error {
	files := map[string]string{viewMeminfo: meminfo(p)}
	if p.CPUs > 0 {
		files[viewCPUInfo] = limitCPUInfo(cpuinfo, p.CPUs)
		cpuTree(files, p.CPUs, p.MemoryBytes)
	}
	dir := p.Views
	// Root in the machine can have changed the former views.
	if err := clearfolder.Remove(context.Background(), dir, clearTime); err != nil {
		return err
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o444); err != nil {
			return err
		}
	}
	return nil
}

// meminfo returns the /proc/meminfo of a machine that has just started. It does not show the current use, which programs in
// containers read from the cgroup.
func meminfo(p Params) string {
	kb, swap := p.MemoryBytes/1024, int64(0)
	if p.SwapBytes != nil {
		swap = *p.SwapBytes / 1024
	}
	var b strings.Builder
	for _, line := range []struct {
		name string
		kb   int64
	}{
		{"MemTotal", kb}, {"MemFree", kb}, {"MemAvailable", kb}, {"Buffers", 0}, {"Cached", 0},
		{"SwapCached", 0}, {"SwapTotal", swap}, {"SwapFree", swap},
	} {
		fmt.Fprintf(&b, "%-16s%8d kB\n", line.name+":", line.kb)
	}
	for _, name := range []string{"HugePages_Total", "HugePages_Free", "HugePages_Rsvd", "HugePages_Surp"} {
		fmt.Fprintf(&b, "%-16s%8d\n", name+":", 0)
	}
	return b.String()
}

// numbering matches the fields of /proc/cpuinfo that contain the number of processors and their grouping.
var numbering = regexp.MustCompile(`(?m)^(processor|siblings|core id|cpu cores|physical id)(\s*: )\d+$`)

// limitCPUInfo keeps the host's first n processors, as n cores of one socket.
func limitCPUInfo(cpuinfo string, n int32) string {
	var out []string
	for i, block := range strings.Split(strings.TrimSpace(cpuinfo), "\n\n") {
		if int32(i) == n {
			break
		}
		out = append(out, numbering.ReplaceAllStringFunc(block, func(line string) string {
			field := numbering.FindStringSubmatch(line)
			value := map[string]int{
				"processor": i, "core id": i, "siblings": int(n), "cpu cores": int(n), "physical id": 0,
			}[field[1]]
			return field[1] + field[2] + strconv.Itoa(value)
		}))
	}
	return strings.Join(out, "\n\n") + "\n\n"
}

// cpuTree adds n processors, as cores of one socket on one memory node.
func cpuTree(files map[string]string, n int32, memoryBytes int64) {
	all := "0"
	if n > 1 {
		all = fmt.Sprintf("0-%d", n-1)
	}
	for _, name := range []string{"online", "possible", "present"} {
		files[filepath.Join(viewCPUs, name)] = all + "\n"
	}
	for _, name := range []string{"online", "possible", "has_cpu", "has_memory", "has_normal_memory"} {
		files[filepath.Join(viewNodes, name)] = "0\n"
	}
	node := filepath.Join(viewNodes, "node0")
	files[filepath.Join(node, "cpulist")] = all + "\n"
	files[filepath.Join(node, "distance")] = "10\n"
	files[filepath.Join(node, "meminfo")] = fmt.Sprintf("Node 0 MemTotal:       %d kB\n", memoryBytes/1024)
	for i := range n {
		for _, parent := range []string{viewCPUs, node} {
			topology := filepath.Join(parent, fmt.Sprintf("cpu%d", i), "topology")
			files[filepath.Join(topology, "core_id")] = fmt.Sprintf("%d\n", i)
			files[filepath.Join(topology, "physical_package_id")] = "0\n"
			files[filepath.Join(topology, "thread_siblings_list")] = fmt.Sprintf("%d\n", i)
			files[filepath.Join(topology, "core_siblings_list")] = all + "\n"
		}
	}
}
