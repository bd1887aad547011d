//go:build e2e

package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/supervisor"
	"capstan.dev/capstan/internal/testenv/expect"
)

// PID 1 survives when a machine has no processes left, and when PID 1 reaches its limit of descriptors. It reports that
// it cannot start a service that died. It starts the service when resources are available again.
func TestExhaustedResources(t *testing.T) {
	w := newTestNetwork(t)
	h := w.newMachine("crowded", "10.77.0.2")
	dir := filepath.Join(h.root, supervisor.Dir)
	expect.NoError(t, os.MkdirAll(dir, 0o755))
	expect.NoError(t, supervisor.Service{Name: "database", Command: []string{"/bin/sleep", "100000"}}.Write(dir))
	h.start(nil)
	h.until("the service runs", patience, func(s initapi.Status) bool { return len(s.Services) == 1 && s.Services[0].State == initapi.StateReady })
	first := h.pid1(t)
	h.starve(t, "resource temporarily unavailable", func() (mend func()) {
		limit := h.limitOfProcesses(t)
		was, err := os.ReadFile(limit)
		expect.NoError(t, err)
		// The limit is below the current number of processes. With a fork bomb, the end of the service would free a
		// process for its restart.
		expect.NoError(t, os.WriteFile(limit, []byte("1"), 0))
		return func() { expect.NoError(t, os.WriteFile(limit, was, 0)) }
	})
	h.starve(t, "too many open files", func() (mend func()) {
		var was unix.Rlimit
		expect.NoError(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, nil, &was))
		expect.NoError(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: lowestFree(first), Max: was.Max}, nil))
		return func() { expect.NoError(t, unix.Prlimit(first, unix.RLIMIT_NOFILE, &was, nil)) }
	})
	if now := h.pid1(t); now != first {
		t.Errorf("the process id of PID 1 was %d, is %d", first, now)
	}
}

// starve kills the service during the fault. PID 1 must report why it cannot start the service, and start it after the
// fault.
func (h *host) starve(t *testing.T, reason string, fault func() (mend func())) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var service initapi.Service
	mend := func() {}
	defer func() { mend() }()
	begun, reported := false, false
	// Use one connection, because PID 1 may have no descriptor for another.
	err := h.client().Watch(ctx, func(s initapi.Status) bool {
		service = s.Services[0]
		switch {
		case !begun && service.State == initapi.StateReady:
			begun, mend = true, fault()
			h.killServices(t)
		case begun && !reported && strings.Contains(service.Message, reason):
			reported = true
			mend()
			mend = func() {}
		}
		return !reported || service.State != initapi.StateReady
	})
	if err != nil {
		t.Fatalf("%s: started %v, reported %v, then %+v: %v", reason, begun, reported, service, err)
	}
}

// pid1 returns the process id of PID 1 on the host.
func (h *host) pid1(t *testing.T) int {
	t.Helper()
	state, err := h.runc.State(t.Context(), h.id)
	expect.NoError(t, err)
	return state.PID
}

// killServices kills all children of PID 1.
func (h *host) killServices(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", h.pid1(t)))
	expect.NoError(t, err)
	killed := 0
	for _, file := range files {
		children, err := os.ReadFile(file)
		expect.NoError(t, err)
		for _, child := range strings.Fields(string(children)) {
			pid, err := strconv.Atoi(child)
			expect.NoError(t, err)
			expect.NoError(t, unix.Kill(pid, unix.SIGKILL))
			killed++
		}
	}
	if killed == 0 {
		t.Fatal("PID 1 has no children")
	}
}

// limitOfProcesses returns the file with the machine's limit.
func (h *host) limitOfProcesses(t *testing.T) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		file := filepath.Join(root, string(h.cgroup()), "pids.max")
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	t.Fatal("the limit of processes is missing")
	return ""
}

// lowestFree returns the number of the next file that a process opens.
func lowestFree(pid int) (free uint64) {
	for ; ; free++ {
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", pid, free)); err != nil {
			return free
		}
	}
}
