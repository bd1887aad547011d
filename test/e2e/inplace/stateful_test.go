//go:build e2e

package inplace

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/writeload"
)

// linesPort is a port of each worker. It leads to the pod on the same worker.
const linesPort = 30080

// writePatience is the time for which an ordinary client repeats one write to the API server.
const writePatience = time.Minute

// load is what runs in a cluster while it is updated: a StatefulSet whose pods keep their data on the disk of their machine, a
// client that writes to each pod, and a client that writes to the API server.
type load struct {
	*harness.Cluster
	t *testing.T

	containers map[string]string
	writers    map[string]*lineWriter // by node
	objects    *writeload.Writer
}

// startLoad starts a load on all workers of a version.
func startLoad(t *testing.T, c *harness.Cluster, version string) *load {
	t.Helper()
	l := &load{Cluster: c, t: t, writers: map[string]*lineWriter{}}
	plane.Must(t, "load", "image", filepath.Join(harness.Bin(), "images", "echo.tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	volumes, addresses := "", map[string]netip.Addr{}
	for name, m := range allMachines(t, c, version, limit) {
		if m.controlPlane {
			continue
		}
		shell(t, c.Namespace, name, "install", "-d", "-m", "777", "/var/lib/lines")
		volumes += fmt.Sprintf(volume, name, name)
		addresses[name] = m.address
	}
	c.Apply(t, volumes+fmt.Sprintf(lines, linesPort, len(addresses)))
	if _, err := c.Kubectl(t, "rollout", "status", "statefulset/lines", "--timeout=3m"); err != nil {
		state, _ := c.Kubectl(t, "get", "pods,persistentvolumes,persistentvolumeclaims,events", "-o", "wide")
		t.Fatalf("%v\n%s", err, state)
	}
	ctx := context.WithoutCancel(t.Context())
	for node, address := range addresses {
		l.writers[node] = startLineWriter(ctx, fmt.Sprintf("http://%v:%d/lines", address, linesPort))
	}
	t.Cleanup(l.stop)
	harness.Eventually(t, "each pod has lines", time.Minute, func(context.Context) error {
		for node, w := range l.writers {
			if n, _ := w.state(); n == 0 {
				return fmt.Errorf("no line on %s: %w", node, w.lastError())
			}
		}
		return nil
	})
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if l.objects, err = writeload.Start(ctx, config, writePatience); err != nil {
		t.Fatal(err)
	}
	l.containers = allContainers(t, c)
	return l
}

func (l *load) stop() {
	for _, w := range l.writers {
		w.stop()
	}
	if l.objects != nil {
		l.objects.Stop()
	}
}

// check stops the clients. It fails the test if a container is another one, or if an acknowledged write is lost.
func (l *load) check() {
	l.t.Helper()
	l.stop()
	if now := allContainers(l.t, l.Cluster); !maps.Equal(l.containers, now) {
		l.t.Errorf("the containers were %v and are %v", l.containers, now)
	}
	for node, w := range l.writers {
		n, gap := w.state()
		if lost := w.lost(l.t); len(lost) > 0 {
			l.t.Errorf("%d of %d acknowledged lines are lost on %s, the first is %s", len(lost), n, node, lost[0])
		}
		l.t.Logf("%s: %d lines acknowledged, longest gap %v", node, n, gap.Round(time.Millisecond))
	}
	var lost []string
	harness.Eventually(l.t, "the objects are read", limit, func(ctx context.Context) (err error) {
		lost, err = l.objects.Lost(ctx)
		return err
	})
	if failed := l.objects.Failed(); len(lost)+len(failed) > 0 {
		l.t.Errorf("acknowledged writes that are lost: %v; writes that failed for %v: %v", lost, writePatience, failed)
	}
	l.t.Logf("%d objects written, longest gap %v", l.objects.Acknowledged(), l.objects.LongestGap().Round(time.Millisecond))
}

// allMachines waits until no machine is being updated and all have the version, and returns them by name.
func allMachines(t *testing.T, c *harness.Cluster, version string, limit time.Duration) (out map[string]member) {
	t.Helper()
	harness.Eventually(t, "all machines have the version "+version, limit, func(ctx context.Context) error {
		out = map[string]member{}
		list := &clusterv1.MachineList{}
		if err := plane.Client.List(ctx, list, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}); err != nil {
			return err
		}
		for i := range list.Items {
			m := &list.Items[i]
			found, kubelet, err := read(ctx, c, m)
			if _, updates := m.Annotations[clusterv1.UpdateInProgressAnnotation]; err != nil || updates || kubelet != version {
				return fmt.Errorf("Machine %s has the kubelet %s and the annotations %v: %w", m.Name, kubelet, m.Annotations, err)
			}
			out[m.Name] = found
		}
		return nil
	})
	return out
}

// allContainers returns the id, the start and the number of restarts of every container of the cluster.
func allContainers(t *testing.T, c *harness.Cluster) map[string]string {
	t.Helper()
	list, out := &corev1.PodList{}, map[string]string{}
	harness.Eventually(t, "the list of pods", limit, func(ctx context.Context) error { return c.Client.List(ctx, list) })
	for _, pod := range list.Items {
		for _, s := range pod.Status.ContainerStatuses {
			started := "not running"
			if s.State.Running != nil {
				started = s.State.Running.StartedAt.String()
			}
			out[pod.Namespace+"/"+pod.Name+"/"+s.Name] = fmt.Sprintf("%s on %s since %s, %d restarts", s.ContainerID, pod.Spec.NodeName, started, s.RestartCount)
		}
	}
	return out
}

// lineWriter adds lines to the file of a pod all the time, as a client that repeats a line until it is acknowledged.
type lineWriter struct {
	url    string
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu           sync.Mutex
	acknowledged []string
	gap          time.Duration
	last         time.Time
	err          error
}

func startLineWriter(ctx context.Context, url string) *lineWriter {
	w := &lineWriter{url: url, last: time.Now()}
	ctx, w.cancel = context.WithCancel(ctx)
	w.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			w.write(ctx, fmt.Sprintf("line-%06d", n))
		}
	})
	return w
}

