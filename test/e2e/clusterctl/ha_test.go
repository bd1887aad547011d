//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// CTL-09, CTL-15, CP-16, IC-04: clusterctl creates a cluster of the flavor ha. It has three control plane machines in
// three failure domains. Health checks find all machines and report them as healthy.
func TestHighAvailability(t *testing.T) {
	const name, namespace = "heights", "high"
	kubeconfig := admin(plane)
	mustKubectl(t, kubeconfig, "", "create", "namespace", namespace)
	for i, host := range []string{"second", "third"} {
		mustKubectl(t, kubeconfig, startHost(t, host, fmt.Sprintf("127.0.0.%d", 2+i), namespace), "apply", "-f", "-")
		t.Cleanup(func() {
			if _, err := kubectl(t, kubeconfig, "", "delete", "capstanhost", host, "--timeout=3m"); err != nil {
				t.Error(err)
			}
		})
		mustKubectl(t, kubeconfig, "", "wait", "--for=condition=Ready", "capstanhost/"+host, "--timeout=120s")
	}
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })
	manifests := mustClusterctl(t, []string{"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi"},
		"generate", "cluster", name, "--kubeconfig", kubeconfig, "--infrastructure", "capstan:"+version, "--flavor", "ha", "--target-namespace", namespace,
		"--kubernetes-version", harness.KubernetesVersion, "--control-plane-machine-count", "3", "--worker-machine-count", "1")
	mustKubectl(t, kubeconfig, manifests, "apply", "--server-side", "--field-manager=gitops", "-f", "-")
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 4)
	checkDomains(t, c, 3)
	harness.Eventually(t, "four checked and healthy machines", 2*time.Minute, func(context.Context) error {
		out, err := kubectl(t, kubeconfig, "", "-n", namespace, "get", "machinehealthchecks", "--sort-by", ".status.expectedMachines",
			"-o", "jsonpath={range .items[*]}{.status.currentHealthy} of {.status.expectedMachines}, {end}")
		if err == nil && out != "1 of 1, 3 of 3, " {
			err = fmt.Errorf("healthy: %s", out)
		}
		return err
	})
	appliedAgain(t, kubeconfig, manifests)
}

// checkDomains checks that the first n control plane machines are in n failure domains, that they run there, and that
// the Cluster contains these domains.
func checkDomains(t *testing.T, c *harness.Cluster, n int) {
	t.Helper()
	cluster, list := &clusterv1.Cluster{}, &clusterv1.MachineList{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	if err := plane.Client.List(t.Context(), list, client.InNamespace(c.Namespace), client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		t.Fatal(err)
	}
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

// appliedAgain applies the manifests of the running cluster again, like the tools in docs/gitops.md. There is no
// conflict with fields that controllers have written, and no specification changes.
func appliedAgain(t *testing.T, kubeconfig, manifests string) {
	t.Helper()
	const format = `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.generation}{"\n"}{end}`
	before := mustKubectl(t, kubeconfig, manifests, "get", "-f", "-", "-o", format)
	for range 3 {
		mustKubectl(t, kubeconfig, manifests, "apply", "--server-side", "--field-manager=gitops", "-f", "-")
		if after := mustKubectl(t, kubeconfig, manifests, "get", "-f", "-", "-o", format); after != before || !strings.Contains(after, "CapstanControlPlane/") {
			t.Errorf("generations before:\n%sand after:\n%s", before, after)
		}
	}
}
