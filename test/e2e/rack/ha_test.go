//go:build e2e

package rack_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// CTL-09, CTL-15, CP-16, IC-04: clusterctl creates a cluster of the flavor ha. It has three control plane machines in three failure
// domains. Health checks find all machines and report them as healthy.
func createHighlyAvailable(t *testing.T, plane *harness.Plane, name string) *harness.Cluster {
	t.Helper()
	c := &harness.Cluster{Plane: plane, Namespace: "default", Name: name}
	t.Cleanup(func() { c.Delete(t) })
	manifests := filepath.Join(t.TempDir(), "ha.yaml")
	expect.NoError(t, os.WriteFile(manifests, []byte(flavorHA(t, c)), 0o600))
	apply := []string{"apply", "--server-side", "--field-manager=gitops", "-f", manifests}
	plane.MustKubectl(t, apply...)
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", c.Namespace)
		return err
	})
	c.Connect(t)
	harness.Eventually(t, "four Nodes Ready", 5*time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 4) })
	checkDomains(t, c, 3)
	harness.Eventually(t, "four checked and healthy machines", 2*time.Minute, func(context.Context) error {
		out, err := plane.Kubectl(t, "-n", c.Namespace, "get", "machinehealthchecks", "--sort-by", ".status.expectedMachines",
			"-o", "jsonpath={range .items[*]}{.status.currentHealthy} of {.status.expectedMachines}, {end}")
		if err == nil && out != "1 of 1, 3 of 3, " {
			err = fmt.Errorf("healthy: %s", out)
		}
		return err
	})
	// Like the tools in docs/gitops.md: there is no conflict with fields that controllers have written, and no specification changes.
	generations := func() string {
		return plane.MustKubectl(t, "get", "-f", manifests, "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.generation}{"\n"}{end}`)
	}
	before := generations()
	for range 3 {
		plane.MustKubectl(t, apply...)
		if after := generations(); after != before || !strings.Contains(after, "CapstanControlPlane/") {
			t.Errorf("generations before:\n%sand after:\n%s", before, after)
		}
	}
	return c
}

// flavorHA returns the manifests of a cluster with three control plane machines and one worker.
func flavorHA(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	home := t.TempDir()
	manifests, err := harness.Command(t.Context(), []string{
		"HOME=" + home, "XDG_CONFIG_HOME=" + home, "CLUSTERCTL_DISABLE_VERSIONCHECK=true", "KUBECONFIG=",
		"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi",
	}, filepath.Join(harness.Bin(), "clusterctl"), "generate", "cluster", c.Name, "--kubeconfig", filepath.Join(c.Plane.Root, "admin.kubeconfig"),
		"--from", filepath.Join(testenv.Root(), "templates", "cluster-template-ha.yaml"), "--target-namespace", c.Namespace,
		"--kubernetes-version", harness.KubernetesVersion, "--control-plane-machine-count", "3", "--worker-machine-count", "1")
	expect.NoError(t, err)
	return manifests
}

// checkDomains checks that the first n control plane machines are in n failure domains, that they run there, and that
// the Cluster contains these domains.
func checkDomains(t *testing.T, c *harness.Cluster, n int) {
	t.Helper()
	cluster, list := &clusterv1.Cluster{}, &clusterv1.MachineList{}
	expect.NoError(t, c.Plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster))
	expect.NoError(t, c.Plane.Client.List(t.Context(), list, client.InNamespace(c.Namespace), client.HasLabels{clusterv1.MachineControlPlaneLabel}))
	runs := map[string]infrav1.CapstanMachine{}
	for _, m := range c.Machines(t) {
		runs[m.Name] = m
	}
	domains, hosts := map[string]bool{}, map[string]bool{}
	for _, m := range list.Items {
		wanted, machine := m.Spec.FailureDomain, runs[m.Name]
		domains[wanted], hosts[machine.Spec.HostName] = true, true
		if wanted == "" || m.Status.FailureDomain != wanted || machine.Status.FailureDomain != wanted {
			t.Errorf("%s: want the failure domain %q, got %q, its CapstanMachine has %q", m.Name, wanted, m.Status.FailureDomain, machine.Status.FailureDomain)
		}
		if !slices.ContainsFunc(cluster.Status.FailureDomains, func(d clusterv1.FailureDomain) bool { return d.Name == wanted && ptr.Deref(d.ControlPlane, false) }) {
			t.Errorf("%s: the Cluster has the failure domains %v", m.Name, cluster.Status.FailureDomains)
		}
	}
	if len(list.Items) != n || len(domains) != n || len(hosts) != n {
		t.Errorf("%d machines are in the failure domains %v on the hosts %v, want %d of each", len(list.Items), domains, hosts, n)
	}
}
