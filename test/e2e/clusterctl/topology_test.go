//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// ALL-10, CTL-09, CTL-10, CTL-12, CTL-15: a cluster from the class of the release. Its machines change when
// the topology asks for it, and only then.
func TestTopology(t *testing.T) {
	const name, namespace = "topo", "classy"
	kubeconfig := admin(plane)
	mustKubectl(t, kubeconfig, "", "create", "namespace", namespace)
	manifests := mustClusterctl(t, []string{
		"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi", "CAPSTAN_POOL_MACHINE_COUNT=1",
	}, "generate", "cluster", name, "--kubeconfig", kubeconfig, "--infrastructure", "capstan:"+version, "--flavor", "topology",
		"--target-namespace", namespace, "--kubernetes-version", harness.KubernetesVersion,
		"--control-plane-machine-count", "1", "--worker-machine-count", "1")
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })

	t.Run("an unknown variable is named", func(t *testing.T) {
		_, err := kubectl(t, kubeconfig, strings.Replace(manifests, "name: workerMachine\n      value:", "name: nonesuch\n      value:", 1), "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "variables[nonesuch]") || !strings.Contains(err.Error(), "variable is not defined") {
			t.Errorf("got %v", err)
		}
	})

	mustKubectl(t, kubeconfig, manifests, "apply", "-f", "-")
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 3)

	t.Run("describe shows every machine", func(t *testing.T) {
		out := mustClusterctl(t, nil, "describe", "cluster", name, "--namespace", namespace, "--kubeconfig", kubeconfig, "--show-conditions", "all", "--show-resourcesets", "--grouping=false")
		for _, part := range []string{"─CapstanCluster ", "─CapstanControlPlane ", "─MachineDeployment ", "─MachinePool "} {
			if !strings.Contains(out, part) {
				t.Errorf("no %s in\n%s", part, out)
			}
		}
		for _, m := range c.Machines(t) {
			if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled && !strings.Contains(out, m.Name) {
				t.Errorf("no %s in\n%s", m.Name, out)
			}
		}
	})
	t.Run("templates cannot be changed", func(t *testing.T) {
		for _, template := range []string{"capstanmachinetemplate/capstan-worker", "capstanclustertemplate/capstan-cluster", "capstanmachinepooltemplate/capstan-worker-pool"} {
			patch := `{"spec":{"template":{"spec":{"hostSelector":{"matchLabels":{"a":"b"}}}}}}`
			if strings.Contains(template, "pool") {
				patch = `{"spec":{"template":{"spec":{"deletePolicy":"Newest"}}}}`
			}
			_, err := kubectl(t, kubeconfig, "", "-n", namespace, "patch", template, "--type=merge", "-p", patch)
			if err == nil || !strings.Contains(err.Error(), "a template cannot be changed") {
				t.Errorf("%s: %v", template, err)
			}
		}
	})
	t.Run("more replicas replace nothing", func(t *testing.T) {
		before := machines(t, c)
		patchCluster(t, c, `[{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":2}]`)
		ready(t, c, 4)
		after := machines(t, c)
		for name, uid := range before {
			if after[name] != uid {
				t.Errorf("%s was replaced", name)
			}
		}
	})
	t.Run("another size replaces the machines that have it", func(t *testing.T) {
		before := machines(t, c)
		// One machine deployment only.
		patchCluster(t, c, `[
			{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":1},
			{"op":"add","path":"/spec/topology/workers/machineDeployments/0/variables","value":{"overrides":[{"name":"workerMachine","value":{"cpus":1,"memory":"800Mi"}}]}}]`)
		harness.Eventually(t, "new workers", 4*time.Minute, func(ctx context.Context) error {
			for _, m := range c.Machines(t) {
				if _, ok := m.Labels[clusterv1.MachineDeploymentNameLabel]; ok && m.Spec.Memory.String() != "800Mi" {
					return fmt.Errorf("%s has %s", m.Name, m.Spec.Memory)
				}
			}
			return c.NodesReady(ctx, 3)
		})
		after := machines(t, c)
		for _, m := range c.Machines(t) {
			_, deployed := m.Labels[clusterv1.MachineDeploymentNameLabel]
			if kept := before[m.Name] == after[m.Name]; kept == deployed {
				t.Errorf("%s was kept: %v", m.Name, kept)
			}
		}
	})
	t.Run("the same again changes nothing", func(t *testing.T) {
		before, generations := machines(t, c), templates(t, namespace)
		// The topology controller compares everything anew, with dry runs.
		mustKubectl(t, kubeconfig, "", "-n", namespace, "annotate", "cluster", name, "look=again")
		harness.Eventually(t, "the topology is reconciled", time.Minute, func(ctx context.Context) error {
			cluster := &clusterv1.Cluster{}
			if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, cluster); err != nil {
				return err
			}
			for _, condition := range cluster.Status.Conditions {
				if condition.Type == clusterv1.ClusterTopologyReconciledCondition && condition.Status == "True" {
					return nil
				}
			}
			return fmt.Errorf("conditions: %v", cluster.Status.Conditions)
		})
		if after := machines(t, c); !maps.Equal(before, after) {
			t.Errorf("machines before %v, after %v", before, after)
		}
		if after := templates(t, namespace); !slices.Equal(generations, after) {
			t.Errorf("templates before %v, after %v", generations, after)
		}
	})
	t.Run("delete leaves the class only", func(t *testing.T) {
		c.Delete(t)
		if left := machines(t, c); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		out := mustKubectl(t, kubeconfig, "", "-n", namespace, "get", "cluster-api,capstan", "-o", "name")
		for line := range strings.Lines(out) {
			kept := []string{"template.", "clusterclass.", "capstanhost."}
			if !slices.ContainsFunc(kept, func(kind string) bool { return strings.Contains(line, kind) }) {
				t.Errorf("left: %s", line)
			}
		}
	})
}

// ready waits until the cluster has n Nodes and all of them are Ready.
func ready(t *testing.T, c *harness.Cluster, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d Nodes of %s", n, c.Name), 4*time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, n) })
}

// machines maps names to the ids that the machines have on their host.
func machines(t *testing.T, c *harness.Cluster) map[string]string {
	t.Helper()
	ids := map[string]string{}
	for _, m := range c.Machines(t) {
		ids[m.Name] = m.Spec.ID
	}
	return ids
}

// templates lists the machine templates of a namespace.
func templates(t *testing.T, namespace string) []string {
	t.Helper()
	list := &infrav1.CapstanMachineTemplateList{}
	if err := plane.Client.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, template := range list.Items {
		names = append(names, fmt.Sprintf("%s %d", template.Name, template.Generation))
	}
	slices.Sort(names)
	return names
}

func patchCluster(t *testing.T, c *harness.Cluster, patch string) {
	t.Helper()
	mustKubectl(t, admin(c.Plane), "", "-n", c.Namespace, "patch", "cluster", c.Name, "--type=json", "-p", patch)
}
