//go:build e2e && expiry

// Package expiry runs a management plane and a cluster beyond the expiry of all their certificates. It needs binaries
// with certificate lifetimes of some minutes. `make test-expiry` builds them, and explains the choice of the lifetime.
package expiry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }

const (
	// retries is the time for which an ordinary client repeats a request.
	retries = time.Minute
	limit   = 5 * time.Minute
	// reread is the time after which a client uses the replacement of an expired certificate. client-go reads the files
	// every five minutes, and may wait longer after errors.
	reread = 7 * time.Minute
)

// workload answers on a port of each Node, through kube-proxy.
const workload = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  replicas: 1
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: echo
        image: registry.capstan.dev/echo:v1
        args: [serve]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
        env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec: {type: NodePort, selector: {app: echo}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: writer}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: writer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: writer, namespace: default}]
`

// run is one run of the test.
type run struct {
	*harness.Cluster
	t       *testing.T
	life    time.Duration
	began   time.Time
	hostDir string
	worker  string // address
	writer  client.Client
	writes  int
	answers int
	gap     time.Duration // the longest time without an answer of the workload or without a successful write
}

// TestExpiry keeps a cluster for two lifetimes of every certificate. A client writes, and a pod answers through a
// Service. The Cluster is paused for more than one lifetime. The certificates of kube-proxy and the agent on the worker
// expire, and are renewed afterwards together with the kubelet's.
func TestExpiry(t *testing.T) {
	life, err := time.ParseDuration(os.Getenv("CAPSTAN_MAX_LIFE"))
	if err != nil {
		t.Fatalf("CAPSTAN_MAX_LIFE must be the lifetime with which the binaries were built, see make test-expiry: %v", err)
	}
	r := &run{t: t, life: life}
	r.startHost()
	r.Cluster = plane.CreateCluster(t, "default", "short", "--workers", "1")
	t.Cleanup(r.dumpMachines) // before the cluster is deleted
	r.began = time.Now()
	r.prepare()

	r.keepUntil("half a lifetime", r.life, func() error { return r.after(r.life / 2) })
	r.setPaused(true)
	r.keepUntil("the worker's certificates have expired", 2*r.life, r.workersExpired)
	r.setPaused(false)
	r.keepUntil("the worker's certificates are valid again", limit, r.workersValid)
	t.Logf("kube-proxy and agent renewed %s after the start", time.Since(r.began).Round(time.Second))
	r.programs("recovered", 30081)
	r.keepUntil("two lifetimes", 3*r.life, func() error { return r.after(2*r.life + pki.Backdate) })

	r.check()
	t.Logf("%s: %d writes, %d answers, longest time without either %s", time.Since(r.began).Round(time.Second), r.writes, r.answers, r.gap.Round(time.Millisecond))
}

func (r *run) after(d time.Duration) error {
	if left := time.Until(r.began.Add(d)); left > 0 {
		return fmt.Errorf("%s remain", left.Round(time.Second))
	}
	return nil
}

// startHost runs a capstand that serves over TCP. The managers and this host use certificates for mutual TLS.
func (r *run) startHost() {
	t := r.t
	root, err := os.MkdirTemp("", "cap") // The path is short because the folder contains sockets.
	expect.NoError(t, err)
	expect.NoError(t, os.Chmod(root, 0o755))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	address := listener.Addr().String()
	expect.NoError(t, listener.Close())
	r.hostDir = filepath.Join(root, "tls")
	manifests := plane.Must(t, "host", "credentials", "far", "--address", address, "--dir", r.hostDir, "--allow-namespace", "nobody")
	log, err := os.Create(filepath.Join(t.TempDir(), "capstand.log"))
	expect.NoError(t, err)
	defer log.Close()
	cmd := exec.Command(filepath.Join(harness.Bin(), "capstand"), "--root="+root, "--assets="+harness.Bin(), "--name=far", "--listen="+address)
	cmd.Stdout, cmd.Stderr = log, log
	expect.NoError(t, cmd.Start())
	t.Cleanup(func() {
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("capstand:\n%s", text[max(0, len(text)-4000):])
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		_ = os.RemoveAll(root)
	})
	file := filepath.Join(t.TempDir(), "host.yaml")
	expect.NoError(t, os.WriteFile(file, []byte(manifests), 0o600))
	_, err = harness.Command(t.Context(), nil, harness.Kubectl(), "--kubeconfig", r.planeKubeconfig(), "apply", "-f", file)
	expect.NoError(t, err)
}

// dumpMachines prints the end of each log of the machines if the test has failed.
func (r *run) dumpMachines() {
	if !r.t.Failed() {
		return
	}
	files, err := filepath.Glob(filepath.Join(plane.Root, "hosts/*/machines/*/rootfs/var/log/capstan/*.log"))
	expect.NoError(r.t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		r.t.Logf("%s (%v):\n%s", file, err, text[max(0, len(text)-8000):])
	}
}

// planeKubeconfig reads the current kubeconfig of the plane's administrator.
func (r *run) planeKubeconfig() string {
	path := filepath.Join(r.t.TempDir(), "plane")
	expect.NoError(r.t, os.WriteFile(path, []byte(plane.Must(r.t, "get", "kubeconfig", "--management")), 0o600))
	return path
}

// prepare starts the workload and creates the client that writes. The client uses a token, because the administrator's
// kubeconfig of a paused cluster is not renewed.
func (r *run) prepare() {
	t := r.t
	harness.Eventually(t, "two Nodes", limit, func(ctx context.Context) error { return r.NodesReady(ctx, 2) })
	r.loadImage()
	r.Apply(t, workload)
	if _, err := r.Kubectl(t, "rollout", "status", "deployment/echo", "--timeout=300s"); err != nil {
		t.Fatalf("%v\n%s", err, r.MustKubectl(t, "describe", "pods"))
	}
	token := strings.TrimSpace(r.MustKubectl(t, "create", "token", "writer", "--duration=24h"))
	config, err := clientcmd.BuildConfigFromFlags("", r.Kubeconfig)
	expect.NoError(t, err)
	r.writer, err = harness.NewClient(&rest.Config{
		Host: config.Host, BearerToken: token, Timeout: 5 * time.Second, TLSClientConfig: rest.TLSClientConfig{CAData: config.CAData},
	})
	expect.NoError(t, err)
	r.worker = r.Worker(t).Spec.Network.Addresses[0].Address
	harness.Eventually(t, "the workload answers", limit, func(ctx context.Context) error { return r.answer(ctx, r.worker, 30080) })
}

// loadImage loads the workload's image into all machines, because there is no registry.
func (r *run) loadImage() {
	plane.Must(r.t, "load", "image", filepath.Join(harness.Bin(), "images", "echo.tar"), "--cluster", r.Name, "--namespace", r.Namespace)
}

// keepUntil sends a write and a request to the workload every second until done returns nil. That must happen within a
// time limit. Both may fail for the time of retries.
func (r *run) keepUntil(what string, within time.Duration, done func() error) {
	r.t.Helper()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	good, fresh := time.Now(), time.Now()
	for end := time.Now().Add(within); ; <-tick.C {
		err := errors.Join(r.write(r.t.Context()), r.answer(r.t.Context(), r.worker, 30080))
		if err == nil {
			good = time.Now()
		}
		r.gap = max(r.gap, time.Since(good))
		if time.Since(good) > retries {
			r.t.Fatalf("%s: %s: a client with retries fails for %s: %v", time.Since(r.began).Round(time.Second), what, retries, err)
		}
		if time.Since(fresh) > r.life/8 {
			expect.NoError(r.t, plane.Connect()) // The certificate of the kubeconfig expires like the others.
			fresh = time.Now()
		}
		err = done()
		if err == nil {
			r.t.Logf("%s: %s", time.Since(r.began).Round(time.Second), what)
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("%s: %v", what, err)
		}
	}
}

func (r *run) write(ctx context.Context) error {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "written-"}}
	if err := r.writer.Create(ctx, m); err != nil {
		return err
	}
	r.writes++
	return nil
}

// answer sends a request to the workload through a Node. Each request has its own connection.
func (r *run) answer(ctx context.Context, node string, port int) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(node, fmt.Sprint(port)), nil)
	if err != nil {
		return err
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !strings.Contains(string(body), "echo-")) {
		err = fmt.Errorf("the workload answers %s %q", response.Status, body)
	}
	if err == nil {
		r.answers++
	}
	return err
}

func (r *run) setPaused(paused bool) {
	r.t.Helper()
	expect.NoError(r.t, plane.Connect())
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name}}
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"paused":%v}}`, paused))
	harness.Eventually(r.t, "the Cluster is patched", limit, func(ctx context.Context) error { return plane.Client.Patch(ctx, cluster, patch) })
	r.t.Logf("%s: paused %v", time.Since(r.began).Round(time.Second), paused)
}

