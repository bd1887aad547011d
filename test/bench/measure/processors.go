package measure

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Processors are the times of all processors of the box since its boot, in clock ticks.
type Processors struct{ Busy, Idle int64 }

// ReadProcessors measures now.
func ReadProcessors() (Processors, error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return Processors{}, err
	}
	return parseProcessors(string(raw))
}

// parseProcessors parses the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal. A processor that waits for a
// disk is idle. The times of guests are part of user and nice.
func parseProcessors(stat string) (p Processors, err error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return p, fmt.Errorf("/proc/stat: expected the line cpu with at least eight times, found %q", line)
	}
	for i, field := range fields[1:9] {
		ticks, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return p, fmt.Errorf("/proc/stat: %w", err)
		}
		if i == 3 || i == 4 {
			p.Idle += ticks
		} else {
			p.Busy += ticks
		}
	}
	return p, nil
}

// BusySince returns the busy part of the time since an earlier measurement, from 0 to 1.
func (p Processors) BusySince(before Processors) float64 {
	busy, idle := p.Busy-before.Busy, p.Idle-before.Idle
	if busy+idle == 0 {
		return 0
	}
	return float64(busy) / float64(busy+idle)
}
