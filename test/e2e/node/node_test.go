//go:build e2e

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	certificates "k8s.io/client-go/kubernetes/typed/certificates/v1"

	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestMachines starts a control plane and a worker and runs the tests of their machines. Each part depends on the
// previous ones. Row CP-23.
func TestMachines(t *testing.T) {
	before := leftovers(t)
	t.Cleanup(func() {
		if after := leftovers(t); after != before {
			t.Errorf("left behind:\nbefore %s\nafter  %s", before, after)
		}
	})
	w := newTestNetwork(t)
	c := newCluster(t, "10.77.0.2:6443")
	o := newOutside(w)
	cp, worker, foreign := w.newMachine("cp", "10.77.0.2"), w.newMachine("worker", "10.77.0.3"), w.newMachine("foreign", "10.77.0.4")

	worker.images = hostImages(t, w)
	loopControl, err := devices.Node("/dev/loop-control")
	expect.NoError(t, err)
	worker.devices = append(worker.devices, loopControl)
	bootCluster(t, c, o, cp, worker)
	for _, part := range []struct {
		name string
		test func(*testing.T, *host, *host)
	}{
		{"data erased IM-08", testErased},
		{"images of the host", testHostImages},
		{"authority of another registry", func(t *testing.T, cp, _ *host) { testForeignAuthority(t, c, o, cp, foreign.with(t)) }},
		{"workload", testWorkload},
		{"network policies", testNetworkPolicies},
		{"local volumes", testLocalVolumes},
		{"block volumes", testBlockVolumes},
		{"CNI plugins", testPlugins},
		{"configuration", func(t *testing.T, cp, worker *host) { testConfiguration(t, o, cp, worker) }},
		{"accounts", testAccounts},
		{"CDI", testCDI},
		{"credentials", testCredentials},
		{"users", testUsers},
		{"CIS benchmark", testCIS},
		{"kill every service", testKillServices},
		{"restart without bootstrap data", testRestart},
		{"block volume after a restart", testBlockVolumeAfterRestart},
		{"up again changes nothing", testUpAgain},
		{"pods stop in order", testStopPods},
		{"shutdown", testShutdown},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.test(t, cp.with(t), worker.with(t)) }) {
			return
		}
	}
}

// with makes helpers fail a subtest instead of the test.
func (h *host) with(t *testing.T) *host {
	inner := *h
	network := *h.testNetwork
	network.t = t
	inner.testNetwork = &network
	return &inner
}

// bootCluster starts both machines at once. The worker waits for its control plane and its token.
func bootCluster(t *testing.T, c *cluster, o *outside, cp, worker *host) {
	start := time.Now()
	cp.start(c.rendered(nodeconfig.RoleInit, o))
	worker.start(c.rendered(nodeconfig.RoleWorker, o))
	cp.until("API server ready", time.Minute, func(s initapi.Status) bool {
		return len(s.NotReady([]string{"kube-apiserver"})) == 0 || s.Bootstrap == initapi.Failed
	})
	t.Logf("API server ready after %s", time.Since(start))
	harness.Wait(t, "the API server accepts the token", time.Minute, func() error {
		_, err := cp.execInput(tokenManifest, kubectl, "--kubeconfig=/etc/kubernetes/admin.conf", "apply", "-f", "-")
		return err
	})
	approveRequests(t, cp)
	pushPreloaded(t, o, cp)
	harness.Wait(t, "both Nodes are ready", time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "node/cp", "node/worker", "--timeout=60s")
		return err
	})
	cp.mustKubectl("taint", "node", "worker", "node.cluster.x-k8s.io/uninitialized-") // Cluster API does this.
	t.Logf("both nodes Ready after %s", time.Since(start))
	cp.untilBootstrapped()
	worker.untilBootstrapped()
	t.Logf("bootstrapped after %s", time.Since(start))
}

