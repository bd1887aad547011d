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

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// ALL-10, CTL-09, CTL-10, CTL-12, CTL-15: a cluster from the class of the release, from its birth to its end. Its machines
// change when the topology asks for it, and only then; and at each stage of its life the tools say what is the case.
func TestTopology(t *testing.T) {
	const name, namespace = "topo", "classy"
	kubeconfig := admin(plane)
	mustKubectl(t, kubeconfig, "", "create", "namespace", namespace)
	former := harness.FormerMinor(t)
	manifests := mustClusterctl(t, []string{
		"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi", "CAPSTAN_POOL_MACHINE_COUNT=1",
	}, "generate", "cluster", name, "--kubeconfig", kubeconfig, "--infrastructure", "capstan:"+version, "--flavor", "topology",
		"--target-namespace", namespace, "--kubernetes-version", former,
		"--control-plane-machine-count", "1", "--worker-machine-count", "1")
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })

	t.Run("an unknown variable is named", func(t *testing.T) {
		_, err := kubectl(t, kubeconfig, strings.Replace(manifests, "name: workerMachine\n      value:", "name: nonesuch\n      value:", 1), "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "variables[nonesuch]") || !strings.Contains(err.Error(), "variable is not defined") {
			t.Errorf("got %v", err)
		}
		_, err = kubectl(t, kubeconfig, strings.Replace(manifests, "variable: workerMachine.cpus", "variable: nonesuch.cpus", 1), "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "variable with name nonesuch") {
			t.Errorf("in a class: got %v", err)
		}
	})

	// Nowhere to go at first.
	local := hostOf(t)
	local.patch(t, `{"spec":{"unschedulable":true}}`)
	mustKubectl(t, kubeconfig, manifests, "apply", "-f", "-")
	t.Run("described: waiting for a host", func(t *testing.T) {
		says(t, c, []string{
			`Cluster/topo Available: False NotAvailable`,
			`CapstanCluster/topo-\S+ Ready: False NoHost .*is unschedulable`,
			`CapstanControlPlane/topo-\S+ Available: False`,
		}, []string{`capstancluster\S*/topo-\S+ .*False +NoHost`})
	})
	t.Run("every variable of the class does what it says", func(t *testing.T) { setVariables(t, namespace) })
	local.patch(t, `{"spec":{"unschedulable":null}}`)
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 3)
	t.Run("described: ready", func(t *testing.T) {
		says(t, c, []string{`Cluster/topo Available: True`, `CapstanControlPlane/topo-\S+ Available: True`}, []string{`capstanmachine\S*/topo-\S+ .*True +Ready`})
		for _, m := range c.Machines(t) {
			if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled {
				says(t, c, []string{`\nMachine/` + m.Name + ` Ready: True`, `CapstanMachine/` + m.Name + ` Ready: True`}, nil)
			}
		}
	})
	t.Run("another version: control plane first, then the workers", func(t *testing.T) { upgraded(t, c, manifests, former) })
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
	t.Run("more replicas and other labels replace nothing", func(t *testing.T) {
		before := machines(t, c)
		patchCluster(t, c, `[
			{"op":"add","path":"/spec/topology/controlPlane/metadata","value":{"labels":{"team":"a"}}},
			{"op":"add","path":"/spec/topology/workers/machineDeployments/0/metadata","value":{"labels":{"team":"a"}}},
			{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":2}]`)
		ready(t, c, 4)
		harness.Eventually(t, "the label arrives", time.Minute, func(context.Context) error {
			for _, m := range c.Machines(t) {
				if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled && m.Labels["team"] != "a" {
					return fmt.Errorf("%s has %v", m.Name, m.Labels)
				}
			}
			return nil
		})
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
			{"op":"add","path":"/spec/topology/workers/machineDeployments/0/variables","value":{"overrides":[{"name":"workerMachine","value":{"cpus":1,"memory":"800Mi","disk":"3Gi"}}]}}]`)
		harness.Eventually(t, "new workers", 4*time.Minute, func(ctx context.Context) error {
			for _, m := range c.Machines(t) {
				if _, ok := m.Labels[clusterv1.MachineDeploymentNameLabel]; ok && (m.Spec.Memory.String() != "800Mi" || m.Spec.Disk.Size == nil || m.Spec.Disk.Size.String() != "3Gi") {
					return fmt.Errorf("%s has %s of memory and %v of disk", m.Name, m.Spec.Memory, m.Spec.Disk.Size)
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
		settledTopology(t, c)
		if after := machines(t, c); !maps.Equal(before, after) {
			t.Errorf("machines before %v, after %v", before, after)
		}
		if after := templates(t, namespace); !slices.Equal(generations, after) {
			t.Errorf("templates before %v, after %v", generations, after)
		}
	})
	t.Run("described: the host is lost", func(t *testing.T) {
		local.patch(t, `{"spec":{"address":"unix:///run/nonesuch.sock"}}`)
		says(t, c, []string{
			`CapstanCluster/topo-\S+ Ready: False NoHostConnected`,
			`CapstanMachine/topo-\S+ MachineRunning: Unknown HostUnreachable Host local is not connected`,
		}, []string{`capstanhost\S*/local +False +Unreachable`, `capstanmachine\S*/topo-\S+ .*HostUnreachable`})
	})
	t.Run("described: the deletion waits for the host", func(t *testing.T) {
		mustKubectl(t, kubeconfig, "", "-n", namespace, "delete", "cluster", name, "--wait=false")
		says(t, c, []string{
			`Cluster/topo Deleting: True`,
			`CapstanMachine/topo-\S+ Deleting: True DeletionBlocked Host local is not connected`,
		}, nil)
		local.patch(t, fmt.Sprintf(`{"spec":{"address":%q}}`, local.address))
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

// upgraded takes the topology to the next minor version. A dry run tells beforehand that admission accepts it. No
// worker is made anew before the control plane is done with, and no template for it: only the version is another one.
func upgraded(t *testing.T, c *harness.Cluster, manifests, former string) {
	kubeconfig := admin(c.Plane)
	settledTopology(t, c)
	before, kept := machines(t, c), templates(t, c.Namespace)
	manifests = strings.ReplaceAll(manifests, "version: "+former, "version: "+harness.KubernetesVersion)
	mustKubectl(t, kubeconfig, manifests, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
	if after := machines(t, c); !maps.Equal(before, after) {
		t.Errorf("machines before the dry run %v, after it %v", before, after)
	}
	patchCluster(t, c, fmt.Sprintf(`[{"op":"replace","path":"/spec/topology/version","value":%q}]`, harness.KubernetesVersion))
	says(t, c, []string{`Cluster/topo RollingOut: True`, `CapstanControlPlane/topo-\S+ RollingOut: True`}, nil)
	harness.Eventually(t, "three machines of the new version", 5*time.Minute, func(ctx context.Context) error {
		controlPlane, workers := versionsOf(t, c)
		if slices.Contains(workers, harness.KubernetesVersion) && slices.Contains(controlPlane, former) {
			t.Fatalf("control plane %v, workers %v", controlPlane, workers)
		}
		all := slices.Concat(controlPlane, workers)
		if slices.Sort(all); len(all) != 3 || all[0] != harness.KubernetesVersion || all[2] != harness.KubernetesVersion {
			return fmt.Errorf("control plane %v, workers %v", controlPlane, workers)
		}
		return c.NodesReady(ctx, 3)
	})
	for name := range machines(t, c) {
		if before[name] != "" {
			t.Errorf("%s is of the former version still", name)
		}
	}
	if after := templates(t, c.Namespace); !slices.Equal(kept, after) {
		t.Errorf("templates before %v, after %v", kept, after)
	}
	nodes := &corev1.NodeList{}
	if err := c.Client.List(t.Context(), nodes); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes.Items {
		if got := node.Status.NodeInfo.KubeletVersion; got != harness.KubernetesVersion {
			t.Errorf("the kubelet of %s is of version %s", node.Name, got)
		}
	}
	says(t, c, []string{`Cluster/topo RollingOut: False`, `Cluster/topo Available: True`}, nil)
}

// versionsOf lists the versions of the control plane's and the workers' Machines; those of pools have one when their
// Node has.
func versionsOf(t *testing.T, c *harness.Cluster) (controlPlane, workers []string) {
	t.Helper()
	list := &clusterv1.MachineList{}
	harness.Eventually(t, "the list of Machines", time.Minute, func(ctx context.Context) error {
		return c.Plane.Client.List(ctx, list, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name})
	})
	for _, m := range list.Items {
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
			controlPlane = append(controlPlane, m.Spec.Version)
		} else {
			workers = append(workers, m.Spec.Version)
		}
	}
	return controlPlane, workers
}

// settledTopology waits until the topology controller has nothing left to do.
func settledTopology(t *testing.T, c *harness.Cluster) {
	t.Helper()
	harness.Eventually(t, "the topology is reconciled", 2*time.Minute, func(ctx context.Context) error {
		cluster := &clusterv1.Cluster{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
			return err
		}
		if !conditions.IsTrue(cluster, clusterv1.ClusterTopologyReconciledCondition) {
			return fmt.Errorf("conditions: %v", cluster.Status.Conditions)
		}
		return nil
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
