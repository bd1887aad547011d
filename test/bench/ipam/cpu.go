package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of /proc/PID/stat, which is the same on all Linux systems.
const clockTick = 10 * time.Millisecond

// cpuTime returns the processor time of this process and its children: the API server, etcd and the manager. Unlike
// elapsed time, it does not depend on other processes.
func cpuTime() time.Duration {
	var sum time.Duration
	for _, dir := range append(children(), "/proc/self") {
		if _, cpu, err := readStat(dir + "/stat"); err == nil {
			sum += cpu
		}
	}
	return sum
}

// children returns the folders in /proc of this process's children.
func children() (dirs []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		if parent, _, err := readStat(file); err == nil && parent == os.Getpid() {
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
	_, cpu, _ := readStat(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	return cpu
}

func readStat(file string) (parent int, cpu time.Duration, err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err // The process has ended.
	}
	// The name, in parentheses, can contain anything.
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) < 13 {
		return 0, 0, fmt.Errorf("%s: want 13 fields after the name, got %d", file, len(fields))
	}
	parent, err = strconv.Atoi(fields[1])
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return parent, time.Duration(user+system) * clockTick, err
}