// workerFiles returns the certificates that the control plane provider approves.
func (r *run) workerFiles() []string {
	pattern := filepath.Join(plane.Root, "hosts", "*", "machines", r.Worker(r.t).Spec.ID, "rootfs/etc/kubernetes/pki/clients/*.crt")
	files, err := filepath.Glob(pattern)
	expect.NoError(r.t, err)
	if len(files) != 2 {
		r.t.Fatalf("expected the certificates of kube-proxy and the agent in %s, found %v", pattern, files)
	}
	return files
}

func (r *run) workersExpired() error {
	for _, file := range r.workerFiles() {
		c, err := pki.ReadCert(file)
		if err != nil {
			return err
		}
		if time.Now().Before(c.NotAfter) {
			return fmt.Errorf("%s expires on %s", file, c.NotAfter)
		}
	}
	return nil
}

func (r *run) workersValid() error {
	for _, file := range r.workerFiles() {
		c, err := pki.ReadCert(file)
		if err != nil {
			return err
		}
		if !pki.ValidAt(c, time.Now()) {
			return fmt.Errorf("%s is not valid", file)
		}
	}
	return nil
}

// programs creates a new Service and waits until the worker's kube-proxy serves it.
func (r *run) programs(name string, port int) {
	r.t.Helper()
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Selector: map[string]string{"app": "echo"}, Ports: []corev1.ServicePort{{Port: 80, NodePort: int32(port)}},
	}}
	service.Spec.Ports[0].TargetPort.IntVal = 8080
	expect.NoError(r.t, r.writer.Create(r.t.Context(), service))
	r.keepUntil("kube-proxy serves the Service "+name, reread, func() error { return r.answer(r.t.Context(), r.worker, port) })
}

