package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// When a machine is out of memory, the kernel selects processes by size and oom_score_adj; a score of 1000 counts like all
// of the machine's memory. When PID 1 ends, all other processes of the machine end too.
const (
	// initScore exempts a process, like PID 1 of a host.
	initScore = -1000
	// aboveInit is the smallest distance between PID 1 and other processes: a fifth of the memory, 102 MiB of the smallest
	// machine. PID 1 uses about 34 MiB, of which 27 MiB are pages of its program.
	aboveInit = 200
)

// ProtectInit makes the calling process, PID 1 of a machine, the last one that the kernel kills. Lowering a score needs
// CAP_SYS_RESOURCE; without it, PID 1 keeps its score, and SetOOMScore raises the scores of the others.
func ProtectInit() error {
	if err := writeOOMScore(os.Getpid(), initScore); err != nil && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}

// SetOOMScore sets the oom_score_adj of a child of PID 1 to the wanted value, or to the lowest value well above that of PID
// 1. The child keeps its score if this process may not set the value.
func SetOOMScore(pid, want int) error {
	own, err := oomScore("self")
	if err != nil {
		return err
	}
	return writeOOMScore(pid, allowedOOMScore(own, want))
}

// allowedOOMScore returns the score for a child of a PID 1 with the score own.
func allowedOOMScore(own, want int) int { return min(max(want, own+aboveInit), 1000) }

func oomScore(process string) (int, error) {
	data, err := os.ReadFile("/proc/" + process + "/oom_score_adj")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(data)))
}

func writeOOMScore(pid, score int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(score)), 0)
}
