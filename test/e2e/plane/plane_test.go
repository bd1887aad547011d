//go:build e2e

// Package plane contains end-to-end tests of the embedded management plane and the capstan command, with real processes,
// certificates, clusterctl, and a cluster of machines. It needs root and `make build`.
package plane

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/testenv/otlpreceiver"
	"capstan.dev/capstan/test/e2e/harness"
)

// commandTimeout bounds every command that a test runs.
const commandTimeout = 10 * time.Minute

// installation is the management plane of a test.
type installation struct {
	t    *testing.T
	root string
	bin  string
}

func newInstallation(t *testing.T) *installation {
	t.Helper()
	// This is not t.TempDir: the system user must be able to enter it.
	parent, err := os.MkdirTemp("", "capstan-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	i := &installation{t: t, root: filepath.Join(parent, "root"), bin: harness.Bin()}
	t.Cleanup(func() {
		if t.Failed() {
			i.printLogs()
		}
		if out, err := i.try("down", "--yes"); err != nil {
			t.Errorf("down: %v: %s", err, out)
			return
		}
		if err := os.Remove(parent); err != nil {
			t.Errorf("`capstan down` left files: %v", err)
		}
	})
	return i
}

// printLogs prints the ends of the logs of a failed test.
func (i *installation) printLogs() {
	logs, _ := filepath.Glob(filepath.Join(i.root, "logs", "*.log"))
	for _, log := range logs {
		out, _ := exec.Command("tail", "-n", "15", log).CombinedOutput()
		i.t.Logf("%s:\n%s", log, out)
	}
}

// try runs capstan for this installation.
func (i *installation) try(args ...string) (string, error) {
	return run(filepath.Join(i.bin, "capstan"), append([]string{"--root", i.root}, args...)...)
}

func (i *installation) capstan(args ...string) string {
	i.t.Helper()
	defer harness.LogWait(i.t, time.Now(), "capstan "+strings.Join(args, " "))
	out, err := i.try(args...)
	if err != nil {
		i.t.Fatalf("capstan %v: %v\n%s", args, err, out)
	}
	return out
}

// tool runs another program of the assets against the management API.
func (i *installation) tool(name string, args ...string) string {
	i.t.Helper()
	out, err := run(filepath.Join(i.bin, name), append([]string{"--kubeconfig", filepath.Join(i.root, "admin.kubeconfig")}, args...)...)
	if err != nil {
		i.t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return out
}

func (i *installation) kubectl(args ...string) string {
	i.t.Helper()
	return i.tool(filepath.Join("kubernetes", harness.KubernetesVersion, "kubectl"), args...)
}

// tryKubectl is kubectl for commands that may fail.
func (i *installation) tryKubectl(args ...string) (string, error) {
	kubectl := filepath.Join(i.bin, "kubernetes", harness.KubernetesVersion, "kubectl")
	return run(kubectl, append([]string{"--kubeconfig", filepath.Join(i.root, "admin.kubeconfig")}, args...)...)
}

func run(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, errs.String())
	}
	return out.String(), err
}

func (i *installation) status() embedded.Status {
	i.t.Helper()
	var s embedded.Status
	if err := json.Unmarshal([]byte(i.capstan("status", "-o", "json")), &s); err != nil {
		i.t.Fatal(err)
	}
	return s
}

func (i *installation) component(name string) embedded.ProcessStatus {
	i.t.Helper()
	for _, c := range i.status().Components {
		if c.Name == name {
			return c
		}
	}
	i.t.Fatalf("no component %s", name)
	return embedded.ProcessStatus{}
}

