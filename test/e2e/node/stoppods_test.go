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
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// Limits of a machine with pods that stop in order. A third of stopLimit is reserved for static pods.
const (
	stopLimit     = 36 * time.Second
	ordinaryLimit = 24 * time.Second
	stubbornGrace = 8 * time.Second
)

// Scripts of pods. Each touches a file of the machine as long as it runs, or when it ends.
const (
	stopsSlowly = `trap 'sleep 8; echo done > /out/polite; exit 0' TERM; while :; do sleep 0.1; done`
	stopsNever  = `trap '' TERM; while :; do echo > /out/$0; sleep 0.1; done`
	stopsAtOnce = `trap 'exit 0' TERM; while :; do sleep 0.1; done`
	stopsLast   = `trap 'touch /out/last; exit 0' TERM; while :; do sleep 0.1; done`
)

// testStopPods: PID 1 stops each pod by its own grace period, static pods after the others, and kills those that remain at the
// limit. A busy machine makes everything later, so the order of the ends is checked, and that none is too early. The hook has
// all the time of ordinary pods, because its process also starts late.
func testStopPods(t *testing.T, cp, worker *host) {
	pod := func(name string, grace int, script, container string) string {
		return harness.ShellPod(name, "worker", "/var/out", grace, strings.ReplaceAll(script, "$0", name), container)
	}
	cp.apply(pod("polite", 30, stopsSlowly, "") + pod("stubborn", int(stubbornGrace.Seconds()), stopsNever, "") + pod("forever", 600, stopsNever, "") +
		pod("hooked", 30, stopsAtOnce, `lifecycle: {preStop: {exec: {command: [/usr/bin/sh, -c, "echo ran > /out/hook"]}}}`))
	static := strings.Replace(pod("last", 30, stopsLast, ""), "  nodeName: \"worker\"\n", "", 1)
	expect.NoError(t, os.WriteFile(filepath.Join(worker.root, "etc/kubernetes/manifests/last.yaml"), []byte(static), 0o600))
	harness.Wait(t, "the pods are ready", time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "pod/polite", "pod/stubborn", "pod/forever", "pod/hooked", "pod/last-worker", "--timeout=10s")
		return err
	})

	begun := time.Now()
	again := make(chan error, 1)
	go func() { again <- worker.stopPods(stopLimit) }()
	expect.NoError(t, worker.stopPods(stopLimit))
	total := time.Since(begun)
	expect.NoError(t, <-again)
	out := filepath.Join(worker.root, "var/out")
	for file, want := range map[string]string{"polite": "done\n", "hook": "ran\n"} {
		if got, err := os.ReadFile(filepath.Join(out, file)); string(got) != want {
			t.Errorf("%s: %q, %v", file, got, err)
		}
	}
	lasted := func(file string) time.Duration {
		info, err := os.Stat(filepath.Join(out, file))
		expect.NoError(t, err)
		return info.ModTime().Sub(begun).Round(100 * time.Millisecond)
	}
	t.Logf("hook after %s, stubborn until %s, forever until %s, last until %s, all until %s", lasted("hook"), lasted("stubborn"), lasted("forever"), lasted("last"), total)
	const late = 3 * time.Second // The last sign of life of a pod is that much older than its end.
	if lasted("stubborn") < stubbornGrace-late || lasted("forever") < ordinaryLimit-late {
		t.Errorf("stubborn ran for %s, want %s; forever ran for %s, want %s", lasted("stubborn"), stubbornGrace, lasted("forever"), ordinaryLimit)
	}
	if lasted("stubborn") > lasted("forever") || lasted("forever") > lasted("last") || total > stopLimit+time.Minute {
		t.Errorf("stubborn stopped after %s, forever after %s, last after %s, and all after %s", lasted("stubborn"), lasted("forever"), lasted("last"), total)
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
