package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"capstan.dev/capstan/test/bench/measure"
)

// cpuTime returns the processor time of this process and its children: the API server, etcd and the manager. Unlike
// elapsed time, it does not depend on other processes.
func cpuTime() time.Duration {
	var sum time.Duration
	for _, dir := range append(children(), "/proc/self") {
		if p, err := measure.ReadStat(dir); err == nil {
			sum += p.CPU
		}
	}
	return sum
}

// children returns the folders in /proc of this process's children.
func children() (dirs []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		if p, err := measure.ReadStat(filepath.Dir(file)); err == nil && p.Parent == os.Getpid() {
			dirs = append(dirs, filepath.Dir(file))
		}
	}
	return dirs
}

// serverMemory returns the maximum memory of the API server, in bytes.
func serverMemory() uint64 {
	for _, dir := range children() {
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil || !strings.HasPrefix(string(status), "Name:\tkube-apiserver") {
			continue
		}
		return peakMemory(dir)
	}
	return 0
}

// peakMemory returns the maximum memory of the process with this folder in /proc, in bytes.
func peakMemory(dir string) uint64 {
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return 0 // The process has ended.
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	var kib uint64
	_, _ = fmt.Sscan(peak, &kib)
	return kib << 10
}

func (p *process) cpuTime() time.Duration {
	used, _ := measure.ReadStat(fmt.Sprintf("/proc/%d", p.cmd.Process.Pid)) // An error means that it has ended.
	return used.CPU
}