// TestPlane runs the tests of one plane in order. Each part depends on the previous ones. Rows CTL-08 and ALL-14.
func TestPlane(t *testing.T) {
	i := newInstallation(t)
	t.Setenv("PLANTED", planted+"-environment") // for testSupportBundle, also in the environment of each daemon
	began := time.Now()
	i.capstan("up")
	t.Logf("up in %.1f s", time.Since(began).Seconds())

	t.Run("again changes nothing", func(t *testing.T) { i.at(t).testUpAgain() })
	t.Run("privileges", func(t *testing.T) { i.at(t).testPrivileges() })
	t.Run("metrics of the host", func(t *testing.T) { i.at(t).testHostMetrics() })
	t.Run("authentication", func(t *testing.T) { i.at(t).testAuthentication() })
	t.Run("encryption at rest", func(t *testing.T) { i.at(t).testEncryption() })
	t.Run("quotas", func(t *testing.T) { i.at(t).testQuotas() })
	t.Run("webhooks", func(t *testing.T) { i.at(t).testWebhooks() })
	t.Run("killed components restart", func(t *testing.T) { i.at(t).testKilledComponents() })

	// CTL-15
	i.capstan("create", "cluster", "one", "--workers", "1")
	t.Run("clusterctl", func(t *testing.T) { i.at(t).testClusterctl() })
	t.Run("a second cluster with the same name is refused", func(t *testing.T) { i.at(t).testCreateAgain() })
	t.Run("machines", func(t *testing.T) { i.at(t).testMachines() })
	t.Run("a support bundle without secrets", func(t *testing.T) { i.at(t).testSupportBundle() })
	receiver := otlpreceiver.Start(t)
	t.Run("a restart does not affect clusters", func(t *testing.T) {
		i.at(t).testRestart("--tracing-endpoint", receiver.Endpoint, "--tracing-insecure", "--core-feature-gates", "MachineTaintPropagation=true")
	})
	t.Run("access to machines", func(t *testing.T) { i.at(t).testMachineAccess(receiver) })
	t.Run("a second installation on the same host", func(t *testing.T) { testSideBySide(t, i) })
	t.Run("down removes everything", func(t *testing.T) { i.at(t).testDown() })
}

// at returns the installation for a subtest.
func (i *installation) at(t *testing.T) *installation {
	return &installation{t: t, root: i.root, bin: i.bin}
}

func (i *installation) testUpAgain() {
	before := i.status()
	began := time.Now()
	i.capstan("up")
	i.t.Logf("took %s", time.Since(began).Round(time.Millisecond))
	after := i.status()
	if before.PID != after.PID || !slices.Equal(before.Components, after.Components) {
		i.t.Errorf("before: %+v\nafter:  %+v", before, after)
	}
	if out, err := i.try("plane"); err == nil {
		i.t.Errorf("a second daemon runs for the same root: %s", out)
	}
}

// Only capstand runs as root, and only Cluster API's webhooks listen on addresses other than loopback.
func (i *installation) testPrivileges() {
	components := i.status().Components
	for _, c := range components {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.PID))
		if err != nil {
			i.t.Fatal(err)
		}
		root := strings.Contains(string(data), "\nUid:\t0\t")
		if root != strings.HasPrefix(c.Name, "capstand") {
			i.t.Errorf("%s runs as root: %v", c.Name, root)
		}
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.PID))
		if err != nil || bytes.Contains(args, []byte("PRIVATE KEY")) {
			i.t.Errorf("%s: arguments %q, %v", c.Name, args, err)
		}
	}
	err := filepath.WalkDir(i.root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || !strings.HasSuffix(path, ".key") && !strings.HasSuffix(path, "kubeconfig") {
			return err
		}
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			i.t.Errorf("%s: mode %v, %v", path, info.Mode(), err)
		}
		return nil
	})
	if err != nil {
		i.t.Error(err)
	}
	out, err := run("ss", "-Hltnp")
	if err != nil {
		i.t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		for _, c := range components {
			mine := strings.Contains(line, fmt.Sprintf("pid=%d,", c.PID))
			if mine && !strings.HasPrefix(fields[3], "127.0.0.1:") && c.Name != "capi-core-manager" {
				i.t.Errorf("%s listens on %s", c.Name, fields[3])
			}
		}
	}
}

