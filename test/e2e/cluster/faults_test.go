//go:build e2e

package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/test/e2e/harness"
)

// inMachine runs a program in all namespaces of a machine and returns its output.
func inMachine(t *testing.T, machine string, args ...string) string {
	t.Helper()
	inits := plane.Find(t, machine, "capstan-init")
	for _, p := range inits {
		if len(p.Args) == 1 {
			out, err := harness.Command(t.Context(), nil, "nsenter", append([]string{"-a", "-t", strconv.Itoa(p.PID), "--"}, args...)...)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
	}
	t.Fatalf("no PID 1 among the capstan-init processes of %s: %v", machine, inits)
	return ""
}

// works checks the state after each fault: all Nodes are Ready, their kubelets live, and each pod reaches the Service by name.
func works(t *testing.T, c *harness.Cluster) {
	t.Helper()
	fault := time.Now()
	harness.Eventually(t, "Nodes Ready and the Service reached", 2*time.Minute, func(ctx context.Context) error {
		if err := errors.Join(c.NodesReady(ctx, 3), kubeletsLive(ctx, c, fault)); err != nil {
			return err
		}
		pods := &corev1.PodList{}
		if err := c.Client.List(ctx, pods, client.InNamespace("default"), client.MatchingLabels{"app": "echo"}); err != nil {
			return err
		}
		if len(pods.Items) != 2 {
			return fmt.Errorf("want two pods, found %d", len(pods.Items))
		}
		for _, pod := range pods.Items {
			if _, err := c.Kubectl(t, "exec", pod.Name, "--", "/echo", "get", "http://echo.default.svc.cluster.local"); err != nil {
				return err
			}
		}
		return nil
	})
}

// kubeletsLive returns nil if three kubelets have renewed their Leases since a time. The condition Ready of a Node stays for some time
// after the death of its kubelet.
func kubeletsLive(ctx context.Context, c *harness.Cluster, since time.Time) error {
	leases := &coordinationv1.LeaseList{}
	if err := c.Client.List(ctx, leases, client.InNamespace(corev1.NamespaceNodeLease)); err != nil {
		return err
	}
	live := slices.DeleteFunc(leases.Items, func(l coordinationv1.Lease) bool {
		return l.Spec.RenewTime == nil || l.Spec.RenewTime.Before(&metav1.MicroTime{Time: since})
	})
	if len(live) != 3 {
		return fmt.Errorf("want three Leases of kubelets that are newer than the fault, found %d", len(live))
	}
	return nil
}

// identity contains the properties of a machine that must survive each fault.
func identity(machines []infrav1.CapstanMachine) map[string]string {
	ids := map[string]string{}
	for _, m := range machines {
		ids[m.Name] = fmt.Sprint(m.UID, m.Spec.ID, m.Spec.HostName, m.Spec.Network.Addresses)
	}
	return ids
}

func sameIdentity(t *testing.T, c *harness.Cluster, before map[string]string) {
	t.Helper()
	after := identity(c.Machines(t))
	if fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("machines have changed:\nbefore %v\nafter  %v", before, after)
	}
}

func killServices(t *testing.T, c *harness.Cluster) {
	before := identity(c.Machines(t))
	controlPlane, worker := c.ControlPlaneMachine(t).Name, c.Worker(t).Name
	for _, victim := range []struct{ machine, service string }{
		{controlPlane, "kube-apiserver"}, {controlPlane, "etcd"}, {controlPlane, "kube-controller-manager"},
		{controlPlane, "kube-scheduler"}, {controlPlane, "coredns"},
		{worker, "kubelet"}, {worker, "containerd"}, {worker, "kube-proxy"},
	} {
		t.Run(victim.service, func(t *testing.T) { killAndReturn(t, victim.machine, victim.service) })
	}
	works(t, c)
	sameIdentity(t, c, before)
}

// killAndReturn kills the only process of that name and waits for a new one.
func killAndReturn(t *testing.T, machine, name string) {
	t.Helper()
	// The process may just have ended, because a process that it needs was killed.
	old := plane.FindRunning(t, machine, name, 1)
	harness.Kill(t, old[0])
	harness.Eventually(t, name+" runs again", 30*time.Second, func(context.Context) error {
		now := plane.Find(t, machine, name)
		if len(now) != 1 || now[0].PID == old[0].PID {
			return fmt.Errorf("processes: %v", now)
		}
		return nil
	})
}

// killMachine kills PID 1. All processes of the machine end with it. The machine starts again from its own disk, with
// its addresses.
func killMachine(t *testing.T, c *harness.Cluster) {
	before := identity(c.Machines(t))
	for _, m := range []infrav1.CapstanMachine{c.Worker(t), c.ControlPlaneMachine(t)} {
		endMachine(t, &m)
		works(t, c)
	}
	sameIdentity(t, c, before)
}

