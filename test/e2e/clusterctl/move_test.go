//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// pools contain the addresses of the cluster's machines and endpoint, and those of its Services.
const pools = `
apiVersion: ipam.capstan.dev/v1beta2
kind: CapstanIPPool
metadata: {name: machines, namespace: moving}
spec:
  subnets: [{cidr: 10.215.60.0/24, gateway: 10.215.60.1, ranges: [10.215.60.10-10.215.60.40]}]
---
apiVersion: ipam.capstan.dev/v1beta2
kind: CapstanIPPool
metadata: {name: services, namespace: moving}
spec:
  subnets: [{cidr: 198.51.100.0/24, ranges: [198.51.100.96-198.51.100.99]}]
`

// lan is the name of the host's end of the cable to the client of the Service.
const lan = "lan0"

const (
	allowServices   = `{"spec":{"services":{"addresses":["198.51.100.96/30"],"allowedNamespaces":{"names":["moving"]}}}}`
	publishServices = `{"spec":{"services":{"loadBalancer":{"addressesFromPool":{"apiGroup":"ipam.capstan.dev","kind":"CapstanIPPool","name":"services"}}}}}`
)

// served is a pod that answers on port 30080 of every machine, and at an address of the host. It runs on the control plane
// machine, because workers are replaced.
const served = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      nodeSelector: {node-role.kubernetes.io/control-plane: ""}
      tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
      containers:
      - name: echo
        image: registry.capstan.dev/echo:v1
        args: [serve]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec:
  type: NodePort
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: public}
spec:
  type: LoadBalancer
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080}]
`

// CTL-09, CTL-12, CTL-13, CTL-14, CTL-15, ALL-11, ALL-12: a cluster moves to another management plane and back while its pod
// serves. Its endpoint, its machines and its Service have addresses of pools, and its workers have volumes. The planes share the
// capstand of this host.
func TestMove(t *testing.T) {
	const name, namespace = "wanderer", "moving"
	outside := harness.NewOutside(t, lan, harness.OutsideNetwork{Host: "198.51.100.1", Client: "198.51.100.2", Bits: 24})
	other, err := harness.Start("--no-hosts")
	if other != nil {
		t.Cleanup(func() {
			if err := other.Down(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	here, there := admin(plane), admin(other)
	for _, kubeconfig := range []string{here, there} {
		mustKubectl(t, kubeconfig, "", "create", "namespace", namespace)
	}
	mustKubectl(t, here, pools, "apply", "-f", "-")
	mustKubectl(t, here, "", "patch", "capstanhost", "local", "--type=merge", "-p", allowServices)
	t.Cleanup(func() {
		_, _ = kubectl(t, here, "", "patch", "capstanhost", "local", "--type=merge", "-p", `{"spec":{"services":null}}`)
	})
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() {
		// A failed test may leave the cluster paused.
		_, _ = c.Plane.Kubectl(t, "-n", namespace, "patch", "cluster", name, "--type=merge", "-p", `{"spec":{"paused":null}}`)
		c.Delete(t)
	})
	// The machines of this plane belong to other tests.
	mustKubectl(t, here, startHost(t, "far", "127.0.0.1", "elsewhere"), "apply", "-f", "-")
	makeMovable(t, c)
	writeData(t, c)
	serving := probe(t, nodePort(t, c), nil)
	public := published(t, c)
	before := look(t, c)

	move := func(t *testing.T, from, to string) {
		t.Helper()
		reached := probe(t, public, outside)
		mustClusterctl(t, nil, "move", "--kubeconfig", from, "--to-kubeconfig", to, "--namespace", namespace)
		if failures, requests := reached(); len(failures) > 0 || requests < 5 {
			t.Errorf("%d of %d requests to %s failed: %v", len(failures), requests, public, failures)
		}
	}
	// arrived checks that all objects are on the plane that has the cluster now, and work there.
	arrived := func(t *testing.T, at *harness.Plane, left string) {
		t.Helper()
		c.Plane = at
		settled(t, c)
		if after := look(t, c); !slices.Equal(before, after) {
			t.Errorf("before\n  %s\nafter\n  %s", strings.Join(before, "\n  "), strings.Join(after, "\n  "))
		}
		if rest := objects(t, left, namespace); len(rest) > 0 {
			t.Errorf("objects that were not moved: %v", rest)
		}
		owned(t, c)
		checkData(t, c, worker(t, c).Name)
		if now := published(t, c); now != public {
			t.Errorf("the Service was at %s, is at %s", public, now)
		}
	}

	t.Run("there", func(t *testing.T) {
		move(t, here, there)
		arrived(t, other, here)
		// The credentials of a host over TCP were moved as well.
		mustKubectl(t, there, "", "wait", "--for=condition=Ready", "capstanhost/far", "--timeout=120s")
		mustKubectl(t, there, "", "-n", "capstan-infrastructure-system", "get", "secret", "far-credentials")
	})
	t.Run("the target replaces a machine with a volume", func(t *testing.T) {
		replaceWorker(t, c)
		before = look(t, c)
	})
	t.Run("a move is refused while a machine is being created", func(t *testing.T) { refusedDuringCreation(t, c, there, here) })
	t.Run("block-move prevents the move", func(t *testing.T) { blocked(t, c, there, here) })
	t.Run("a move back, interrupted and repeated", func(t *testing.T) {
		interrupted(t, c, plane)
		move(t, there, here)
		arrived(t, plane, there)
	})
	t.Run("the pod served all the time", func(t *testing.T) {
		if failures, requests := serving(); len(failures) > 0 || requests < 50 {
			t.Errorf("%d of %d requests failed: %v", len(failures), requests, failures)
		}
	})
	if !t.Failed() {
		t.Run("the deletion at the target frees everything", func(t *testing.T) { deleted(t, c) })
	}
}

func refusedDuringCreation(t *testing.T, c *harness.Cluster, from, to string) {
	t.Helper()
	// The host accepts no machine, so the second one waits.
	mustKubectl(t, from, "", "patch", "capstanhost", "local", "--type=merge", "-p", `{"spec":{"unschedulable":true}}`)
	scale(t, c, 2)
	harness.Eventually(t, "the second Machine", time.Minute, func(context.Context) error {
		if n := len(c.Machines(t)); n != 4 {
			return fmt.Errorf("%d machines", n)
		}
		return nil
	})
	_, err := clusterctl(t, nil, "move", "--kubeconfig", from, "--to-kubeconfig", to, "--namespace", c.Namespace)
	if err == nil || !strings.Contains(err.Error(), "still provisioning the node") {
		t.Errorf("got %v", err)
	}
	if rest := objects(t, to, c.Namespace); len(rest) > 0 {
		t.Errorf("objects were moved: %v", rest)
	}
	scale(t, c, 1)
	mustKubectl(t, from, "", "patch", "capstanhost", "local", "--type=merge", "-p", `{"spec":{"unschedulable":null}}`)
	settled(t, c)
}

// makeMovable creates a cluster with addresses from the pool, one worker, a machine pool of one machine, volumes of both, and a pod
// that serves.
func makeMovable(t *testing.T, c *harness.Cluster) {
	t.Helper()
	environment := []string{"CAPSTAN_MACHINE_CIDR=10.215.60.0/24", "CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi"}
	generate := func(flavor string) string {
		return mustClusterctl(t, environment, "generate", "cluster", c.Name, "--kubeconfig", admin(c.Plane), "--infrastructure", "capstan:"+version,
			"--flavor", flavor, "--target-namespace", c.Namespace, "--kubernetes-version", harness.KubernetesVersion, "--worker-machine-count", "1")
	}
	// The volume of the worker stays when its MachineDeployment goes, and that of the pool's machine goes with its MachinePool.
	manifests := strings.NewReplacer("memory: 768Mi\n", "memory: 768Mi\n      volumes: [{name: data, path: /srv/data, sizeGiB: 1}]\n",
		"  replicas: 1\n  selector:\n", "  replicas: 1\n  rollout: {strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}}\n  selector:\n",
	).Replace(generate("ipam"))
	for document := range strings.SplitSeq(generate("machinepool"), "---\n") {
		if strings.Contains(document, "name: "+c.Name+"-mp-0") {
			manifests += "---\n" + strings.Replace(document, "machineTemplate:\n    spec:\n",
				"machineTemplate:\n    spec:\n      network: {addressesFromPools: [{apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: machines}]}\n"+
					"      volumes: [{name: scratch, path: /srv/scratch, sizeGiB: 1, reclaimPolicy: Delete}]\n", 1)
		}
	}
	mustKubectl(t, admin(c.Plane), manifests, "apply", "-f", "-")
	c.Plane.MustKubectl(t, "-n", c.Namespace, "patch", "capstancluster", c.Name, "--type=merge", "-p", publishServices)
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := c.Plane.Capstan(ctx, "get", "kubeconfig", c.Name, "--namespace", c.Namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 3)
	settled(t, c)
	c.Plane.Must(t, "load", "image", filepath.Join(harness.Bin(), "images", "echo.tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	c.Apply(t, served)
	c.MustKubectl(t, "rollout", "status", "deployment/echo", "--timeout=3m")
}

// settled waits until the Cluster and all its objects are available. The plane that has the cluster now has found this
// out itself, because clusterctl does not move status.
func settled(t *testing.T, c *harness.Cluster) {
	t.Helper()
	key := client.ObjectKey{Namespace: c.Namespace, Name: c.Name}
	harness.Eventually(t, "the cluster is available", 3*time.Minute, func(ctx context.Context) error {
		cluster := &clusterv1.Cluster{}
		if err := c.Plane.Client.Get(ctx, key, cluster); err != nil {
			return err
		}
		for _, condition := range []string{clusterv1.ClusterAvailableCondition, clusterv1.ClusterRemoteConnectionProbeCondition} {
			if !conditions.IsTrue(cluster, condition) {
				return fmt.Errorf("%s: %v", condition, cluster.Status.Conditions)
			}
		}
		list := &clusterv1.MachineList{}
		if err := c.Plane.Client.List(ctx, list, client.InNamespace(c.Namespace)); err != nil {
			return err
		}
		for _, m := range list.Items {
			if !conditions.IsTrue(&m, clusterv1.MachineReadyCondition) || !m.Status.NodeRef.IsDefined() {
				return fmt.Errorf("Machine %s: %v", m.Name, m.Status.Conditions)
			}
		}
		if len(list.Items) != 3 {
			return fmt.Errorf("%d Machines", len(list.Items))
		}
		for _, m := range c.Machines(t) {
			if !conditions.IsTrue(&m, clusterv1.ReadyCondition) {
				return fmt.Errorf("CapstanMachine %s: %v", m.Name, m.Status.Conditions)
			}
		}
		return nil
	})
}

// look describes the properties that a move must preserve: of all objects, and of machines their identity and that they
// still run.
func look(t *testing.T, c *harness.Cluster) []string {
	t.Helper()
	found := objects(t, admin(c.Plane), c.Namespace)
	for _, m := range c.Machines(t) {
		init := plane.Find(t, m.Name, "capstan-init")
		slices.SortFunc(init, func(a, b harness.Process) int { return a.PID - b.PID })
		if len(init) == 0 {
			t.Fatalf("%s does not run", m.Name)
		}
		found = append(found, fmt.Sprintf("%s: id %s on %s with %v, pid %d", m.Name, m.Spec.ID, m.Spec.HostName, m.Spec.Network.Addresses, init[0].PID))
	}
	for _, v := range volumes(t, c) {
		found = append(found, fmt.Sprintf("%s: id %s on %s (%s) for %s", v.Name, v.Spec.ID, v.Spec.HostName, v.Spec.HostID, v.Spec.MachineName))
	}
	capstan := &infrav1.CapstanCluster{}
	if err := c.Plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, capstan); err != nil {
		t.Fatal(err)
	}
	found = append(found, fmt.Sprintf("endpoint %v", capstan.Spec.ControlPlaneEndpoint))
	addresses := &capiipamv1.IPAddressList{}
	if err := c.Plane.Client.List(t.Context(), addresses, client.InNamespace(c.Namespace)); err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses.Items {
		found = append(found, fmt.Sprintf("%s: %s of %s for %s", a.Name, a.Spec.Address, a.Spec.PoolRef.Name, a.Spec.ClaimRef.Name))
	}
	return found
}

// objects lists the objects of Cluster API and Capstan in a namespace.
func objects(t *testing.T, kubeconfig, namespace string) []string {
	t.Helper()
	out := mustKubectl(t, kubeconfig, "", "-n", namespace, "get", "cluster-api,capstan,secrets", "-o", "name")
	clusterScoped := []string{"capstanhost.", "globalcapstanippool.", "extensionconfig."}
	lines := map[string]bool{}
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		ofNamespace := !slices.ContainsFunc(clusterScoped, func(kind string) bool { return strings.HasPrefix(line, kind) })
		if line != "" && ofNamespace {
			lines[line] = true
		}
	}
	return slices.Sorted(maps.Keys(lines))
}

func scale(t *testing.T, c *harness.Cluster, n int) {
	t.Helper()
	c.Plane.MustKubectl(t, "-n", c.Namespace, "scale", "machinedeployment", c.Name+"-md-0", fmt.Sprintf("--replicas=%d", n))
}

// start starts clusterctl move. It returns the output, and functions that wait for the end and kill the process.
func start(t *testing.T, from, to, namespace string) (out *output, wait func() error, kill func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(harness.Bin(), "clusterctl"), "move", "--config", filepath.Join(dist, "clusterctl.yaml"),
		"--kubeconfig", from, "--to-kubeconfig", to, "--namespace", namespace)
	cmd.Env = append(cmd.Environ(), "HOME="+t.TempDir(), "CLUSTERCTL_DISABLE_VERSIONCHECK=true")
	out = &output{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wait = sync.OnceValue(func() error {
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%w: %s", err, out.String())
		}
		return nil
	})
	return out, wait, func() { _ = cmd.Process.Kill() }
}

// output is the output of a process, which can be read while the process writes it.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// blocked: while an object blocks the move, no object is created at the target. Then the move is cancelled.
func blocked(t *testing.T, c *harness.Cluster, from, to string) {
	worker := "capstanmachine/" + c.Worker(t).Name
	mustKubectl(t, from, "", "-n", c.Namespace, "annotate", worker, "clusterctl.cluster.x-k8s.io/block-move=true")
	out, wait, kill := start(t, from, to, c.Namespace)
	key := client.ObjectKey{Namespace: c.Namespace, Name: c.Name}
	harness.Eventually(t, "the Cluster is paused and has the condition Paused", time.Minute, func(ctx context.Context) error {
		capstan := &infrav1.CapstanCluster{}
		if err := c.Plane.Client.Get(ctx, key, capstan); err != nil {
			return err
		}
		if !conditions.IsTrue(capstan, clusterv1.PausedCondition) {
			return fmt.Errorf("conditions: %v", capstan.Status.Conditions)
		}
		return nil
	})
	harness.Eventually(t, "clusterctl waits for the object that blocks the move", time.Minute, func(context.Context) error {
		if found := out.String(); !strings.Contains(found, "Move blocked by") {
			return fmt.Errorf("output: %s", found)
		}
		return nil
	})
	if rest := objects(t, to, c.Namespace); len(rest) > 0 {
		t.Errorf("objects were moved although the move was blocked: %v", rest)
	}
	kill()
	if err := wait(); err == nil {
		t.Error("clusterctl succeeded although the move was blocked")
	}
	mustKubectl(t, from, "", "-n", c.Namespace, "annotate", worker, "clusterctl.cluster.x-k8s.io/block-move-")
	unpause(t, c)
}

// unpause is the step of a user before the move is repeated, because clusterctl refuses paused Clusters.
func unpause(t *testing.T, c *harness.Cluster) {
	t.Helper()
	patchCluster(t, c, `[{"op":"remove","path":"/spec/paused"}]`)
}

// halfway denies the creation of machines of the MachineDeployment. clusterctl creates them after that of the control
// plane.
const halfway = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: halfway}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [infrastructure.capstan.dev], apiVersions: ["*"], operations: [CREATE], resources: [capstanmachines]}]
  validations: [{expression: "!object.metadata.name.contains('-md-0-')", message: the move goes halfway only}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: halfway}
spec: {policyName: halfway, validationActions: [Deny]}
`