// testHostMetrics: capstand of a plane serves its metrics on the address of docs/metrics.md.
func (i *installation) testHostMetrics() {
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", i.component("capstand").PID))
	_, address, found := strings.Cut(string(args), "\x00--metrics-address=")
	address, _, _ = strings.Cut(address, "\x00")
	if err != nil || !found || !strings.HasPrefix(address, "127.0.0.1:") {
		i.t.Fatalf("expected capstand with --metrics-address=127.0.0.1:PORT, found %q, %v", args, err)
	}
	response, err := (&http.Client{Timeout: time.Minute}).Get("http://" + address + "/metrics")
	if err != nil {
		i.t.Fatal(err)
	}
	defer response.Body.Close()
	if text, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK || !bytes.Contains(text, []byte("\ncapstand_machines{")) {
		i.t.Errorf("metrics of capstand: %s, %v, %.500s", response.Status, err, text)
	}
}

func (i *installation) testAuthentication() {
	server := i.status().Server
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for _, path := range []string{"/readyz", "/version", "/api/v1/secrets"} {
		response, err := client.Get(server + path)
		if err != nil {
			i.t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized {
			i.t.Errorf("%s answers %s to an anonymous client", path, response.Status)
		}
	}
	for _, test := range []struct {
		who, verb, what string
		want            bool
	}{
		{"capi-system:capi-manager", "list", "clusters.cluster.x-k8s.io", true},
		{"capi-system:capi-manager", "create", "capstanmachines.infrastructure.capstan.dev", true},
		{"capi-system:capi-manager", "delete", "nodes", false},
		{"capi-system:capi-manager", "create", "clusterrolebindings.rbac.authorization.k8s.io", false},
		{"capstan-infrastructure-system:capstan-manager", "patch", "capstanmachines.infrastructure.capstan.dev", true},
		{"capstan-infrastructure-system:capstan-manager", "delete", "namespaces", false},
		{"capstan-infrastructure-system:capstan-manager", "create", "clusterrolebindings.rbac.authorization.k8s.io", false},
	} {
		out, _ := i.tryKubectl("auth", "can-i", test.verb, test.what, "--all-namespaces", "--as", "system:serviceaccount:"+test.who)
		if got := strings.TrimSpace(out) == "yes"; got != test.want {
			i.t.Errorf("%s may %s %s: %v, want %v", test.who, test.verb, test.what, got, test.want)
		}
	}
}

func (i *installation) testEncryption() {
	i.kubectl("create", "secret", "generic", "probe", "--from-literal=password=correct-horse")
	defer i.kubectl("delete", "secret", "probe")
	state, err := embedded.LoadState(embedded.Layout{Root: i.root})
	if err != nil {
		i.t.Fatal(err)
	}
	pki := filepath.Join(i.root, "pki", "kube-apiserver")
	out, err := run(filepath.Join(i.bin, "kubernetes", state.KubernetesVersion, "etcdctl"), fmt.Sprintf("--endpoints=https://127.0.0.1:%d", state.PortBase),
		"--cacert="+filepath.Join(pki, "etcd-ca.crt"), "--cert="+filepath.Join(pki, "etcd-client.crt"), "--key="+filepath.Join(pki, "etcd-client.key"),
		"get", "/registry/secrets/default/probe", "--print-value-only")
	if err != nil {
		i.t.Fatal(err)
	}
	if !strings.HasPrefix(out, "k8s:enc:secretbox:") || strings.Contains(out, "correct-horse") {
		i.t.Errorf("etcd contains %.40q", out)
	}
}

// The API server enforces a ResourceQuota for built-in kinds and for kinds of Capstan.
func (i *installation) testQuotas() {
	i.kubectl("create", "namespace", "limited")
	defer i.kubectl("delete", "namespace", "limited")
	i.kubectl("create", "quota", "few", "-n", "limited", "--hard=count/secrets=1,count/capstanippools.ipam.capstan.dev=0")
	for _, used := range []string{`count/secrets`, `count/capstanippools\.ipam\.capstan\.dev`} {
		i.kubectl("wait", "resourcequota/few", "-n", "limited", "--for=jsonpath={.status.used."+used+"}", "--timeout=60s")
	}
	i.kubectl("create", "secret", "generic", "first", "-n", "limited")
	if _, err := i.tryKubectl("create", "secret", "generic", "second", "-n", "limited"); err == nil || !strings.Contains(err.Error(), "exceeded quota") {
		i.t.Errorf("expected a refusal of the second Secret by the quota, got %v", err)
	}
	pool := filepath.Join(i.t.TempDir(), "pool.json")
	if err := os.WriteFile(pool, []byte(`{"apiVersion":"ipam.capstan.dev/v1beta2","kind":"CapstanIPPool","metadata":{"name":"p"},"spec":{"subnets":[{"cidr":"10.0.0.0/24"}]}}`), 0o600); err != nil {
		i.t.Fatal(err)
	}
	if _, err := i.tryKubectl("create", "-n", "limited", "-f", pool); err == nil || !strings.Contains(err.Error(), "exceeded quota") {
		i.t.Errorf("expected a refusal of the pool by the quota, got %v", err)
	}
}

// The webhooks of Cluster API and Capstan refuse invalid objects.
func (i *installation) testWebhooks() {
	for refusal, manifest := range map[string]string{
		"must be a valid semantic version":        `{"apiVersion":"cluster.x-k8s.io/v1beta2","kind":"Machine","metadata":{"name":"m"},"spec":{"clusterName":"c","version":"not a version","bootstrap":{"dataSecretName":"s"},"infrastructureRef":{"apiGroup":"a.b","kind":"C","name":"d"}}}`,
		"serves claims of its own namespace only": `{"apiVersion":"ipam.capstan.dev/v1beta2","kind":"CapstanIPPool","metadata":{"name":"p"},"spec":{"subnets":[{"cidr":"10.0.0.0/24"}],"reservations":[{"address":"10.0.0.5","claim":"c","namespace":"other"}]}}`,
	} {
		file := filepath.Join(i.t.TempDir(), "manifest.json")
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			i.t.Fatal(err)
		}
		_, err := i.tryKubectl("create", "-f", file)
		if err == nil || !strings.Contains(err.Error(), refusal) {
			i.t.Errorf("want a refusal with %q, got %v", refusal, err)
		}
	}
	// Conversion uses Cluster API's webhook, too.
	i.kubectl("get", "clusters.v1beta1.cluster.x-k8s.io", "-A")
}

