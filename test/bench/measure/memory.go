package measure

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Process is a program of a machine and its memory.
type Process struct {
	Name  string
	Bytes int64
}

// Usage is the memory of a machine.
type Usage struct {
	Role      string
	Total     int64
	Processes []Process
}

// PrintUsage prints the memory of machines, one per line.
func PrintUsage(usage []Usage) {
	for _, m := range usage {
		var parts []string
		for _, p := range m.Processes {
			parts = append(parts, fmt.Sprintf("%s %d", p.Name, p.Bytes>>20))
		}
		fmt.Printf("  %-14s %5d MiB: %s\n", m.Role, m.Total>>20, strings.Join(parts, ", "))
	}
}

// Memory returns the proportional set size of every machine of the clusters, by program. It finds a machine's processes
// by the /etc/hostname of their root folder, which contains the machine's name.
func (c *Creator) Memory(ctx context.Context, timelines []Timeline) ([]Usage, error) {
	byHost, err := processesByHostname()
	if err != nil {
		return nil, err
	}
	var usage []Usage
	for _, t := range timelines {
		machines := &clusterv1.MachineList{}
		if err := c.Plane.Client.List(ctx, machines, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{clusterv1.ClusterNameLabel: t.Cluster}); err != nil {
			return nil, err
		}
		for _, m := range machines.Items {
			u := Usage{Role: "worker", Processes: byHost[m.Spec.InfrastructureRef.Name]}
			if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
				u.Role = "control plane"
			}
			if len(u.Processes) == 0 {
				return nil, fmt.Errorf("found no process of machine %s", m.Name)
			}
			for _, process := range u.Processes {
				u.Total += process.Bytes
			}
			usage = append(usage, u)
		}
	}
	return usage, nil
}

// processesByHostname groups the processes of the host by the hostname in their root folder. It omits processes that end
// meanwhile.
func processesByHostname() (map[string][]Process, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	sums := map[string]map[string]int64{}
	for _, dir := range dirs {
		pss, err := proportionalSetSize(filepath.Join(dir, "smaps_rollup"))
		if err != nil || pss == 0 {
			continue
		}
		hostname, err := os.ReadFile(filepath.Join(dir, "root/etc/hostname"))
		name, nameErr := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || nameErr != nil {
			continue
		}
		host := strings.TrimSpace(string(hostname))
		if sums[host] == nil {
			sums[host] = map[string]int64{}
		}
		argv0, _, _ := strings.Cut(string(name), "\x00")
		sums[host][filepath.Base(argv0)] += pss
	}
	result := map[string][]Process{}
	for host, processes := range sums {
		for name, bytes := range processes {
			result[host] = append(result[host], Process{Name: name, Bytes: bytes})
		}
		slices.SortFunc(result[host], func(a, b Process) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
		})
	}
	return result, nil
}

func proportionalSetSize(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) == 3 && fields[0] == "Pss:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, lines.Err()
}
