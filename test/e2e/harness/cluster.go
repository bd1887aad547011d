//go:build e2e

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/test/plane"
)

// Cluster is a workload cluster of a plane.
type Cluster struct {
	Plane      *Plane
	Namespace  string
	Name       string
	Client     client.WithWatch
	Kubeconfig string // path
}

// CreateCluster creates a cluster with the CLI and connects to it. The cluster is deleted at the end of the test, unless
// the test has deleted it.
func (p *Plane) CreateCluster(t *testing.T, namespace, name string, args ...string) *Cluster {
	t.Helper()
	c := &Cluster{Plane: p, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })
	p.Must(t, append([]string{"create", "cluster", name, "--namespace", namespace}, args...)...)
	c.Connect(t)
	return c
}

// CreatePool creates a pool of addresses. It is deleted at the end of the test.
func (p *Plane) CreatePool(t *testing.T, namespace, name string, subnet ipamv1.Subnet) {
	t.Helper()
	pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{subnet}}}
	if err := p.Client.Create(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Client.Delete(context.WithoutCancel(t.Context()), pool); err != nil {
			t.Error(err)
		}
	})
}

// Must runs the CLI and fails the test on an error.
func (p *Plane) Must(t *testing.T, args ...string) string {
	t.Helper()
	defer LogWait(t, time.Now(), "capstan "+strings.Join(args, " "))
	out, err := p.Capstan(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Connect reads the cluster's kubeconfig and creates the client.
func (c *Cluster) Connect(t *testing.T) {
	t.Helper()
	kubeconfig := c.Plane.Must(t, "get", "kubeconfig", c.Name, "--namespace", c.Namespace)
	c.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(c.Kubeconfig, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	c.ConnectWith(t, kubeconfig)
}

// ConnectWith creates the client of a kubeconfig.
func (c *Cluster) ConnectWith(t *testing.T, kubeconfig string) {
	t.Helper()
	var err error
	if c.Client, err = plane.ClientOf([]byte(kubeconfig)); err != nil {
		t.Fatal(err)
	}
}

// Delete deletes the cluster with the CLI, which waits until the cluster is removed. It does nothing if the cluster does
// not exist.
func (c *Cluster) Delete(t *testing.T) {
	t.Helper()
	// The context of the test has ended when the clean-up runs.
	ctx := context.WithoutCancel(t.Context())
	err := c.Plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, &clusterv1.Cluster{})
	if client.IgnoreNotFound(err) == nil && err != nil {
		return
	}
	defer LogWait(t, time.Now(), "the deletion of "+c.Name)
	if _, err := c.Plane.Capstan(ctx, "delete", "cluster", c.Name, "--namespace", c.Namespace); err != nil {
		t.Error(err)
	}
}

// Kubectl runs kubectl against the cluster.
func (c *Cluster) Kubectl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return Command(t.Context(), nil, Kubectl(), append([]string{"--kubeconfig", c.Kubeconfig}, args...)...)
}

// MustKubectl runs kubectl and fails the test on an error.
func (c *Cluster) MustKubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Machines lists the cluster's CapstanMachines. A cluster without a machine fails the test: a loop over an empty list would check nothing.
// Machines retries for some time, because an API server that has just started denies requests until it has loaded its roles.
func (c *Cluster) Machines(t *testing.T) []infrav1.CapstanMachine {
	t.Helper()
	list := &infrav1.CapstanMachineList{}
	Eventually(t, "the list of machines", 30*time.Second, func(ctx context.Context) error {
		err := c.Plane.Client.List(ctx, list, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name})
		if err == nil && len(list.Items) == 0 {
			err = errors.New("the cluster has no machine")
		}
		return err
	})
	return list.Items
}

// CreatedIn checks the contract version in which Cluster API core created a CapstanMachine of the cluster.
func (c *Cluster) CreatedIn(t *testing.T, contract string) {
	t.Helper()
	var wrote []string
	for _, m := range c.Machines(t) {
		for _, f := range m.ManagedFields {
			if strings.HasPrefix(f.Manager, "capi-") && f.APIVersion == infrav1.GroupVersion.Group+"/"+contract {
				return
			}
			wrote = append(wrote, fmt.Sprintf("%s: %s wrote %s", m.Name, f.Manager, f.APIVersion))
		}
	}
	t.Errorf("core wrote no CapstanMachine in %s:\n%s", contract, strings.Join(wrote, "\n"))
}

// ControlPlaneMachine returns the first control plane machine.
func (c *Cluster) ControlPlaneMachine(t *testing.T) infrav1.CapstanMachine {
	t.Helper()
	return c.machine(t, true)
}

// Worker returns the first worker.
func (c *Cluster) Worker(t *testing.T) infrav1.CapstanMachine {
	t.Helper()
	return c.machine(t, false)
}

func (c *Cluster) machine(t *testing.T, controlPlane bool) infrav1.CapstanMachine {
	t.Helper()
	var found infrav1.CapstanMachine
	Eventually(t, fmt.Sprintf("a machine with the control plane role: %v", controlPlane), patience, func(context.Context) error {
		for _, m := range c.Machines(t) {
			if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok == controlPlane {
				found = m
				return nil
			}
		}
		return errors.New("there is no such machine")
	})
	return found
}

// NodesReady returns nil when n Nodes are Ready and no other Node exists.
func (c *Cluster) NodesReady(ctx context.Context, n int) error {
	nodes := &corev1.NodeList{}
	if err := c.Client.List(ctx, nodes); err != nil {
		return err
	}
	ready := 0
	var states []string
	for _, node := range nodes.Items {
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady {
				states = append(states, fmt.Sprintf("%s=%s (%s)", node.Name, condition.Status, condition.Message))
				if condition.Status == corev1.ConditionTrue {
					ready++
				}
			}
		}
	}
	if ready != n || len(nodes.Items) != n {
		return fmt.Errorf("want %d Nodes Ready, found %d of %d: %s", n, ready, len(nodes.Items), strings.Join(states, ", "))
	}
	return nil
}