// Each component is killed. The supervisor restarts it, and the plane works again.
func (i *installation) testKilledComponents() {
	for _, name := range []string{"manager", "capi-core-manager", "kube-controller-manager", "capstand", "kube-apiserver", "etcd"} {
		var before embedded.ProcessStatus
		harness.True(i.t, name+" runs", time.Minute, func() bool { // The component may have ended together with one that was killed before.
			before = i.component(name)
			return before.PID > 0 && before.State == embedded.ProcessReady
		})
		if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
			i.t.Fatalf("%s: %v", name, err)
		}
		harness.True(i.t, name+" runs again", time.Minute, func() bool {
			after := i.component(name)
			return after.PID != before.PID && after.State == embedded.ProcessReady && after.Restarts > before.Restarts
		})
	}
	harness.True(i.t, "all components are ready", time.Minute, func() bool {
		return !slices.ContainsFunc(i.status().Components, func(c embedded.ProcessStatus) bool { return c.State != embedded.ProcessReady })
	})
	harness.True(i.t, "the API server answers", time.Minute, func() bool {
		_, err := i.tryKubectl("get", "capstanhosts", "local")
		return err == nil
	})
}

// CTL-08, CTL-15
func (i *installation) testClusterctl() {
	i.t.Setenv("CLUSTERCTL_DISABLE_VERSIONCHECK", "true") // Tests send nothing to other computers.
	describe := i.tool("clusterctl", "describe", "cluster", "one", "--show-conditions", "all")
	for _, part := range []string{"CapstanCluster", "CapstanControlPlane", "MachineDeployment"} {
		if !strings.Contains(describe, part) {
			i.t.Errorf("describe shows no %s:\n%s", part, describe)
		}
	}
	kubeconfig := i.tool("clusterctl", "get", "kubeconfig", "one")
	if strings.TrimSpace(kubeconfig) != strings.TrimSpace(i.capstan("get", "kubeconfig", "one")) {
		i.t.Error("clusterctl and capstan give different kubeconfigs")
	}
	var providers []string
	for line := range strings.Lines(i.kubectl("get", "providers", "-A", "--no-headers", "-o", "custom-columns=N:.metadata.name")) {
		providers = append(providers, strings.TrimSpace(line))
	}
	slices.Sort(providers)
	want := []string{"bootstrap-capstan", "cluster-api", "control-plane-capstan", "infrastructure-capstan", "ipam-capstan"}
	if !slices.Equal(providers, want) {
		i.t.Errorf("the inventory has %v", providers)
	}
}

