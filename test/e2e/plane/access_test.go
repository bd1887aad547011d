//go:build e2e

package plane

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/testenv/otlpreceiver"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	logViewer = "capstan-infrastructure-machine-log-viewer"
	shellUser = "capstan-infrastructure-machine-shell"
	loader    = "capstan-infrastructure-machine-image-loader"
)

// testMachineAccess: a user with nothing but a kubeconfig reads logs and runs commands in the machines of his namespace, as far as
// his rights go, and in no other machine. The plane sends traces and has a feature gate of Cluster API core, and then has neither.
func (i *installation) testMachineAccess(receiver *otlpreceiver.Receiver) {
	t := i.t
	t.Run("a feature gate of core", func(t *testing.T) { i.at(t).testTaintsOfMachines(true) })
	w := i.newWorkstation()
	former := harness.FormerMinor(t)
	w.capstan("create", "cluster", "demo", "--kubernetes-version", former, "--workers", "0")
	t.Run("the commands of a workstation", func(t *testing.T) { w.at(t).testWorkstation() })
	t.Run("traces", func(t *testing.T) { i.at(t).testTraces(receiver) })
	machine := strings.TrimSpace(i.kubectl("get", "capstanmachines", "-n", "team-a", "-o", "jsonpath={.items[*].metadata.name}"))
	w.refused("forbidden", "logs", machine)
	i.grant("team-a", logViewer)
	t.Run("logs", func(t *testing.T) { w.at(t).testLogs(machine) })
	w.refused("forbidden", "shell", machine, "--", "id")
	i.grant("team-a", shellUser)
	t.Run("commands", func(t *testing.T) { w.at(t).testCommands(machine) })
	t.Run("a terminal", func(t *testing.T) { w.at(t).testTerminal(machine) })
	t.Run("new lines", func(t *testing.T) { w.at(t).testFollow(machine) })
	w.refused("forbidden", "load", "image", filepath.Join(i.bin, "images", "echo.tar"), "--cluster", "demo")
	i.grant("team-a", loader)
	t.Run("images", func(t *testing.T) { w.at(t).testImages(machine) })
	t.Run("a slow upload", func(t *testing.T) { w.at(t).testSlowUpload(machine) })
	t.Run("a cancelled upload", func(t *testing.T) { w.at(t).testCancelledUpload(machine) })
	t.Run("hostile archives", func(t *testing.T) { w.at(t).testHostileArchives(machine) })
	t.Run("another namespace", func(t *testing.T) { w.at(t).testOtherNamespace(machine) })
	t.Run("forged headers", func(t *testing.T) { i.at(t).testForgedHeaders(machine) })
	t.Run("after a restart of the manager", func(t *testing.T) { w.at(t).testRestartedManager(machine) })
	for _, did := range []string{"started a command", "loads images"} {
		if events := i.kubectl("get", "events", "-n", "team-a"); !strings.Contains(events, "User system:serviceaccount:team-a:ada "+did) {
			t.Errorf("no event names the user who %s: %s", did, events)
		}
	}
	t.Run("another version", func(t *testing.T) { w.at(t).testUpgrade(former) })
	w.capstan("delete", "cluster", "demo")
	if left := i.kubectl("get", "machines,capstanmachines", "-n", "team-a", "-o", "name"); left != "" {
		t.Errorf("left after the deletion: %s", left)
	}
	t.Run("without traces and feature gates", func(t *testing.T) { i.at(t).testWithoutTraces() })
}

// at returns the workstation for a subtest.
func (w *workstation) at(t *testing.T) *workstation {
	return &workstation{i: w.i.at(t), namespace: w.namespace, kubeconfig: w.kubeconfig}
}

func (i *installation) grant(namespace, role string) {
	i.t.Helper()
	i.kubectl("create", "rolebinding", "ada-"+role, "--namespace", namespace, "--clusterrole", role, "--serviceaccount", "team-a:ada")
}

