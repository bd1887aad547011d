//go:build e2e && flannel

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestFlannel runs a cluster without Capstan's pod network, and with flannel: with its backend vxlan, and then with host-gw. Pods of
// two machines reach each other, Services, DNS and the API.
func TestFlannel(t *testing.T) {
	c := &harness.Cluster{Plane: plane, Namespace: "default", Name: "foreign"}
	t.Cleanup(func() { c.Delete(t) })
	plane.Must(t, "create", "cluster", c.Name, "--namespace", c.Namespace, "--workers", "2", "--flavor", "cni", "--wait=false")
	harness.Eventually(t, "the kubeconfig", time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", c.Name, "--namespace", c.Namespace)
		return err
	})
	c.Connect(t)
	harness.Eventually(t, "three Nodes", time.Minute, func(ctx context.Context) error { return nodesWithoutNetwork(ctx, c, 3) })
	plane.Must(t, "load", "image", filepath.Join(harness.Bin(), "flannel", "flannel.tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	manifest, err := os.ReadFile(filepath.Join(testenv.Root(), "test", "flannel", "flannel.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, string(manifest))
	started := time.Now()
	harness.Eventually(t, "three Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	t.Logf("Nodes are Ready %s after flannel was applied", time.Since(started).Round(time.Second))
	if _, err := c.Kubectl(t, "-n", "kube-flannel", "rollout", "status", "daemonset/kube-flannel-ds", "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	t.Run("vxlan", func(t *testing.T) {
		checkWorkload(t, c)
		routesOf(t, c, "flannel.1")
	})
	t.Run("host-gw", func(t *testing.T) {
		c.Apply(t, strings.Replace(string(manifest), `"Type": "vxlan"`, `"Type": "host-gw"`, 1))
		c.MustKubectl(t, "-n", "kube-flannel", "rollout", "restart", "daemonset/kube-flannel-ds")
		c.MustKubectl(t, "-n", "kube-flannel", "rollout", "status", "daemonset/kube-flannel-ds", "--timeout=3m")
		routesOf(t, c, "eth0")
		checkWorkload(t, c)
	})
}

// nodesWithoutNetwork returns nil when n Nodes wait for a CNI plugin.
func nodesWithoutNetwork(ctx context.Context, c *harness.Cluster, n int) error {
	nodes := &corev1.NodeList{}
	if err := c.Client.List(ctx, nodes); err != nil {
		return err
	}
	waiting := 0
	for _, node := range nodes.Items {
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionFalse && strings.Contains(condition.Message, "cni plugin not initialized") {
				waiting++
			}
		}
	}
	if waiting != n {
		return fmt.Errorf("%d of %d Nodes wait for a CNI plugin, want %d", waiting, len(nodes.Items), n)
	}
	return nil
}

// routesOf waits until a worker has the routes to the pods of the two other machines through an interface.
func routesOf(t *testing.T, c *harness.Cluster, device string) {
	t.Helper()
	harness.Eventually(t, "routes to the other machines", time.Minute, func(context.Context) error {
		routes := inMachine(t, c.Worker(t).Name, "/bin/ip", "route")
		if to := regexp.MustCompile(`(?m)^10\.244\.\d+\.0/24 via \S+ dev `+device+`\b`).FindAllString(routes, -1); len(to) != 2 {
			return fmt.Errorf("the routes are %s", routes)
		}
		return nil
	})
}