func (i *installation) testCreateAgain() {
	if _, err := i.try("create", "cluster", "one"); err == nil || !strings.Contains(err.Error(), "already exists") {
		i.t.Errorf("got %v", err)
	}
	_, err := i.try("create", "cluster", "two", "--kubernetes-version", "v1.2.3")
	if err == nil || !strings.Contains(err.Error(), "on the hosts") {
		i.t.Errorf("got %v", err)
	}
	var exit *exec.ExitError
	if _, err := i.try("get", "kubeconfig", "nobody"); !errors.As(err, &exit) || exit.ExitCode() != 4 {
		i.t.Errorf("want exit code 4, got %v", err)
	}
}

// machines returns the machines by name, with the process ids of their PID 1.
func (i *installation) machines() map[string]string {
	i.t.Helper()
	found := map[string]string{}
	for line := range strings.Lines(i.kubectl("get", "capstanmachines", "--no-headers", "-o", "custom-columns=N:.metadata.name")) {
		name := strings.TrimSpace(line)
		found[name] = strings.TrimSpace(i.capstan("shell", name, "--", "cat", "/proc/1/stat"))
	}
	return found
}

// startTimes returns the start time of each machine's PID 1. A restart of the machine changes it.
func startTimes(machines map[string]string) map[string]string {
	times := map[string]string{}
	for name, stat := range machines {
		if fields := strings.Fields(stat); len(fields) > 21 {
			times[name] = fields[21]
		}
	}
	return times
}

func (i *installation) testMachines() {
	machines := i.machines()
	if len(machines) != 2 {
		i.t.Fatalf("want 2 machines, got %v", machines)
	}
	for name := range machines {
		if log := i.capstan("logs", name, "kubelet", "--tail", "5"); strings.Count(log, "\n") == 0 || strings.Count(log, "\n") > 5 {
			i.t.Errorf("log of the kubelet of %s: %q", name, log)
		}
		if hostname := strings.TrimSpace(i.capstan("shell", name, "--", "hostname")); hostname != name {
			i.t.Errorf("the shell of %s runs in %s", name, hostname)
		}
	}
	if images := i.capstan("load", "image", filepath.Join(i.bin, "images", "echo.tar"), "--cluster", "one"); !strings.Contains(images, "registry.capstan.dev/echo:v1") {
		i.t.Errorf("loaded %q", images)
	}
}

