//go:build e2e

package host_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// A machine that forks without end reaches its limit. Its neighbour and the host do not notice.
func TestForkBomb(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	spec := blue.machine(10)
	spec.PidsLimit = 300
	c.make(spec)
	c.make(blue.machine(11))
	// Bounded, so that the test does no harm where there is no limit.
	inside(t, blue.address(10), "(for i in $(seq 600); do sleep 1000 & done) >/dev/null 2>&1 </dev/null & sleep 0.1")
	eventually(t, "the limit is reached", func() error {
		// Of a command in the full machine even the shell cannot start, so the host looks.
		if n := processes(t, hostID(t, c)+"/"+spec.Id); n < 290 || n > 300 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	})
	if got := inside(t, blue.address(11), "for i in $(seq 50); do sleep 0 & done; wait; echo forks"); got != "forks" {
		t.Errorf("the neighbour: %s", got)
	}
	c.kill() // a new capstand starts, and with runc it removes the full machine
	c.start()
	c.make(blue.machine(12))
	c.deleteMachine(spec)
}

// processes is what the pids cgroup counts, threads too.
func processes(t *testing.T, group string) int {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if data, err := os.ReadFile(filepath.Join(root, "capstan", group, "pids.current")); err == nil {
			n, err := strconv.Atoi(strings.TrimSpace(string(data)))
			check(t, err)
			return n
		}
	}
	t.Fatal("no count of processes")
	return 0
}