// approveRequests stands for the control plane provider, which checks requests before it approves them.
func approveRequests(t *testing.T, cp *host) {
	clients, err := kubernetes.NewForConfig(cp.administrator(cp.ip + ":6443"))
	expect.NoError(t, err)
	requests := clients.CertificatesV1().CertificateSigningRequests()
	ctx, end := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { end(); running.Wait() })
	running.Go(func() {
		for ctx.Err() == nil {
			approveAll(ctx, requests) // The API server is away at times.
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	})
}

// approveAll approves the requests without a decision, as far as the API server answers.
func approveAll(ctx context.Context, requests certificates.CertificateSigningRequestInterface) {
	list, err := requests.List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	for _, r := range list.Items {
		if len(r.Status.Conditions) == 0 {
			r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"}}
			_, _ = requests.UpdateApproval(ctx, r.Name, &r, metav1.UpdateOptions{})
		}
	}
}

// testErased: after the bootstrap, only the files of the bootstrap data are left of it.
func testErased(t *testing.T, cp, worker *host) {
	for _, h := range []*host{cp, worker} {
		if _, err := os.Stat(filepath.Join(h.run, "bootstrap-data")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: bootstrap data still exists: %v", h.name, err)
		}
		harness.Wait(t, "no file of "+h.name+" has the secret", 10*time.Second, func() error { return findSecret(h, tokenSecret, "/var/lib/etcd/") })
		log, err := os.ReadFile(filepath.Join(h.dir, h.name+".log"))
		expect.NoError(t, err)
		if bytes.Contains(log, []byte(tokenSecret)) || bytes.Contains(log, []byte("PRIVATE KEY")) {
			t.Errorf("%s: the log contains secrets", h.name)
		}
	}
}

// findSecret searches all files of a machine, except below the folder, for a secret.
func findSecret(h *host, secret, but string) error {
	return filepath.WalkDir(h.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || strings.HasPrefix(strings.TrimPrefix(path, h.root), but) {
			return nil // Files are created and removed meanwhile.
		}
		data, _ := os.ReadFile(path)
		if bytes.Contains(data, []byte(secret)) {
			return fmt.Errorf("%s: %s has the bootstrap token", h.name, path)
		}
		return nil
	})
}

const workload = `
apiVersion: v1
kind: Pod
metadata: {name: server, labels: {app: server}}
spec:
  nodeName: worker
  containers: [{name: echo, image: "registry.capstan.dev/echo:v1", imagePullPolicy: Never}]
---
apiVersion: v1
kind: Pod
metadata: {name: other, labels: {app: other}}
spec:
  nodeName: cp
  tolerations: [{operator: Exists}]
  containers: [{name: echo, image: "registry.capstan.dev/echo:v1", imagePullPolicy: Never}]
---
apiVersion: v1
kind: Pod
metadata: {name: mapped, labels: {app: mapped}}
spec:
  nodeName: worker
  hostUsers: false
  containers: [{name: echo, image: "registry.capstan.dev/echo:v1", imagePullPolicy: Never}]
---
apiVersion: v1
kind: Service
metadata: {name: front}
spec: {selector: {app: server}, ports: [{port: 80, targetPort: 8080}]}
`

// testWorkload: pods on both machines reach each other, a Service by its DNS name, and the API.
func testWorkload(t *testing.T, cp, worker *host) {
	for _, h := range []*host{cp, worker} {
		_, err := h.exec("/opt/capstan/node/bin/ctr", "-n", "k8s.io", "images", "import", "/opt/capstan/images/echo.tar")
		expect.NoError(t, err)
	}
	start := time.Now()
	cp.apply(workload)
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/server", "pod/other", "pod/mapped", "--timeout=3m")
	t.Logf("pods Ready after %s", time.Since(start))
	pods(t, cp)
	testUserNamespace(t, worker)
	if out, err := worker.exec("/bin/sh", "-c", `for pid in $(pgrep -x echo); do grep ^Seccomp: /proc/$pid/status; done | sort -u`); err != nil || strings.Join(strings.Fields(out), " ") != "Seccomp: 2" {
		t.Errorf("pods without a seccomp profile have %q, want the filter of RuntimeDefault (2); %v", out, err)
	}
}