// check proves that each part works with renewed certificates, and that no certificate in use has expired.
func (r *run) check() {
	t := r.t
	expect.NoError(t, plane.Connect())
	r.Connect(t) // with the administrator's kubeconfig that was issued meanwhile
	harness.Eventually(t, "two Nodes", limit, func(ctx context.Context) error { return r.NodesReady(ctx, 2) })
	r.reachesKubelet()
	r.programs("late", 30082)
	r.hostsConnected()

	// A new worker joins: the signer signs its requests, webhooks admit its objects, and the agents of the other
	// machines set routes.
	_, err := harness.Command(t.Context(), nil, harness.Kubectl(), "--kubeconfig", r.planeKubeconfig(), "-n", r.Namespace,
		"scale", "machinedeployment", "--all", "--replicas=2")
	expect.NoError(t, err)
	harness.Eventually(t, "three Nodes", limit, func(ctx context.Context) error { return r.NodesReady(ctx, 3) })
	r.loadImage()
	node := ""
	for _, m := range r.Machines(t) {
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; !ok && m.Spec.Network.Addresses[0].Address != r.worker {
			node = m.Name
		}
	}
	r.MustKubectl(t, "patch", "deployment", "echo", "--type=merge", "-p", fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeName":%q}}}}`, node))
	r.MustKubectl(t, "rollout", "status", "deployment/echo", "--timeout=180s")
	harness.Eventually(t, "the first worker reaches a pod on the new one", limit, func(ctx context.Context) error { return r.answer(ctx, r.worker, 30080) })
	r.noneExpired()
	r.conditions()
}

// reachesKubelet: the API server gets logs from the kubelet and runs commands. The first connection after a renewal of
// the API server's client certificate fails, because client-go closes all connections during the handshake in which it
// loads the new certificate.
func (r *run) reachesKubelet() {
	for _, args := range [][]string{{"logs", "deployment/echo"}, {"exec", "deployment/echo", "--", "/no-such-program"}} {
		harness.Eventually(r.t, "kubectl "+args[0], limit, func(context.Context) error {
			_, err := r.Kubectl(r.t, args...)
			if args[0] == "exec" && err != nil && strings.Contains(err.Error(), "no such file") {
				return nil // The image contains no other program that ends. The error shows that the kubelet has tried to run this one.
			}
			return err
		})
	}
}

func (r *run) hostsConnected() {
	harness.Eventually(r.t, "all hosts are Ready", limit, func(ctx context.Context) error {
		list := &infrav1.CapstanHostList{}
		if err := plane.Client.List(ctx, list); err != nil {
			return err
		}
		if len(list.Items) < 2 {
			return fmt.Errorf("found %d hosts", len(list.Items))
		}
		for _, h := range list.Items {
			if !conditions.IsTrue(&h, clusterv1.ReadyCondition) {
				return fmt.Errorf("%s: %s", h.Name, conditions.GetMessage(&h, clusterv1.ReadyCondition))
			}
		}
		return nil
	})
}

// conditions: no object reports a certificate whose renewal is overdue.
func (r *run) conditions() {
	former := ""
	harness.Eventually(r.t, "no certificate waits for its renewal", limit, func(ctx context.Context) error {
		cp := &controlplanev1.CapstanControlPlaneList{}
		if err := plane.Client.List(ctx, cp); err != nil {
			return err
		}
		for _, c := range cp.Items {
			if message := conditions.GetMessage(&c, infrav1.CertificatesExpiringCondition); message != former {
				r.t.Logf("%s: %s", time.Since(r.began).Round(time.Second), message)
				former = message
			}
			if !conditions.IsFalse(&c, infrav1.CertificatesExpiringCondition) {
				return fmt.Errorf("%s: %s", c.Name, conditions.GetMessage(&c, infrav1.CertificatesExpiringCondition))
			}
		}
		return nil
	})
}