// Metrics returns the number of nodes, or of pods in the namespace default, whose usage metrics-server reports. It does what kubectl top
// does, without the start of a program.
func (c *Cluster) Metrics(ctx context.Context, what string) (int, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{
		Group: "metrics.k8s.io", Version: "v1beta1", Kind: map[string]string{"nodes": "NodeMetricsList", "pods": "PodMetricsList"}[what],
	})
	var in []client.ListOption
	if what == "pods" {
		in = append(in, client.InNamespace(metav1.NamespaceDefault))
	}
	err := c.Client.List(ctx, list, in...)
	return len(list.Items), err
}

// patience is the minimum timeout of Eventually. Only failing tests reach it. A busy host is slow.
const patience = 3 * time.Minute

// Eventually repeats a function until it succeeds or the time is over.
func Eventually(t *testing.T, what string, limit time.Duration, try func(ctx context.Context) error) {
	t.Helper()
	begin := time.Now()
	defer LogWait(t, begin, what)
	limit = max(limit, patience)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var last error // the last error of an attempt that the timeout did not interrupt
	for {
		start := time.Now()
		err := try(ctx)
		if err == nil {
			return
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %v: %v", what, limit, last)
		case <-time.After(pause(time.Since(begin), time.Since(start))):
		}
	}
}

// Wait is Eventually for attempts without a context, and for waits of the clean-up, whose context has ended.
func Wait(t *testing.T, what string, limit time.Duration, try func() error) {
	t.Helper()
	begin := time.Now()
	defer LogWait(t, begin, what)
	for limit = max(limit, patience); ; {
		start := time.Now()
		err := try()
		if err == nil {
			return
		}
		if time.Since(begin) > limit {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		time.Sleep(pause(time.Since(begin), time.Since(start)))
	}
}

// True is Wait for a condition. what names the expected state.
func True(t *testing.T, what string, limit time.Duration, holds func() bool) {
	t.Helper()
	Wait(t, what, limit, func() error {
		if !holds() {
			return errors.New("this is not true yet")
		}
		return nil
	})
}

// LogWait logs a wait of two seconds or more, with its end. make test-times lists the longest.
func LogWait(t *testing.T, start time.Time, what string) {
	t.Helper()
	if took := time.Since(start); took >= 2*time.Second {
		t.Logf("waited %.1f s: %s", took.Seconds(), what)
	}
}

// pause returns the time until the next attempt of a wait that has lasted some time, and whose last attempt took some. A short wait
// ends soon. A long one leaves the processor to the other tests: many attempts start a program.
func pause(waited, took time.Duration) time.Duration {
	return max(50*time.Millisecond, min(waited/10, time.Second), min(2*took, 2*time.Second))
}

// Find returns the processes with a name in a machine, or on the host if machine is empty.
func (p *Plane) Find(t *testing.T, machine, name string) []Process {
	t.Helper()
	var found []Process
	for _, process := range p.Processes(t) {
		if process.Machine == machine && process.Name == name {
			found = append(found, process)
		}
	}
	return found
}

// Processes returns the processes of this plane and of its machines. It excludes other installations on the same host.
func (p *Plane) Processes(t *testing.T) []Process {
	t.Helper()
	all, err := Processes()
	if err != nil {
		t.Fatal(err)
	}
	ours, err := p.machineNames()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(process Process) bool {
		if process.Machine == "" {
			return !strings.Contains(strings.Join(process.Args, " "), p.Root) && !p.balancer(process)
		}
		return !ours[process.Machine]
	})
}

// balancer reports whether a process is a load balancer of this plane. Its arguments contain no path, but its descriptor
// 3 is its folder.
func (p *Plane) balancer(process Process) bool {
	folder, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/3", process.PID))
	return err == nil && strings.HasPrefix(folder, p.Root+"/") && slices.Contains(process.Args, "balancer")
}

// machineNames returns the names of the machines whose disks are below this plane's root.
func (p *Plane) machineNames() (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(p.Root, "hosts", "*", "machines", "*", "rootfs", "etc", "hostname"))
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		names[strings.TrimSpace(string(name))] = true
	}
	return names, nil
}

// FindRunning waits until Find returns n processes. Use it for processes that may just have ended.
func (p *Plane) FindRunning(t *testing.T, machine, name string, n int) []Process {
	t.Helper()
	var found []Process
	Eventually(t, fmt.Sprintf("%d processes %s in %q", n, name, machine), patience, func(context.Context) error {
		if found = p.Find(t, machine, name); len(found) != n {
			return fmt.Errorf("found %v", found)
		}
		return nil
	})
	return found
}

// Kill kills a process with SIGKILL.
func Kill(t *testing.T, p Process) {
	t.Helper()
	if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil {
		t.Fatalf("killing %s (%d): %v", p.Name, p.PID, err)
	}
}

// KillManager kills the manager with SIGKILL, and returns the killed process. The plane starts another one.
func (p *Plane) KillManager(t *testing.T) Process {
	t.Helper()
	manager := p.FindRunning(t, "", "manager", 1)[0]
	Kill(t, manager)
	return manager
}

// Apply applies manifests to the cluster.
func (c *Cluster) Apply(t *testing.T, manifests string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "manifests.yaml")
	if err := os.WriteFile(path, []byte(manifests), 0o600); err != nil {
		t.Fatal(err)
	}
	c.MustKubectl(t, "apply", "-f", path)
}