// All processes of the plane are killed at once. `capstan up` starts it again. The machines do not restart. The last start has more flags.
func (i *installation) testRestart(flags ...string) {
	before := startTimes(i.machines())
	status := i.status()
	crds := strings.Count(i.kubectl("get", "crds", "-o", "name"), "\n")
	if writes := i.writesOfCRDs(); writes != crds {
		i.t.Errorf("%d requests wrote %d CRDs, want one for each", writes, crds)
	}
	if err := syscall.Kill(status.PID, syscall.SIGKILL); err != nil {
		i.t.Fatal(err)
	}
	harness.True(i.t, "the components die with their supervisor", 10*time.Second, func() bool {
		return !slices.ContainsFunc(status.Components, func(c embedded.ProcessStatus) bool { return runs(c.PID) })
	})
	var exit *exec.ExitError
	if _, err := i.try("status"); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		i.t.Errorf("status of a stopped plane: %v", err)
	}
	i.capstan("up")
	if after := i.status(); after.Server != status.Server {
		i.t.Errorf("the address of the server changed from %s to %s", status.Server, after.Server)
	}
	if writes := i.writesOfCRDs(); writes != crds {
		i.t.Errorf("a restart wrote CRDs: %d requests, want %d from before", writes, crds)
	}
	// As if an earlier build had stored the objects in another version (ALL-14).
	i.storedIn("v1beta1", func() {
		i.kubectl("patch", "crd", machinesCRD, "--type=json",
			"-p", `[{"op":"replace","path":"/spec/versions/0/storage","value":true},{"op":"replace","path":"/spec/versions/1/storage","value":false}]`)
	})
	i.storedIn("v1beta2", func() {
		i.capstan("down", "--keep-state")
		i.capstan(append([]string{"up"}, flags...)...)
	})
	if after := startTimes(i.machines()); len(before) != 2 || fmt.Sprint(after) != fmt.Sprint(before) {
		i.t.Errorf("machines were restarted: %v, then %v", before, after)
	}
	if out := i.capstan("get", "clusters"); !strings.Contains(out, "one") {
		i.t.Errorf("clusters: %s", out)
	}
}

const machinesCRD = "capstanmachines.infrastructure.capstan.dev"

// writesOfCRDs returns the number of requests that wrote CRDs, by the audit log. The API server itself writes their status.
func (i *installation) writesOfCRDs() (n int) {
	i.t.Helper()
	data, err := os.ReadFile(embedded.Layout{Root: i.root}.AuditLog())
	if err != nil {
		i.t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var e struct {
			ObjectRef struct{ Resource, Subresource string }
		}
		if json.Unmarshal(line, &e) == nil && e.ObjectRef.Resource == "customresourcedefinitions" && e.ObjectRef.Subresource == "" {
			n++
		}
	}
	return n
}

// storedIn changes the storage version of the machines, and waits until no machine is stored in another one and the migrator
// has seen the change.
func (i *installation) storedIn(version string, change func()) {
	i.t.Helper()
	change()
	var state string
	harness.True(i.t, "the machines are stored in "+version, time.Minute, func() bool {
		state = i.kubectl("get", "crd", machinesCRD, "-o",
			`jsonpath={.status.storedVersions} {.metadata.generation}={.metadata.annotations.crd-migration\.cluster\.x-k8s\.io/observed-generation}`)
		stored, generations, _ := strings.Cut(state, " ")
		generation, observed, _ := strings.Cut(generations, "=")
		return stored == `["`+version+`"]` && generation == observed
	})
	i.t.Logf("stored versions and generation: %s", state)
}

// runs reports whether a process runs. A zombie does not.
func runs(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(state, "Z")
}

