//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"testing"
	"time"

	"capstan.dev/capstan/test/e2e/harness"
)

// CTL-09, CTL-15: the flavor ha, as clusterctl makes it: three control plane machines, and health checks that find all
// machines and find them healthy.
func TestHighAvailability(t *testing.T) {
	const name, namespace = "heights", "high"
	kubeconfig := admin(plane)
	mustKubectl(t, kubeconfig, "", "create", "namespace", namespace)
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })
	mustKubectl(t, kubeconfig, mustClusterctl(t, []string{"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi"},
		"generate", "cluster", name, "--kubeconfig", kubeconfig, "--infrastructure", "capstan:"+version, "--flavor", "ha", "--target-namespace", namespace,
		"--kubernetes-version", harness.KubernetesVersion, "--control-plane-machine-count", "3", "--worker-machine-count", "1"), "apply", "-f", "-")
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 4)
	harness.Eventually(t, "four machines that are checked and healthy", 2*time.Minute, func(context.Context) error {
		out, err := kubectl(t, kubeconfig, "", "-n", namespace, "get", "machinehealthchecks", "--sort-by", ".status.expectedMachines",
			"-o", "jsonpath={range .items[*]}{.status.currentHealthy} of {.status.expectedMachines}, {end}")
		if err == nil && out != "1 of 1, 3 of 3, " {
			err = fmt.Errorf("healthy: %s", out)
		}
		return err
	})
}
