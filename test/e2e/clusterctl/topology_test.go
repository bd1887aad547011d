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
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// ALL-10, CTL-09, CTL-10, CTL-12, CTL-15: a cluster is created from the class of the release, changed and deleted. Its
// machines change only when the topology requires it. At each stage, the output of the tools is correct.
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
	manifests = strings.NewReplacer("memory: 1536Mi\n", "memory: 1536Mi\n        disk: 5Gi\n", "memory: 768Mi\n", "memory: 768Mi\n        disk: 4Gi\n").Replace(manifests)
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: name}
	t.Cleanup(func() { c.Delete(t) })

	t.Run("an unknown variable is named", func(t *testing.T) {
		// Core checks the variables of a Cluster at admission only after it has reconciled those of the class.
		class := slices.DeleteFunc(strings.Split(manifests, "\n---\n"), func(m string) bool { return strings.Contains("\n"+m, "\nkind: Cluster\n") })
		mustKubectl(t, kubeconfig, strings.Join(class, "\n---\n"), "apply", "-f", "-")
		mustKubectl(t, kubeconfig, "", "wait", "--namespace", namespace, "--for=condition=VariablesReady", "clusterclass", "--all", "--timeout=5m")
		_, err := kubectl(t, kubeconfig, strings.Replace(manifests, "name: workerMachine\n      value:", "name: nonesuch\n      value:", 1), "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "variables[nonesuch]") || !strings.Contains(err.Error(), "variable is not defined") {
			t.Errorf("got %v", err)
		}
		_, err = kubectl(t, kubeconfig, strings.Replace(manifests, "variable: workerMachine.cpus", "variable: nonesuch.cpus", 1), "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "variable with name nonesuch") {
			t.Errorf("in a class: got %v", err)
		}
	})

	// At first, no host accepts machines.
	local := hostOf(t)
	local.patch(t, `{"spec":{"unschedulable":true}}`)
	mustKubectl(t, kubeconfig, manifests, "apply", "-f", "-")
	t.Run("described: waiting for a host", func(t *testing.T) {
		wantOutput(t, c, []string{
			`Cluster/topo Available: False NotAvailable`,
			`CapstanCluster/topo-\S+ Ready: False NoHost .*is unschedulable`,
			`CapstanControlPlane/topo-\S+ Available: False`,
		}, []string{`capstancluster\S*/topo-\S+ .*False +NoHost`})
	})
	local.patch(t, `{"spec":{"unschedulable":null}}`)
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", name, "--namespace", namespace)
		return err
	})
	c.Connect(t)
	ready(t, c, 3)
	t.Run("described: ready", func(t *testing.T) {
		wantOutput(t, c, []string{`Cluster/topo Available: True`, `CapstanControlPlane/topo-\S+ Available: True`}, []string{`capstanmachine\S*/topo-\S+ .*True +Ready`})
		for _, m := range c.Machines(t) {
			if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled {
				wantOutput(t, c, []string{`\nMachine/` + m.Name + ` Ready: True`, `CapstanMachine/` + m.Name + ` Ready: True`}, nil)
			}
		}
	})
	t.Run("the variables set the size of the disks", func(t *testing.T) {
		haveDisks(t, c, map[string]string{clusterv1.MachineControlPlaneLabel: "5Gi", clusterv1.MachineDeploymentNameLabel: "4Gi", clusterv1.MachinePoolNameLabel: "4Gi"})
	})
	t.Run("another version: control plane first, then the workers", func(t *testing.T) { upgraded(t, c, manifests, former) })
	t.Run("the spec of a template is immutable", func(t *testing.T) {
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
	t.Run("more replicas and other labels replace no machine", func(t *testing.T) {
		before := machines(t, c)
		patchCluster(t, c, `[
			{"op":"add","path":"/spec/topology/controlPlane/metadata","value":{"labels":{"team":"a"}}},
			{"op":"add","path":"/spec/topology/workers/machineDeployments/0/metadata","value":{"labels":{"team":"a"}}},
			{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":2}]`)
		ready(t, c, 4)
		harness.Eventually(t, "the label reaches the machine", time.Minute, func(context.Context) error {
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
	t.Run("another size replaces the machines of this size", func(t *testing.T) {
		before := machines(t, c)
		// Only one machine deployment changes.
		patchCluster(t, c, `[
			{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":1},
			{"op":"add","path":"/spec/topology/workers/machineDeployments/0/variables","value":{"overrides":[{"name":"workerMachine","value":{"cpus":1,"memory":"800Mi","disk":"3Gi"}}]}}]`)
		harness.Eventually(t, "new workers", 4*time.Minute, func(ctx context.Context) error {
			for _, m := range c.Machines(t) {
				if _, ok := m.Labels[clusterv1.MachineDeploymentNameLabel]; ok && m.Spec.Memory.String() != "800Mi" {
					return fmt.Errorf("%s has %s of memory", m.Name, m.Spec.Memory)
				}
			}
			return c.NodesReady(ctx, 3)
		})
		haveDisks(t, c, map[string]string{clusterv1.MachineControlPlaneLabel: "5Gi", clusterv1.MachineDeploymentNameLabel: "3Gi", clusterv1.MachinePoolNameLabel: "4Gi"})
		harness.Eventually(t, "core removes the template of the former size", 2*time.Minute, func(context.Context) error {
			if found := slices.DeleteFunc(templates(t, namespace), func(name string) bool { return !strings.HasPrefix(name, c.Name+"-md-0-") }); len(found) != 1 {
				return fmt.Errorf("templates of the machine deployment: %v", found)
			}
			return nil
		})
		after := machines(t, c)
		for _, m := range c.Machines(t) {
			_, deployed := m.Labels[clusterv1.MachineDeploymentNameLabel]
			if kept := before[m.Name] == after[m.Name]; kept == deployed {
				t.Errorf("%s was not replaced: %v", m.Name, kept)
			}
		}
	})
	t.Run("the same manifest changes nothing", func(t *testing.T) {
		before, generations := machines(t, c), templates(t, namespace)
		// The class did not change. The Cluster did, so its current topology is its manifest.
		class := slices.DeleteFunc(strings.Split(manifests, "\n---\n"), func(m string) bool { return strings.Contains("\n"+m, "\nkind: Cluster\n") })
		current := mustKubectl(t, kubeconfig, "", "-n", namespace, "get", "cluster", name, "-o", "jsonpath={.spec.topology}")
		mustKubectl(t, kubeconfig, strings.Join(class, "\n---\n"), "apply", "--server-side", "--force-conflicts", "-f", "-")
		mustKubectl(t, kubeconfig, fmt.Sprintf(`{"apiVersion":%q,"kind":"Cluster","metadata":{"namespace":%q,"name":%q},"spec":{"topology":%s}}`,
			clusterv1.GroupVersion, namespace, name, current), "apply", "--server-side", "--force-conflicts", "-f", "-")
		// A change of the spec that concerns no machine makes the topology controller compare all objects again, with dry runs.
		patchCluster(t, c, `[{"op":"add","path":"/spec/availabilityGates","value":[{"conditionType":"ControlPlaneInitialized"}]}]`)
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
		wantOutput(t, c, []string{
			`CapstanCluster/topo-\S+ Ready: False NoHostConnected`,
			`CapstanMachine/topo-\S+ MachineRunning: Unknown HostUnreachable Host local is not connected`,
		}, []string{`capstanhost\S*/local +False +Unreachable`, `capstanmachine\S*/topo-\S+ .*HostUnreachable`})
	})
	t.Run("described: the deletion waits for the host", func(t *testing.T) {
		mustKubectl(t, kubeconfig, "", "-n", namespace, "delete", "cluster", name, "--wait=false")
		wantOutput(t, c, []string{
			`Cluster/topo Deleting: True`,
			`CapstanMachine/topo-\S+ Deleting: True DeletionBlocked Host local is not connected`,
		}, nil)
		local.patch(t, fmt.Sprintf(`{"spec":{"address":%q}}`, local.address))
	})
	t.Run("only the class remains after the deletion", func(t *testing.T) {
		c.Delete(t)
		if left := machines(t, c); len(left) > 0 {
			t.Errorf("remaining: %v", left)
		}
		out := mustKubectl(t, kubeconfig, "", "-n", namespace, "get", "cluster-api,capstan", "-o", "name")
		for line := range strings.Lines(out) {
			kept := []string{"template.", "clusterclass.", "capstanhost.", "extensionconfig."} // an ExtensionConfig belongs to the plane
			if !slices.ContainsFunc(kept, func(kind string) bool { return strings.Contains(line, kind) }) {
				t.Errorf("remaining: %s", line)
			}
		}
	})
}

// haveDisks checks the disk size of each machine with a label, and the storage that its Node reports. The file system of
// the disk is smaller because of its tables.
func haveDisks(t *testing.T, c *harness.Cluster, sizes map[string]string) {
	t.Helper()
	checked := map[string]bool{}
	for _, m := range c.Machines(t) {
		node := &corev1.Node{}
		if err := c.Client.Get(t.Context(), client.ObjectKey{Name: m.Name}, node); err != nil {
			t.Fatal(err)
		}
		for label, size := range sizes {
			if _, ok := m.Labels[label]; !ok {
				continue
			}
			checked[label] = true
			want, reported := resource.MustParse(size), node.Status.Capacity.StorageEphemeral().Value()
			if m.Spec.Disk.Size == nil || m.Spec.Disk.Size.Cmp(want) != 0 || reported > want.Value() || reported < want.Value()*8/10 {
				t.Errorf("%s: want a disk of %s, got %v, and the Node reports %d bytes", m.Name, size, m.Spec.Disk.Size, reported)
			}
		}
	}
	if len(checked) != len(sizes) {
		t.Errorf("machines with the labels %v exist, want %v", checked, sizes)
	}
}

// upgraded upgrades the topology to the next minor version. A dry run shows first that admission accepts it. No worker
// is replaced before the control plane is complete. The templates of the workers are not replaced, because only the
// version changes.
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
	wantOutput(t, c, []string{`Cluster/topo RollingOut: True`, `CapstanControlPlane/topo-\S+ RollingOut: True`}, nil)
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
			t.Errorf("%s still has the former version", name)
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
	wantOutput(t, c, []string{`Cluster/topo RollingOut: False`, `Cluster/topo Available: True`}, nil)
}

// versionsOf lists the versions of the control plane's and the workers' Machines. A Machine of a pool has a version
// after its Node has one.
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

// settledTopology waits until the topology controller has no changes left.
func settledTopology(t *testing.T, c *harness.Cluster) {
	t.Helper()
	harness.Eventually(t, "the topology is reconciled", 2*time.Minute, func(ctx context.Context) error {
		cluster := &clusterv1.Cluster{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
			return err
		}
		c := conditions.Get(cluster, clusterv1.ClusterTopologyReconciledCondition)
		if c == nil || c.Status != metav1.ConditionTrue || c.ObservedGeneration != cluster.Generation {
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

// machines returns the names of machines with their ids on their host.
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