// write uses a connection for each attempt, so that every line takes the way through kube-proxy's rules.
func (w *lineWriter) write(ctx context.Context, line string) {
	for tick := time.NewTicker(50 * time.Millisecond); ctx.Err() == nil; <-tick.C {
		err := post(ctx, w.url, line)
		w.mu.Lock()
		if w.err = err; err == nil {
			w.acknowledged = append(w.acknowledged, line)
			w.gap, w.last = max(w.gap, time.Since(w.last)), time.Now()
		}
		w.mu.Unlock()
		if err == nil {
			<-tick.C
			return
		}
	}
}

func post(ctx context.Context, url, line string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(line))
	if err != nil {
		return err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if body, _ := io.ReadAll(response.Body); response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, body)
	}
	return nil
}

func (w *lineWriter) stop() {
	w.cancel()
	w.done.Wait()
}

// state returns the number of acknowledged lines and the longest time between two of them.
func (w *lineWriter) state() (int, time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.acknowledged), w.gap
}

func (w *lineWriter) lastError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// lost returns the acknowledged lines that the pod does not have.
func (w *lineWriter) lost(t *testing.T) (out []string) {
	t.Helper()
	has := map[string]bool{}
	harness.Eventually(t, "the lines are read", limit, func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url, nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s", response.Status)
		}
		scanner := bufio.NewScanner(response.Body)
		for scanner.Scan() {
			has[scanner.Text()] = true
		}
		return scanner.Err()
	})
	return slices.DeleteFunc(slices.Clone(w.acknowledged), func(line string) bool { return has[line] })
}

// volume is a local volume of a Node.
const volume = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: lines-%s}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: lines
  local: {path: /var/lib/lines}
  nodeAffinity:
    required:
      nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]}]
---
`

const lines = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: lines}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: v1
kind: Service
metadata: {name: lines}
spec:
  type: NodePort
  externalTrafficPolicy: Local
  selector: {app: lines}
  ports: [{port: 80, targetPort: 8080, nodePort: %d}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: lines}
spec:
  serviceName: lines
  replicas: %d
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: lines}}
  template:
    metadata: {labels: {app: lines}}
    spec:
      containers:
      - name: echo
        image: registry.capstan.dev/echo:v1
        args: [serve, -data, /data]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec:
      accessModes: [ReadWriteOnce]
      storageClassName: lines
      resources: {requests: {storage: 1Gi}}
`