// stopHalfway prevents the completion of clusterctl, which retries for some time, until goOn is called.
func stopHalfway(t *testing.T, kubeconfig, namespace string) (goOn func()) {
	t.Helper()
	const machine = "apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachine\nmetadata: {name: a-md-0-b}\n"
	until := func(what string, refused bool) {
		harness.Eventually(t, what, time.Minute, func(context.Context) error {
			_, err := kubectl(t, kubeconfig, machine, "-n", namespace, "create", "--dry-run=server", "-f", "-")
			if is := err != nil && strings.Contains(err.Error(), "halfway only"); is != refused {
				return fmt.Errorf("got %w", err)
			}
			return nil
		})
	}
	mustKubectl(t, kubeconfig, halfway, "apply", "-f", "-")
	until("the other half is denied", true)
	return func() {
		t.Helper()
		mustKubectl(t, kubeconfig, halfway, "delete", "-f", "-")
		until("the other half is allowed", false)
	}
}

// interrupted kills clusterctl after some machines have arrived and before others have.
func interrupted(t *testing.T, c *harness.Cluster, target *harness.Plane) {
	from, to := admin(c.Plane), admin(target)
	goOn := stopHalfway(t, to, c.Namespace)
	_, wait, kill := start(t, from, to, c.Namespace)
	harness.Eventually(t, "the first objects", time.Minute, func(ctx context.Context) error {
		list := &infrav1.CapstanMachineList{}
		if err := target.Client.List(ctx, list, client.InNamespace(c.Namespace)); err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return fmt.Errorf("no machine has arrived")
		}
		return nil
	})
	kill()
	if err := wait(); err == nil {
		t.Error("the move completed before it was interrupted")
	}
	goOn()
	_, err := clusterctl(t, nil, "move", "--kubeconfig", from, "--to-kubeconfig", to, "--namespace", c.Namespace)
	if err == nil || !strings.Contains(err.Error(), "paused") {
		t.Errorf("want clusterctl to refuse a paused Cluster, got %v", err)
	}
	unpause(t, c)
	t.Logf("interrupted after %d of %d objects", len(objects(t, to, c.Namespace)), len(objects(t, from, c.Namespace)))
}