// endMachine kills the PID 1 of a machine, and waits until it is counted.
func endMachine(t *testing.T, m *infrav1.CapstanMachine) {
	t.Helper()
	for _, p := range plane.Find(t, m.Name, "capstan-init") {
		if len(p.Args) == 1 {
			harness.Kill(t, p)
		}
	}
	harness.Eventually(t, "the restart of "+m.Name+" is counted", time.Minute, func(ctx context.Context) error {
		now := &infrav1.CapstanMachine{}
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(m), now); err != nil {
			return err
		}
		if now.Status.Restarts == nil || *now.Status.Restarts < 1 {
			return fmt.Errorf("restarts: %v", now.Status.Restarts)
		}
		return nil
	})
}

// killDaemons kills the processes outside of the machines. The processes in the machines must continue.
func killDaemons(t *testing.T, c *harness.Cluster) {
	before := identity(c.Machines(t))
	inside := pidsOfMachines(t)
	for _, name := range []string{"manager", "capi-core-manager", "kube-apiserver", "etcd"} {
		t.Run(name, func(t *testing.T) { killAndReturn(t, "", name) })
	}
	t.Run("capstand and balancer", func(t *testing.T) {
		old := plane.FindRunning(t, "", "capstand", 2) // one balancer
		for _, p := range old {
			harness.Kill(t, p)
		}
		harness.Eventually(t, "capstand and its balancer run again", 30*time.Second, func(context.Context) error {
			now := plane.Find(t, "", "capstand")
			if len(now) != 2 || slices.ContainsFunc(now, func(p harness.Process) bool {
				return p.PID == old[0].PID || p.PID == old[1].PID
			}) {
				return fmt.Errorf("processes: %v", now)
			}
			return nil
		})
	})
	works(t, c)
	sameIdentity(t, c, before)
	if after := pidsOfMachines(t); after != inside {
		t.Errorf("the machines' init processes have changed from %s to %s", inside, after)
	}
}

func pidsOfMachines(t *testing.T) string {
	t.Helper()
	var pids []string
	for _, p := range plane.Processes(t) {
		if p.Machine != "" && p.Name == "capstan-init" && len(p.Args) == 1 {
			pids = append(pids, fmt.Sprintf("%s=%d", p.Machine, p.PID))
		}
	}
	return strings.Join(pids, " ")
}

// reboot has the effect of a power failure: there are no processes, links and firewall rules, and /run is empty. Only
// the disk is left.
func reboot(t *testing.T, c *harness.Cluster) {
	machines := c.Machines(t)
	before := identity(machines)
	infra := &infrav1.CapstanCluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, infra); err != nil {
		t.Fatal(err)
	}
	killEverything(t)
	forgetNetworks(t, machines, infra.Spec.ID)
	plane.Must(t, "up")
	if err := plane.Connect(); err != nil {
		t.Fatal(err)
	}
	works(t, c)
	sameIdentity(t, c, before)
}

// killEverything ends all processes of the plane and of its machines, and unmounts their file systems.
func killEverything(t *testing.T) {
	t.Helper()
	for range 5 { // Supervisors may start processes before they are killed themselves.
		for _, p := range plane.Processes(t) {
			_ = syscall.Kill(p.PID, syscall.SIGKILL)
		}
	}
	unmountBelow(t, plane.Root)
}

// forgetNetworks removes the parts of a cluster's network that a reboot removes: namespaces, bridge, firewall, and the
// records below /run. It does not change other installations on the host.
func forgetNetworks(t *testing.T, machines []infrav1.CapstanMachine, cluster string) {
	t.Helper()
	box := network.Box{Dir: network.DefaultRunDir}
	for _, m := range machines {
		unmountBelow(t, box.NetNS(m.Spec.ID))
		if err := os.Remove(box.NetNS(m.Spec.ID)); err != nil {
			t.Fatal(err)
		}
	}
	bridge, err := netlink.LinkByName(network.BridgeName(cluster))
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(bridge); err != nil {
		t.Fatal(err)
	}
	output(t, "nft", "delete", "table", "inet", network.TableName(cluster))
	records := strings.TrimPrefix(network.BridgeName(cluster), "cap")
	if err := os.RemoveAll(filepath.Join(network.DefaultRunDir, "networks", records)); err != nil {
		t.Fatal(err)
	}
}

func unmountBelow(t *testing.T, dir string) {
	t.Helper()
	var points []string
	for line := range strings.Lines(output(t, "cat", "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); len(fields) > 4 && (fields[4] == dir || strings.HasPrefix(fields[4], dir+"/")) {
			points = append(points, fields[4])
		}
	}
	for i := len(points) - 1; i >= 0; i-- {
		_ = syscall.Unmount(points[i], syscall.MNT_DETACH)
	}
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := harness.Command(t.Context(), nil, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// checkPortForward sends a request to a pod through kubectl port-forward, on a port that kubectl chooses.
func checkPortForward(t *testing.T, c *harness.Cluster, pod string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Kubectl(), "--kubeconfig", c.Kubeconfig, "port-forward", "--address", "127.0.0.1", "pod/"+pod, ":8080")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = cmd.Wait()
	}()
	line, err := bufio.NewReader(stdout).ReadString('\n') // Forwarding from 127.0.0.1:40123 -> 8080
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(line)
	resp, err := http.Get("http://" + fields[2])
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); strings.TrimSpace(string(body)) != pod {
		t.Errorf("port-forward to %s answered %q", pod, body)
	}
}