func testSideBySide(t *testing.T, first *installation) {
	second := newInstallation(t)
	second.capstan("up", "--hosts", "2", "--logging-format", "json")
	if a, b := first.at(t).status(), second.status(); a.Server == b.Server || a.PID == b.PID {
		t.Errorf("two installations share ports or files: %+v %+v", a, b)
	}
	if hosts := second.kubectl("get", "capstanhosts", "-o", "name"); strings.Count(hosts, "\n") != 2 {
		t.Errorf("hosts: %s", hosts)
	}
	if out := second.capstan("get", "clusters"); strings.Contains(out, "one") {
		t.Errorf("the second plane contains the cluster of the first one: %s", out)
	}
	second.logsAreJSON("plane", "manager", "capstand", "capstand-2")
	// A damaged state does not prevent the removal, but the command cannot know the other boxes. The folder of capstand.service stays.
	l := embedded.Layout{Root: second.root}
	volume := filepath.Join(l.JoinedHost(), "volumes/v/disk.img")
	if err := errors.Join(os.WriteFile(l.State(), []byte("{"), 0o600), os.MkdirAll(filepath.Dir(volume), 0o711), os.WriteFile(volume, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := second.try("down"); err == nil || !strings.Contains(err.Error(), "machines on other boxes") {
		t.Errorf("down without --yes: %v", err)
	}
	second.capstan("down", "--yes")
	if entries, err := os.ReadDir(second.root); err != nil || len(entries) != 1 {
		t.Errorf("%s contains %v, %v", second.root, entries, err)
	}
	if err := errors.Join(os.Remove(volume), os.RemoveAll(second.root)); err != nil {
		t.Error(err)
	}
	if out := first.at(t).capstan("get", "clusters"); !strings.Contains(out, "one") {
		t.Errorf("the first plane lost its cluster: %s", out)
	}
}

// logsAreJSON expects a JSON document in each line of logs.
func (i *installation) logsAreJSON(components ...string) {
	i.t.Helper()
	for _, name := range components {
		data, err := os.ReadFile(embedded.Layout{Root: i.root}.Log(name))
		if err != nil || len(data) == 0 {
			i.t.Errorf("expected a log of %s, found %d bytes, %v", name, len(data), err)
		}
		for line := range strings.Lines(string(data)) {
			if !json.Valid([]byte(line)) {
				i.t.Errorf("%s: expected a line of JSON, found %q", name, line)
			}
		}
	}
}

// `capstan down` with a running cluster removes its processes, links, mounts, cgroups and files.
func (i *installation) testDown() {
	hostID, err := os.ReadFile(filepath.Join(i.root, "hosts", "local", "host-id"))
	if err != nil {
		i.t.Fatal(err)
	}
	id := strings.TrimSpace(string(hostID))
	bridge := i.bridge()
	if len(cgroupsOf(id)) == 0 || len(processesOf(i.root)) == 0 {
		i.t.Fatalf("there is nothing to remove: cgroups %v, processes %v", cgroupsOf(id), processesOf(i.root))
	}
	i.capstan("down")
	if _, err := os.Stat(i.root); !errors.Is(err, fs.ErrNotExist) {
		i.t.Errorf("%s still exists: %v", i.root, err)
	}
	if left := processesOf(i.root); len(left) > 0 {
		i.t.Errorf("processes remain: %v", left)
	}
	if left := cgroupsOf(id); len(left) > 0 {
		i.t.Errorf("cgroups remain: %v", left)
	}
	if _, err := net.InterfaceByName(bridge); err == nil {
		i.t.Errorf("bridge %s remains", bridge)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(i.root)) {
		i.t.Errorf("mounts remain: %v", err)
	}
	if out, err := i.try("down", "--yes"); err != nil {
		i.t.Errorf("down again: %v %s", err, out)
	}
}

// bridge returns the bridge of the cluster: the link with the address of its endpoint.
func (i *installation) bridge() string {
	i.t.Helper()
	endpoint := strings.TrimSpace(i.kubectl("get", "capstancluster", "one", "-o", "jsonpath={.spec.controlPlaneEndpoint.host}"))
	links, err := net.Interfaces()
	if err != nil {
		i.t.Fatal(err)
	}
	for _, link := range links {
		addresses, _ := link.Addrs()
		for _, a := range addresses {
			if strings.HasPrefix(a.String(), endpoint+"/") {
				return link.Name
			}
		}
	}
	i.t.Fatalf("no link has the address %q", endpoint)
	return ""
}

func cgroupsOf(hostID string) []string {
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && e.Name() == hostID {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// processesOf lists the processes with the root in their arguments.
func processesOf(root string) []string {
	var found []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && bytes.Contains(data, []byte(root)) {
			found = append(found, strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return found
}