// testUserNamespace: the worker has two pods. In the pod with "hostUsers: false", root is not root of the machine.
func testUserNamespace(t *testing.T, worker *host) {
	out, err := worker.exec("/bin/sh", "-c", `for pid in $(pgrep -x echo); do read -r inside outside count < /proc/$pid/uid_map; echo "$inside=$outside"; done | sort`)
	expect.NoError(t, err)
	mappings := strings.Fields(out)
	if len(mappings) != 2 || mappings[0] != "0=0" || mappings[1] == "0=0" || !strings.HasPrefix(mappings[1], "0=") {
		t.Errorf("ids of root in the pods of the worker: %v, want 0 in one and another id in the pod with its own user namespace", mappings)
	}
}

func pods(t *testing.T, cp *host) {
	t.Helper()
	ip := cp.mustKubectl("get", "pod", "server", "-o", "jsonpath={.status.podIP}")
	for _, pod := range []string{"other", "server"} {
		var out string
		// A kubelet refuses the request until it has the list of its pods after its start.
		harness.Wait(t, "the pod "+pod+" resolves the API server's name", time.Minute, func() (err error) {
			out, err = cp.kubectl("exec", pod, "--", "/echo", "lookup", "-for", "120s", "kubernetes.default.svc.cluster.local")
			return err
		})
		if !strings.Contains(out, "10.96.0.1") {
			t.Errorf("pod %s: the API's Service is %q", pod, out)
		}
		for _, url := range []string{"http://" + ip + ":8080/", "http://front.default.svc.cluster.local/", "http://front/"} {
			out, err := cp.kubectl("exec", pod, "--", "/echo", "get", "-for", "120s", url)
			if err != nil || !strings.Contains(out, "server") {
				t.Errorf("pod %s, %s: %q, %v", pod, url, out, err)
			}
		}
	}
	cp.mustKubectl("logs", "server")
}

// testCredentials checks the rights of anonymous users and machines, and that Secrets are encrypted at rest.
func testCredentials(t *testing.T, cp, worker *host) {
	for path, want := range map[string]bool{"/readyz": true, "/livez": true, "/healthz": true, "/version": false, "/api/v1/nodes": false} {
		if code := cp.anonymousGet(path); (code == http.StatusOK) != want {
			t.Errorf("anonymous GET %s: %d, want it allowed: %v", path, code, want)
		}
	}
	as := func(h *host, config string, args ...string) error {
		_, err := h.exec(append([]string{kubectl, "--kubeconfig=" + config}, args...)...)
		return err
	}
	expect.NoError(t, as(worker, nodeconfig.AgentKubeconfig, "get", "nodes"))
	for _, verb := range [][]string{{"get", "secrets", "-A"}, {"delete", "node", "cp", "--dry-run=server"}} {
		if as(worker, nodeconfig.AgentKubeconfig, verb...) == nil {
			t.Errorf("the node agent of a worker may %v", verb)
		}
	}
	if as(worker, nodeconfig.KubeletKubeconfig, "label", "node", "cp", "a=b", "--dry-run=server") == nil {
		t.Error("a worker's kubelet may change another Node")
	}
	for _, h := range []*host{cp, worker} {
		out, err := h.exec("/bin/sh", "-c", "find /etc/kubernetes /etc/capstan /var/lib/kubelet/pki /etc/containerd -type f -perm /077 ! -name '*.crt'")
		expect.NoError(t, err)
		if out != "" {
			t.Errorf("%s: others can read %s", h.name, out)
		}
	}
	db, err := os.ReadFile(filepath.Join(cp.root, "var/lib/etcd/member/snap/db"))
	expect.NoError(t, err)
	if bytes.Contains(db, []byte(tokenSecret)) {
		t.Error("the Secret is readable in etcd")
	}
	if got := cp.mustKubectl("get", "node", "worker", "-o", "jsonpath={.spec.providerID}"); got != "capstan:///e2e/worker" {
		t.Errorf("providerID of the worker: %q", got) // IM-01
	}
	if got := cp.mustKubectl("get", "node", "cp", "-o", "jsonpath={.spec.taints[*].key} {.metadata.labels}"); !strings.HasPrefix(got, "node-role.kubernetes.io/control-plane") ||
		!strings.Contains(got, `"node-role.kubernetes.io/control-plane":""`) {
		t.Errorf("taints and labels of the control plane's node: %s", got)
	}
}