// program returns the command capstan of the user.
func (w *workstation) program(ctx context.Context, args ...string) *exec.Cmd {
	all := append([]string{filepath.Join(w.i.bin, "capstan"), "--context", "team-a"}, args...)
	return exec.CommandContext(ctx, "nsenter", w.arguments("TERM=xterm", all...)...)
}

func (w *workstation) refused(want string, args ...string) {
	w.i.t.Helper()
	out, err := w.program(w.i.t.Context(), args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), want) {
		w.i.t.Errorf("capstan %v: %v %s, want a refusal with %q", args, err, out, want)
	}
}

func (w *workstation) testLogs(machine string) {
	if here, there := w.i.capstan("logs", machine), w.capstan("logs", machine); here != there || here == "" {
		w.i.t.Errorf("the log on the host is %q, on the workstation %q", here, there)
	}
	if out := w.capstan("describe", "machine", machine); !strings.Contains(out, machine) {
		w.i.t.Errorf("description of the machine: %s", out)
	}
	if log := w.capstan("logs", machine, "kubelet", "--tail", "5"); strings.Count(log, "\n") != 5 {
		w.i.t.Errorf("the last five lines: %q", log)
	}
	w.refused("not found", "logs", "nobody")
	w.refused("no log of service", "logs", machine, "nothing")
}

func (w *workstation) testCommands(machine string) {
	if name := strings.TrimSpace(w.capstan("shell", machine, "--", "hostname")); name != machine {
		w.i.t.Errorf("the command runs in %s", name)
	}
	var exit *exec.ExitError
	out, err := w.program(w.i.t.Context(), "shell", machine, "--", "sh", "-c", "echo out; echo err >&2; exit 7").Output()
	if !errors.As(err, &exit) || exit.ExitCode() != 7 || string(out) != "out\n" || string(exit.Stderr) != "err\n" {
		w.i.t.Errorf("%v, output %q: %+v", err, out, exit)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	cat := w.program(w.i.t.Context(), "shell", machine, "--", "cat")
	cat.Stdin = bytes.NewReader(data)
	if out, err := cat.Output(); err != nil || !bytes.Equal(out, data) {
		w.i.t.Errorf("%d of %d bytes came back: %v", len(out), len(data), err)
	}
	// The end of the client ends the command.
	ctx, cancel := context.WithCancel(w.i.t.Context())
	sleep := w.program(ctx, "shell", machine, "--", "sleep", "98765")
	if err := sleep.Start(); err != nil {
		w.i.t.Fatal(err)
	}
	runs := func() bool { return strings.Contains(w.i.capstan("shell", machine, "--", "ps", "ax"), "sleep 98765") }
	harness.True(w.i.t, "the command runs", time.Minute, runs)
	cancel()
	_ = sleep.Wait()
	harness.True(w.i.t, "the command has ended", time.Minute, func() bool { return !runs() })
}

func (w *workstation) testTerminal(machine string) {
	shell := w.program(w.i.t.Context(), "shell", machine)
	terminal, err := pty.StartWithSize(shell, &pty.Winsize{Rows: 33, Cols: 111})
	if err != nil {
		w.i.t.Fatal(err)
	}
	defer terminal.Close()
	seen := &output{}
	go func() { _, _ = io.Copy(seen, terminal) }()
	// The size of the terminal arrives after its start.
	harness.True(w.i.t, "the size of the terminal", time.Minute, func() bool {
		_, err := terminal.WriteString("stty size; tty\n")
		return err == nil && seen.contains("33 111") && seen.contains("/dev/pts/")
	})
	if err := pty.Setsize(terminal, &pty.Winsize{Rows: 44, Cols: 122}); err != nil {
		w.i.t.Fatal(err)
	}
	harness.True(w.i.t, "the new size of the terminal", time.Minute, func() bool {
		_, err := terminal.WriteString("stty size\n")
		return err == nil && seen.contains("44 122")
	})
	if _, err := terminal.WriteString("exit 5\n"); err != nil {
		w.i.t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := shell.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 5 {
		w.i.t.Errorf("the shell ended with %v: %s", err, seen.text())
	}
}

// output collects what a program writes.
type output struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.Write(p)
}

func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.String()
}

