//go:build e2e

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/supervisor"
)

// PID 1 survives a machine whose processes or whose own descriptors are used up, and answers. A service that dies meanwhile comes
// back when there is room again.
func TestExhausted(t *testing.T) {
	w := newWorld(t)
	h := w.newMachine("crowded", "10.77.0.2")
	h.pids = 100
	dir := filepath.Join(h.root, supervisor.Dir)
	must(t, os.MkdirAll(dir, 0o755))
	for name, script := range map[string]string{
		"database": `exec sleep 100000`,
		"pods":     `mkfifo /run/go; while :; do read -r command < /run/go; eval "$command" & done`,
	} {
		must(t, supervisor.Service{Name: name, Command: []string{"/bin/sh", "-c", script}}.Write(dir))
	}
	h.start(nil)
	running := func(s initapi.Status) bool {
		return len(s.Services) == 2 && len((initapi.Status{Services: s.Services}).NotReady([]string{"database", "pods"})) == 0
	}
	h.until("services run", patience, running)
	first := h.pid1()

	t.Run("processes", func(t *testing.T) {
		// The last processes of the machine wait for each other: the rest of the loop cannot fork.
		h.order(t, `for i in $(seq 200); do sleep 100000 & done`)
		eventually(t, patience, func() error {
			if n := h.processes(); n < h.pids-2 {
				return fmt.Errorf("%d of %d processes", n, h.pids)
			}
			return nil
		})
		h.killWithout(t, "database")
		signalAll(t, h, "sleep", unix.SIGKILL)
		h.until("services run again", patience, running)
	})
	t.Run("descriptors", func(t *testing.T) {
		var was unix.Rlimit
		must(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, nil, &was))
		must(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}, nil))
		h.killWithout(t, "database")
		must(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, &was, nil))
		h.until("services run again", patience, running)
	})
	if now := h.pid1(); now != first {
		t.Errorf("PID 1 was process %d, is %d", first, now)
	}
}