// nodePort returns the URL of the pod on the control plane machine.
func nodePort(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	nodes := &corev1.NodeList{}
	if err := c.Client.List(t.Context(), nodes, client.HasLabels{"node-role.kubernetes.io/control-plane"}); err != nil || len(nodes.Items) != 1 {
		t.Fatalf("control plane nodes: %d, %v", len(nodes.Items), err)
	}
	return "http://" + net.JoinHostPort(nodes.Items[0].Status.Addresses[0].Address, "30080") + "/"
}

// probe sends requests to the pod all the time, from this host or from a client outside of it. The returned function ends this.
func probe(t *testing.T, url string, from *harness.Outside) func() (failures []string, requests int) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	if from != nil {
		transport.DialContext = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			err = from.In(func() error { conn, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
			return conn, err
		}
	}
	get := func() error {
		client := &http.Client{Timeout: 30 * time.Second, Transport: transport}
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s, %w", resp.Status, err)
		}
		return nil
	}
	harness.Eventually(t, "the pod answers at "+url, time.Minute, func(context.Context) error { return get() })
	stop, stopped := make(chan struct{}), make(chan struct{})
	var failures []string
	requests := 0
	go func() {
		defer close(stopped)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			requests++
			if err := get(); err != nil {
				failures = append(failures, err.Error())
			}
		}
	}()
	end := sync.OnceFunc(func() { close(stop); <-stopped })
	t.Cleanup(end)
	return func() ([]string, int) { end(); return failures, requests }
}