// testKillServices: a killed service starts again at once. Pods survive the end of containerd and kubelet.
func testKillServices(t *testing.T, cp, worker *host) {
	started := cp.mustKubectl("get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}")
	for _, h := range []*host{worker, cp} {
		for _, service := range h.until("ready", time.Minute, allReady).Services {
			// Some services end when the API server ends, so read the current processes.
			service = find(h.until("ready", time.Minute, allReady), service.Name)
			killed := time.Now()
			_, err := h.exec("/bin/sh", "-c", fmt.Sprintf("kill -9 %d", service.PID))
			expect.NoError(t, err)
			h.until(service.Name+" back", 10*time.Second, func(s initapi.Status) bool {
				now := find(s, service.Name)
				return now.PID != 0 && now.PID != service.PID && now.Restarts > service.Restarts
			})
			back := time.Since(killed)
			h.until(service.Name+" ready", time.Minute, func(s initapi.Status) bool {
				return find(s, service.Name).State == initapi.StateReady
			})
			t.Logf("%s %s: runs after %s, ready after %s", h.name, service.Name, back.Round(time.Millisecond), time.Since(killed).Round(time.Millisecond))
		}
	}
	harness.Wait(t, "the Nodes and pods are ready after the kills", time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "node/cp", "node/worker", "pod/server", "pod/other", "--timeout=10s")
		return err
	})
	if now := cp.mustKubectl("get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}"); now != started {
		t.Errorf("containers were %s, are %s", started, now)
	}
	pods(t, cp)
}

// testRestart: a machine whose PID 1 dies starts again from its disk, also if all files on the disk belong to root.
func testRestart(t *testing.T, cp, worker *host) {
	volume := volumeOf(cp, "block")
	for _, h := range []*host{worker, cp} {
		h.kill()
		if h == worker {
			expect.NoError(t, loops(t, volume, 0))
		}
		chownToRoot(h)
		h.start(nil)
		s := h.until("ready", time.Minute, allReady)
		if s.Bootstrap != initapi.Succeeded {
			t.Errorf("%s: bootstrap is %s after a restart", h.name, s.Bootstrap)
		}
	}
	harness.Wait(t, "the Nodes and pods are ready after the restart", time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "node/cp", "node/worker", "pod/server", "pod/other", "--timeout=10s")
		return err
	})
	harness.Wait(t, "the Service answers", time.Minute, func() error {
		// Another pod may have the former address of the server.
		out, err := cp.kubectl("exec", "other", "--", "/echo", "get", "http://front/")
		if err == nil && !strings.Contains(out, "server") {
			err = fmt.Errorf("the Service answers as %q", out)
		}
		return err
	})
	pods(t, cp)
}

// testUpAgain: `node up` on a node restarts no service.
func testUpAgain(t *testing.T, cp, worker *host) {
	for _, h := range []*host{worker, cp} {
		before := h.until("ready", time.Minute, allReady)
		_, err := h.exec("/opt/capstan/capstan-init", "node", "up")
		expect.NoError(t, err)
		after := h.until("ready", time.Minute, allReady)
		for _, service := range before.Services {
			if now := find(after, service.Name); now.PID != service.PID {
				t.Errorf("%s: %s was restarted", h.name, service.Name)
			}
		}
	}
}

