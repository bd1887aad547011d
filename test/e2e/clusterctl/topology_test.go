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

// topologyTest is a cluster of the class of the release, with the manifests that create it.
type topologyTest struct {
	c                             *harness.Cluster
	kubeconfig, manifests, former string
	local                         theHost
}

// ALL-04, ALL-10, CTL-09, CTL-10, CTL-12, CTL-15: a cluster is created from the class of the release, changed and deleted. Its
// machines change only when the topology requires it. At each stage, the output of the tools is correct.
func TestTopology(t *testing.T) {
	w := newTopologyTest(t)
	t.Run("an unknown variable is named", w.unknownVariable)
	t.Run("described: waiting for a host", w.waitsForHost)
	w.becomesReady(t)
	t.Run("described: ready", w.describedReady)
	t.Run("the variables set the size of the disks", w.sizesOfDisks)
	t.Run("another version: control plane first, then the workers", func(t *testing.T) { upgraded(t, w.c, w.manifests, w.former) })
	t.Run("the spec of a template is immutable", w.immutableTemplates)
	t.Run("more replicas and other labels replace no machine", w.moreReplicas)
	t.Run("another size replaces the machines of this size", w.anotherSize)
	t.Run("the same manifest changes nothing", w.sameManifest)
	t.Run("described: the host is lost", w.hostLost)
	t.Run("described: the deletion waits for the host", w.deletionWaits)
	t.Run("only the class remains after the deletion", w.classRemains)
}

func newTopologyTest(t *testing.T) *topologyTest {
	t.Helper()
	c := &harness.Cluster{Plane: plane, Namespace: "classy", Name: "topo"}
	w := &topologyTest{c: c, kubeconfig: admin(plane), former: harness.FormerMinor(t)}
	mustKubectl(t, w.kubeconfig, "", "create", "namespace", c.Namespace)
	manifests := mustClusterctl(t, []string{
		"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi", "CAPSTAN_WORKER_MEMORY=768Mi", "CAPSTAN_POOL_MACHINE_COUNT=1",
	}, "generate", "cluster", c.Name, "--kubeconfig", w.kubeconfig, "--infrastructure", "capstan:"+version, "--flavor", "topology",
		"--target-namespace", c.Namespace, "--kubernetes-version", w.former,
		"--control-plane-machine-count", "1", "--worker-machine-count", "1")
	w.manifests = strings.NewReplacer("memory: 1536Mi\n", "memory: 1536Mi\n        disk: 5Gi\n", "memory: 768Mi\n", "memory: 768Mi\n        disk: 4Gi\n").Replace(manifests)
	t.Cleanup(func() { c.Delete(t) })
	w.local = hostOf(t) // after the Cleanup above, because the deletion needs the restored host
	return w
}

// class returns the manifests without the Cluster.
func (w *topologyTest) class() string {
	return strings.Join(slices.DeleteFunc(strings.Split(w.manifests, "\n---\n"), func(m string) bool { return strings.Contains("\n"+m, "\nkind: Cluster\n") }), "\n---\n")
}

func (w *topologyTest) unknownVariable(t *testing.T) {
	// Core checks the variables of a Cluster at admission only after it has reconciled those of the class.
	mustKubectl(t, w.kubeconfig, w.class(), "apply", "-f", "-")
	mustKubectl(t, w.kubeconfig, "", "wait", "--namespace", w.c.Namespace, "--for=condition=VariablesReady", "clusterclass", "--all", "--timeout=5m")
	_, err := kubectl(t, w.kubeconfig, strings.Replace(w.manifests, "name: workerMachine\n      value:", "name: nonesuch\n      value:", 1), "apply", "-f", "-")
	if err == nil || !strings.Contains(err.Error(), "variables[nonesuch]") || !strings.Contains(err.Error(), "variable is not defined") {
		t.Errorf("got %v", err)
	}
	_, err = kubectl(t, w.kubeconfig, strings.Replace(w.manifests, "variable: workerMachine.cpus", "variable: nonesuch.cpus", 1), "apply", "-f", "-")
	if err == nil || !strings.Contains(err.Error(), "variable with name nonesuch") {
		t.Errorf("in a class: got %v", err)
	}
}

