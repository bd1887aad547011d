package measure

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Stat are the counters of the kernel for a process.
type Stat struct {
	// Parent is the id of the parent process.
	Parent int
	// CPU is the processor time of the process, without its children.
	CPU time.Duration
	// RSS is the memory of the process, in bytes.
	RSS int64
}

// ReadStat reads the process with a folder in /proc. It fails if the process has ended.
func ReadStat(dir string) (Stat, error) {
	file := filepath.Join(dir, "stat")
	raw, err := os.ReadFile(file)
	if err != nil {
		return Stat{}, err
	}
	p, err := parseStat(string(raw))
	if err != nil {
		return p, fmt.Errorf("%s: %w", file, err)
	}
	return p, nil
}

// clockTick is the unit of times in /proc/PID/stat, which is the same on all Linux systems.
const clockTick = 10 * time.Millisecond

// parseStat parses /proc/PID/stat: the fields 4 (parent), 14 and 15 (time in user and system mode) and 24 (resident pages).
func parseStat(stat string) (p Stat, err error) {
	const afterName = 3 // the number of the first field after the name
	// The name, in parentheses, can contain anything.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	number := func(field int) (n int64) {
		if err != nil {
			return 0
		}
		if field -= afterName; field >= len(fields) {
			err = fmt.Errorf("want at least %d fields after the name, got %d", field+1, len(fields))
			return 0
		}
		n, err = strconv.ParseInt(fields[field], 10, 64)
		return n
	}
	p = Stat{
		Parent: int(number(4)), CPU: time.Duration(number(14)+number(15)) * clockTick, RSS: number(24) * int64(os.Getpagesize()),
	}
	return p, err
}