// testShutdown: after a request to stop, a machine stops its services in order and then ends.
func testShutdown(t *testing.T, cp, worker *host) {
	for _, h := range []*host{worker, cp} {
		start := time.Now()
		_, err := h.exec("/bin/sh", "-c", "kill -TERM 1")
		expect.NoError(t, err)
		harness.Wait(t, h.name+" has stopped", 30*time.Second, func() error {
			state, err := h.runc.State(context.Background(), h.id)
			if err == nil && state.Status != "stopped" {
				err = fmt.Errorf("the state of %s is %s", h.name, state.Status)
			}
			return err
		})
		t.Logf("%s ended after %s", h.name, time.Since(start))
		log, err := os.ReadFile(filepath.Join(h.dir, h.name+".log"))
		expect.NoError(t, err)
		if !bytes.Contains(log, []byte("Machine stopped")) {
			t.Errorf("%s did not end:\n%s", h.name, tail(log, 500))
		}
	}
}

// TestBadDataChangesNothing: invalid bootstrap data is not applied, not even in part.
func TestBadDataChangesNothing(t *testing.T) {
	w := newTestNetwork(t)
	h := w.newMachine("bad", "10.77.0.4")
	const secret = "do-not-tell-anybody"
	h.start([]byte("#cloud-config\nwrite_files: [{path: /etc/made, content: " + secret + "}]\nruncmd: ['touch /etc/ran']\npackages: [" + secret + "]\n"))
	s := h.until("failed", 20*time.Second, func(s initapi.Status) bool { return s.Bootstrap == initapi.Failed })
	if !strings.Contains(s.BootstrapMessage, "packages is not supported") || strings.Contains(s.BootstrapMessage, secret) {
		t.Errorf("message: %s", s.BootstrapMessage)
	}
	for _, path := range []string{"etc/made", "etc/ran"} {
		if _, err := os.Stat(filepath.Join(h.root, path)); err == nil {
			t.Errorf("%s was created", path)
		}
	}
	if _, err := os.Stat(filepath.Join(h.run, "bootstrap-data")); err == nil {
		t.Error("the data still exists")
	}
}

// TestFailedCommand: the failed step and its exit code are reported. A machine that gets its data again continues with
// this step.
func TestFailedCommand(t *testing.T) {
	w := newTestNetwork(t)
	h := w.newMachine("half", "10.77.0.5")
	data := []byte(`#cloud-config
write_files: [{path: /etc/list, content: "a\n", append: true}]
runcmd:
- cd /etc; export GREETING=hello
- [sh, -c, 'echo "$GREETING" >> list']
- '[ -e /etc/mended ] || exit 7'
- echo last >> /etc/list
- echo success > /run/cluster-api/bootstrap-success.complete
`)
	h.start(data)
	s := h.until("failed", 20*time.Second, func(s initapi.Status) bool { return s.Bootstrap == initapi.Failed })
	if !strings.Contains(s.BootstrapMessage, "runcmd: [2]: exit code 7") || !strings.Contains(s.BootstrapMessage, machine.LogDir) {
		t.Errorf("message: %s", s.BootstrapMessage)
	}
	expect.NoError(t, os.WriteFile(filepath.Join(h.root, "etc/mended"), nil, 0o644))
	h.kill()
	h.start(data)
	h.untilBootstrapped()
	list, err := os.ReadFile(filepath.Join(h.root, "etc/list"))
	expect.NoError(t, err)
	if string(list) != "a\nhello\nlast\n" {
		t.Errorf("/etc/list: %q", list)
	}
}

func allReady(s initapi.Status) bool {
	var names []string
	for _, service := range s.Services {
		names = append(names, service.Name)
	}
	return len(names) > 0 && len(s.NotReady(names)) == 0
}

func find(s initapi.Status, name string) initapi.Service {
	for _, service := range s.Services {
		if service.Name == name {
			return service
		}
	}
	return initapi.Service{}
}

// leftovers lists all objects on the host that machines of this process may have left.
func leftovers(t *testing.T) string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"/run/netns/" + prefix() + "-*", "/sys/fs/cgroup/*/" + prefix() + "*", os.TempDir() + "/" + prefix() + "-node-*"} {
		found, err := filepath.Glob(pattern)
		expect.NoError(t, err)
		out = append(out, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	expect.NoError(t, err)
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, prefix()+"-") {
			out = append(out, line)
		}
	}
	data, err := json.Marshal(out)
	expect.NoError(t, err)
	return string(data)
}