// waitsForHost creates the cluster while no host accepts machines.
func (w *topologyTest) waitsForHost(t *testing.T) {
	w.local.patch(t, `{"spec":{"unschedulable":true}}`)
	mustKubectl(t, w.kubeconfig, w.manifests, "apply", "-f", "-")
	wantOutput(t, w.c, []string{
		`Cluster/topo Available: False NotAvailable`,
		`CapstanCluster/topo-\S+ Ready: False NoHost .*is unschedulable`,
		`CapstanControlPlane/topo-\S+ Available: False`,
	}, []string{`capstancluster\S*/topo-\S+ .*False +NoHost`})
}

// becomesReady waits until the machines of the cluster run on the host.
func (w *topologyTest) becomesReady(t *testing.T) {
	t.Helper()
	w.local.patch(t, `{"spec":{"unschedulable":null}}`)
	harness.Eventually(t, "the kubeconfig", 2*time.Minute, func(ctx context.Context) error {
		_, err := plane.Capstan(ctx, "get", "kubeconfig", w.c.Name, "--namespace", w.c.Namespace)
		return err
	})
	w.c.Connect(t)
	ready(t, w.c, 3)
	w.c.CreatedIn(t, "v1beta2") // ALL-04: the newer contract of the labels of the release.
}

func (w *topologyTest) describedReady(t *testing.T) {
	wantOutput(t, w.c, []string{`Cluster/topo Available: True`, `CapstanControlPlane/topo-\S+ Available: True`}, []string{`capstanmachine\S*/topo-\S+ .*True +Ready`})
	for _, m := range w.c.Machines(t) {
		if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled {
			wantOutput(t, w.c, []string{`\nMachine/` + m.Name + ` Ready: True`, `CapstanMachine/` + m.Name + ` Ready: True`}, nil)
		}
	}
}

func (w *topologyTest) sizesOfDisks(t *testing.T) {
	haveDisks(t, w.c, map[string]string{clusterv1.MachineControlPlaneLabel: "5Gi", clusterv1.MachineDeploymentNameLabel: "4Gi", clusterv1.MachinePoolNameLabel: "4Gi"})
}

func (w *topologyTest) immutableTemplates(t *testing.T) {
	for _, template := range []string{"capstanmachinetemplate/capstan-worker", "capstanclustertemplate/capstan-cluster", "capstanmachinepooltemplate/capstan-worker-pool"} {
		patch := `{"spec":{"template":{"spec":{"hostSelector":{"matchLabels":{"a":"b"}}}}}}`
		if strings.Contains(template, "pool") {
			patch = `{"spec":{"template":{"spec":{"deletePolicy":"Newest"}}}}`
		}
		_, err := kubectl(t, w.kubeconfig, "", "-n", w.c.Namespace, "patch", template, "--type=merge", "-p", patch)
		if err == nil || !strings.Contains(err.Error(), "a template cannot be changed") {
			t.Errorf("%s: %v", template, err)
		}
	}
}

func (w *topologyTest) moreReplicas(t *testing.T) {
	before := machines(t, w.c)
	patchCluster(t, w.c, `[
		{"op":"add","path":"/spec/topology/controlPlane/metadata","value":{"labels":{"team":"a"}}},
		{"op":"add","path":"/spec/topology/workers/machineDeployments/0/metadata","value":{"labels":{"team":"a"}}},
		{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":2}]`)
	ready(t, w.c, 4)
	harness.Eventually(t, "the label reaches the machine", time.Minute, func(context.Context) error {
		for _, m := range w.c.Machines(t) {
			if _, pooled := m.Labels[clusterv1.MachinePoolNameLabel]; !pooled && m.Labels["team"] != "a" {
				return fmt.Errorf("%s has %v", m.Name, m.Labels)
			}
		}
		return nil
	})
	after := machines(t, w.c)
	for name, uid := range before {
		if after[name] != uid {
			t.Errorf("%s was replaced", name)
		}
	}
}