func (o *output) contains(part string) bool { return strings.Contains(o.text(), part) }

func (w *workstation) testFollow(machine string) {
	ctx, cancel := context.WithCancel(w.i.t.Context())
	defer cancel()
	follow, seen := w.program(ctx, "logs", machine, "kubelet", "--tail", "1", "-f"), &output{}
	follow.Stdout, follow.Stderr = seen, seen
	if err := follow.Start(); err != nil {
		w.i.t.Fatal(err)
	}
	harness.True(w.i.t, "the last line", time.Minute, func() bool { return seen.contains("\n") })
	w.i.capstan("shell", machine, "--", "sh", "-c", "echo a-new-line >> /var/log/capstan/kubelet.log")
	harness.True(w.i.t, "the new line", time.Minute, func() bool { return seen.contains("a-new-line") })
	cancel()
	_ = follow.Wait()
}

// A user has rights in another namespace, and creates a copy of a foreign machine's object there.
func (w *workstation) testOtherNamespace(machine string) {
	w.refused("forbidden", "logs", machine, "-n", "default")
	w.refused("forbidden", "shell", machine, "-n", "default", "--", "id")
	w.i.kubectl("create", "namespace", "team-b")
	w.i.grant("team-b", logViewer)
	w.i.grant("team-b", shellUser)
	w.i.grant("team-b", loader)
	w.refused("not found", "logs", machine, "-n", "team-b")
	id := strings.TrimSpace(w.i.kubectl("get", "capstanmachine", machine, "-n", "team-a", "-o", "jsonpath={.spec.id}"))
	file := filepath.Join(w.i.t.TempDir(), "copy.yaml")
	content := fmt.Sprintf("{apiVersion: infrastructure.capstan.dev/v1beta2, kind: CapstanMachine, metadata: {name: %s, namespace: team-b}, spec: {id: %q, hostName: local}}", machine, id)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		w.i.t.Fatal(err)
	}
	w.i.kubectl("create", "-f", file)
	w.refused("belongs to another machine", "logs", machine, "-n", "team-b")
	w.refused("belongs to another machine", "shell", machine, "-n", "team-b", "--", "id")
	w.i.kubectl("delete", "capstanmachine", machine, "-n", "team-b", "--wait=false")
}

// The manager refuses all clients except the API server, also clients on the box itself.
func (i *installation) testForgedHeaders(machine string) {
	service := i.kubectl("get", "apiservice", "v1alpha1.machines.capstan.dev", "-o", "jsonpath={.spec.service.port}")
	client := filepath.Join(i.root, "pki", "installer", "client") // a client of the API server, of the group system:masters
	pair, err := tls.LoadX509KeyPair(client+".crt", client+".key")
	if err != nil {
		i.t.Fatal(err)
	}
	for _, certificates := range [][]tls.Certificate{nil, {pair}} {
		request, err := http.NewRequestWithContext(i.t.Context(), http.MethodGet, "https://127.0.0.1:"+service+accessapi.Path("team-a", machine, accessapi.Log), nil)
		if err != nil {
			i.t.Fatal(err)
		}
		request.Header.Set("X-Remote-User", "admin")
		request.Header.Set("X-Remote-Group", "system:masters")
		response, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}}}).Do(request)
		if err != nil {
			i.t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized {
			i.t.Errorf("with %d certificates: %s", len(certificates), response.Status)
		}
	}
}

func (w *workstation) testRestartedManager(machine string) {
	before := w.i.component("manager")
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		w.i.t.Fatal(err)
	}
	harness.True(w.i.t, "a log after the restart", time.Minute, func() bool {
		out, err := w.program(w.i.t.Context(), "logs", machine).Output()
		return err == nil && len(out) > 0 && w.i.component("manager").PID != before.PID
	})
	if name := strings.TrimSpace(w.capstan("shell", machine, "--", "hostname")); name != machine {
		w.i.t.Errorf("the command runs in %s", name)
	}
}
