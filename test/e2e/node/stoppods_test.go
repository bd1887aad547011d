//go:build e2e

package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/test/e2e/harness"
)

// stopLimit is the limit of a machine with pods that stop in order: 12 s for ordinary pods and 6 s for the others.
const stopLimit = 18 * time.Second

// Scripts of pods. Each touches a file of the machine as long as it runs, or when it ends.
const (
	stopsSlowly = `trap 'sleep 8; echo done > /out/polite; exit 0' TERM; while :; do sleep 0.1; done`
	stopsNever  = `trap '' TERM; while :; do touch /out/$0; sleep 0.1; done`
	stopsLast   = `trap 'touch /out/last; exit 0' TERM; while :; do sleep 0.1; done`
)

// testStopPods: PID 1 stops each pod by its own grace period, static pods after the others, and kills those that remain at the
// limit.
func testStopPods(t *testing.T, cp, worker *host) {
	pod := func(name string, grace int, script, container string) string {
		return harness.ShellPod(name, "worker", "/var/out", grace, strings.ReplaceAll(script, "$0", name), container)
	}
	cp.apply(pod("polite", 30, stopsSlowly, "") + pod("stubborn", 4, stopsNever, "") + pod("forever", 600, stopsNever, "") +
		pod("hooked", 5, stopsNever, `lifecycle: {preStop: {exec: {command: [/usr/bin/sh, -c, "echo ran > /out/hook"]}}}`))
	static := strings.Replace(pod("last", 30, stopsLast, ""), "  nodeName: \"worker\"\n", "", 1)
	must(t, os.WriteFile(filepath.Join(worker.root, "etc/kubernetes/manifests/last.yaml"), []byte(static), 0o600))
	eventually(t, time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "pod/polite", "pod/stubborn", "pod/forever", "pod/hooked", "pod/last-worker", "--timeout=10s")
		return err
	})

	begun := time.Now()
	again := make(chan error, 1)
	go func() { again <- worker.stopPods(stopLimit) }()
	must(t, worker.stopPods(stopLimit))
	total := time.Since(begun)
	must(t, <-again)
	out := filepath.Join(worker.root, "var/out")
	for file, want := range map[string]string{"polite": "done\n", "hook": "ran\n"} {
		if got, err := os.ReadFile(filepath.Join(out, file)); string(got) != want {
			t.Errorf("%s: %q, %v", file, got, err)
		}
	}
	lasted := func(file string) time.Duration {
		info, err := os.Stat(filepath.Join(out, file))
		must(t, err)
		return info.ModTime().Sub(begun).Round(100 * time.Millisecond)
	}
	t.Logf("stubborn until %s, forever until %s, last until %s, all until %s", lasted("stubborn"), lasted("forever"), lasted("last"), total)
	for file, want := range map[string]time.Duration{"stubborn": 4 * time.Second, "forever": 12 * time.Second} {
		if got := lasted(file); got < want-time.Second || got > want+4*time.Second {
			t.Errorf("the pod %s ran for %s, want %s", file, got, want)
		}
	}
	if lasted("last") < lasted("forever") || total > stopLimit+5*time.Second {
		t.Errorf("the static pod stopped after %s, the last ordinary one after %s, and all after %s", lasted("last"), lasted("forever"), total)
	}
	if s := find(worker.until("kubelet stopped", time.Second, func(initapi.Status) bool { return true }), "kubelet"); s.State != initapi.StateStopped {
		t.Errorf("the kubelet is %s", s.State)
	}
}

// stopPods sends the request of capstand to PID 1.
func (h *host) stopPods(limit time.Duration) error {
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(h.run, "init.sock"))
	}}}
	resp, err := client.Post("http://init"+machineapi.StopPodsPath+"?"+machineapi.StopPodsWithin+"="+limit.String(), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("PID 1 answered %s", resp.Status)
	}
	return nil
}