// anotherSize changes one machine deployment only.
func (w *topologyTest) anotherSize(t *testing.T) {
	before := machines(t, w.c)
	patchCluster(t, w.c, `[
		{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":1},
		{"op":"add","path":"/spec/topology/workers/machineDeployments/0/variables","value":{"overrides":[{"name":"workerMachine","value":{"cpus":1,"memory":"800Mi","disk":"3Gi"}}]}}]`)
	harness.Eventually(t, "new workers", 4*time.Minute, func(ctx context.Context) error {
		for _, m := range w.c.Machines(t) {
			if _, ok := m.Labels[clusterv1.MachineDeploymentNameLabel]; ok && m.Spec.Memory.String() != "800Mi" {
				return fmt.Errorf("%s has %s of memory", m.Name, m.Spec.Memory)
			}
		}
		return w.c.NodesReady(ctx, 3)
	})
	haveDisks(t, w.c, map[string]string{clusterv1.MachineControlPlaneLabel: "5Gi", clusterv1.MachineDeploymentNameLabel: "3Gi", clusterv1.MachinePoolNameLabel: "4Gi"})
	harness.Eventually(t, "core removes the template of the former size", 2*time.Minute, func(context.Context) error {
		if found := slices.DeleteFunc(templates(t, w.c.Namespace), func(name string) bool { return !strings.HasPrefix(name, w.c.Name+"-md-0-") }); len(found) != 1 {
			return fmt.Errorf("templates of the machine deployment: %v", found)
		}
		return nil
	})
	after := machines(t, w.c)
	for _, m := range w.c.Machines(t) {
		_, deployed := m.Labels[clusterv1.MachineDeploymentNameLabel]
		if kept := before[m.Name] == after[m.Name]; kept == deployed {
			t.Errorf("%s was not replaced: %v", m.Name, kept)
		}
	}
}

func (w *topologyTest) sameManifest(t *testing.T) {
	before, generations := machines(t, w.c), templates(t, w.c.Namespace)
	// The class did not change. The Cluster did, so its current topology is its manifest.
	current := mustKubectl(t, w.kubeconfig, "", "-n", w.c.Namespace, "get", "cluster", w.c.Name, "-o", "jsonpath={.spec.topology}")
	mustKubectl(t, w.kubeconfig, w.class(), "apply", "--server-side", "--force-conflicts", "-f", "-")
	mustKubectl(t, w.kubeconfig, fmt.Sprintf(`{"apiVersion":%q,"kind":"Cluster","metadata":{"namespace":%q,"name":%q},"spec":{"topology":%s}}`,
		clusterv1.GroupVersion, w.c.Namespace, w.c.Name, current), "apply", "--server-side", "--force-conflicts", "-f", "-")
	// A change of the spec that concerns no machine makes the topology controller compare all objects again, with dry runs.
	patchCluster(t, w.c, `[{"op":"add","path":"/spec/availabilityGates","value":[{"conditionType":"ControlPlaneInitialized"}]}]`)
	settledTopology(t, w.c)
	if after := machines(t, w.c); !maps.Equal(before, after) {
		t.Errorf("machines before %v, after %v", before, after)
	}
	if after := templates(t, w.c.Namespace); !slices.Equal(generations, after) {
		t.Errorf("templates before %v, after %v", generations, after)
	}
}

func (w *topologyTest) hostLost(t *testing.T) {
	w.local.patch(t, `{"spec":{"address":"unix:///run/nonesuch.sock"}}`)
	wantOutput(t, w.c, []string{
		`CapstanCluster/topo-\S+ Ready: False NoHostConnected`,
		`CapstanMachine/topo-\S+ MachineRunning: Unknown HostUnreachable Host local is not connected`,
	}, []string{`capstanhost\S*/local +False +Unreachable`, `capstanmachine\S*/topo-\S+ .*HostUnreachable`})
}

func (w *topologyTest) deletionWaits(t *testing.T) {
	mustKubectl(t, w.kubeconfig, "", "-n", w.c.Namespace, "delete", "cluster", w.c.Name, "--wait=false")
	wantOutput(t, w.c, []string{
		`Cluster/topo Deleting: True`,
		`CapstanMachine/topo-\S+ Deleting: True DeletionBlocked Host local is not connected`,
	}, nil)
	w.local.patch(t, fmt.Sprintf(`{"spec":{"address":%q}}`, w.local.address))
}

func (w *topologyTest) classRemains(t *testing.T) {
	w.c.Delete(t)
	out := mustKubectl(t, w.kubeconfig, "", "-n", w.c.Namespace, "get", "cluster-api,capstan", "-o", "name")
	if !strings.Contains(out, "clusterclass.") {
		t.Errorf("the class does not remain: %s", out)
	}
	for line := range strings.Lines(out) {
		kept := []string{"template.", "clusterclass.", "capstanhost.", "extensionconfig."} // an ExtensionConfig belongs to the plane
		if !slices.ContainsFunc(kept, func(kind string) bool { return strings.Contains(line, kind) }) {
			t.Errorf("remaining: %s", line)
		}
	}
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
	c.Plane.MustKubectl(t, "-n", c.Namespace, "patch", "cluster", c.Name, "--type=json", "-p", patch)
}
