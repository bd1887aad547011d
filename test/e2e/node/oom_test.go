//go:build e2e

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/supervisor"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// When a machine runs out of memory, the kernel kills pods and no services. PID 1 survives even if it uses the most
// memory. In this test the pods are children of a service, like children of containerd, and have the scores that the
// kubelet sets.
func TestOutOfMemory(t *testing.T) {
	w := newTestNetwork(t)
	h := w.newMachine("full", "10.77.0.2")
	h.memory = 256 << 20
	dir := filepath.Join(h.root, supervisor.Dir)
	expect.NoError(t, os.MkdirAll(dir, 0o755))
	shell := func(name, script string) {
		expect.NoError(t, supervisor.Service{Name: name, Command: []string{"/bin/sh", "-c", script}}.Write(dir))
	}
	// more memory than a pod below
	shell("database", `held=$(head -c 40000000 /dev/zero | tr '\0' x); while :; do sleep 1000; done`)
	// The pods start on demand. Like containerd, the service continues when a pod dies.
	shell("pods", `mkfifo /run/go; while :; do read -r command < /run/go; eval "$command" & done`)
	h.start(nil)
	h.until("services run", patience, func(s initapi.Status) bool {
		return len(s.Services) == 2 && len((initapi.Status{Services: s.Services}).NotReady([]string{"database", "pods"})) == 0
	})
	before := h.killed()

	// Pods without requests: the best effort class.
	h.order(t, `echo 1000 > /proc/self/oom_score_adj; exec tail /dev/zero`)
	harness.Wait(t, "a pod without requests is killed", patience, func() error { return h.killedSince(before, 1) })
	h.mustRun(t, "database", "pods")

	// Small pods whose requests are as large as the machine have the lowest score of all pods. Each is smaller than PID
	// 1, has one process, and keeps its memory until the pipe is read. The pods that remain after a few kills fit into
	// the machine. In a machine that stays full, all processes wait for their code to be read from disk again.
	before = h.killed()
	h.order(t, `mkfifo /run/hold; sleep 1000 <> /run/hold & for i in $(seq 60); do dd if=/dev/zero of=/run/hold bs=5M & done`)
	harness.Wait(t, "two pods with requests are killed", patience, func() error { return h.killedSince(before, 2) })
	// The check starts no process in the machine, because the kernel might kill the new process.
	h.until("PID 1 answers", patience, func(initapi.Status) bool { return true })
}

// order makes the service run a shell command in the background.
func (h *host) order(t *testing.T, command string) {
	t.Helper()
	_, err := h.execInput(command+"\n", "/bin/sh", "-c", "cat > /run/go")
	expect.NoError(t, err)
}

// mustRun fails the test if a service has ended since the machine started.
func (h *host) mustRun(t *testing.T, names ...string) {
	t.Helper()
	status := h.until("known", patience, func(s initapi.Status) bool { return len(s.Services) >= len(names) })
	for _, service := range status.Services {
		if service.Restarts != 0 || service.PID == 0 {
			t.Errorf("service %s: %+v", service.Name, service)
		}
	}
}

// killed returns the number of processes of the machine that the kernel has killed for lack of memory.
func (h *host) killed() int {
	h.t.Helper()
	for _, file := range []string{"/sys/fs/cgroup/memory" + string(h.cgroup()) + "/memory.oom_control", "/sys/fs/cgroup" + string(h.cgroup()) + "/memory.events"} {
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			var n int
			if _, err := fmt.Sscanf(line, "oom_kill %d", &n); err == nil {
				return n
			}
		}
	}
	h.t.Fatal("the count of kills is missing")
	return 0
}

func (h *host) killedSince(before, least int) error {
	if now := h.killed(); now < before+least {
		return fmt.Errorf("the kernel has killed %d processes, want %d", now-before, least)
	}
	return nil
}
