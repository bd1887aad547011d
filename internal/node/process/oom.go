package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// The kernel kills by size and by oom_score_adj when a machine is out of memory; 1000 of the latter weigh as much as all of the
// machine's memory. When PID 1 dies, so does all else in the machine.
const (
	// initScore exempts a process, as the kernel exempts the PID 1 of a host.
	initScore = -1000
	// aboveInit is the least distance between PID 1 and all others: a tenth of the memory, more than PID 1 ever takes.
	aboveInit = 100
)

// ProtectInit makes the calling process, PID 1 of a machine, the last one that the kernel kills. To lower a score needs
// CAP_SYS_RESOURCE; without it PID 1 keeps the score that it has, and SetOOMScore raises those of the others.
func ProtectInit() error {
	if err := writeOOMScore(os.Getpid(), initScore); err != nil && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}

// SetOOMScore gives a child of PID 1 the wanted oom_score_adj, or the lowest one that is well above PID 1's. A score that this
// process may not give leaves the child with the one that it has.
func SetOOMScore(pid, want int) error {
	own, err := oomScore("self")
	if err != nil {
		return err
	}
	return writeOOMScore(pid, allowedOOMScore(own, want))
}

// allowedOOMScore is the score of a child of a PID 1 with the score own.
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
