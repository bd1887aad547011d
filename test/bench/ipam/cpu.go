package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of /proc/PID/stat, the same on all of Linux.
const clockTick = 10 * time.Millisecond

// cpuTime is the processor time that this process and its children have used:
// the API server, etcd and the manager. Unlike the time on the clock it does not
// depend on what else the machine does.
func cpuTime() time.Duration {
	var sum time.Duration
	for _, dir := range append(children(), "/proc/self") {
		if _, cpu, err := readStat(dir + "/stat"); err == nil {
			sum += cpu
		}
	}
	return sum
}

// children are the folders in /proc of those of this process.
func children() (dirs []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		if parent, _, err := readStat(file); err == nil && parent == os.Getpid() {
			dirs = append(dirs, filepath.Dir(file))
		}
	}
	return dirs
}

// serverMemory is the most memory that the API server has had, in bytes.
func serverMemory() uint64 {
	for _, dir := range children() {
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil || !strings.HasPrefix(string(status), "Name:\tkube-apiserver") {
			continue
		}
		_, peak, _ := strings.Cut(string(status), "VmHWM:")
		var kib uint64
		_, _ = fmt.Sscan(peak, &kib)
		return kib << 10
	}
	return 0
}

func (p *process) cpuTime() time.Duration {
	_, cpu, _ := readStat(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	return cpu
}

func readStat(file string) (parent int, cpu time.Duration, err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err // it has ended
	}
	// The name, in parentheses, can contain anything.
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) < 13 {
		return 0, 0, fmt.Errorf("%s: wanted 13 fields after the name, found %d", file, len(fields))
	}
	parent, err = strconv.Atoi(fields[1])
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return parent, time.Duration(user+system) * clockTick, err
}
