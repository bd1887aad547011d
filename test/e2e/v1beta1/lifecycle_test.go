//go:build e2e

// Package v1beta1 contains the end-to-end test of a cluster with CRDs that are labelled only for v1beta1. It needs root and the built
// binaries.
package v1beta1

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	namespace = "default"
	cidr      = "10.218.40.0/24"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }

// TestLife (ALL-04, IC-01, IC-02, IM-01, IM-02, IM-03, IM-04, IM-07, MP-01, MP-02, MP-03, MP-04, MP-05, MP-08, CP-05, CP-06, CP-09,
// BC-01, BC-02, BC-03): without the labels for v1beta2, Cluster API core creates, scales, upgrades and deletes a cluster with a machine
// deployment, a machine pool and addresses from an IP pool through the v1beta1 contract. TestTopology of test/e2e/clusterctl does so
// through the v1beta2 contract.
func TestLife(t *testing.T) {
	onlyV1Beta1(t)
	former := harness.FormerMinor(t)
	plane.CreatePool(t, namespace, "machines", ipamv1.Subnet{CIDR: cidr, Gateway: "10.218.40.1", Ranges: []ipamv1.AddressRange{"10.218.40.10-10.218.40.29"}})
	t.Setenv("CAPSTAN_MACHINE_CIDR", cidr)
	t.Setenv("CAPSTAN_CONTROL_PLANE_MEMORY", "1536Mi")
	t.Setenv("CAPSTAN_WORKER_MEMORY", "768Mi")
	c := plane.CreateCluster(t, namespace, "former", "--flavor", "ipam", "--workers", "0", "--kubernetes-version", former)
	plane.MustKubectl(t, "apply", "-f", writeMachinePool(t, c.Name, former))

	plane.MustKubectl(t, "-n", namespace, "scale", "machinedeployment", c.Name+"-md-0", "--replicas=1")
	plane.MustKubectl(t, "-n", namespace, "scale", "machinepool", c.Name+"-mp-0", "--replicas=1")
	running(t, c, former)
	c.CreatedIn(t, "v1beta1")
	checkObjects(t, c)
	upgrade(t, c)

	c.Delete(t)
	addresses := &capiipamv1.IPAddressList{}
	if err := plane.Client.List(t.Context(), addresses, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	if len(addresses.Items) > 0 {
		t.Errorf("%d addresses are still allocated", len(addresses.Items))
	}
}

// upgrade replaces the control plane and both workers by machines of the next version.
func upgrade(t *testing.T, c *harness.Cluster) {
	t.Helper()
	version := fmt.Sprintf(`{"spec":{"version":%q}}`, harness.KubernetesVersion)
	plane.MustKubectl(t, "-n", namespace, "patch", "capstancontrolplanes.v1beta1.controlplane.capstan.dev", c.Name+"-control-plane", "--type=merge", "-p", version)
	upgraded(t, c)
	workers := fmt.Sprintf(`{"spec":{"template":%s}}`, version)
	plane.MustKubectl(t, "-n", namespace, "patch", "machinedeployment", c.Name+"-md-0", "--type=merge", "-p", workers)
	plane.MustKubectl(t, "-n", namespace, "patch", "machinepool", c.Name+"-mp-0", "--type=merge", "-p", workers)
	running(t, c, harness.KubernetesVersion)
}

// onlyV1Beta1 removes the label for v1beta2 from the CRDs that serve v1beta1, so that core finds no newer contract.
func onlyV1Beta1(t *testing.T) {
	t.Helper()
	labelled := 0
	for crd := range strings.FieldsSeq(plane.MustKubectl(t, "get", "crd", "-l", "cluster.x-k8s.io/v1beta1=v1beta1", "-o", "name")) {
		if strings.HasSuffix(crd, ".capstan.dev") {
			plane.MustKubectl(t, "label", crd, "cluster.x-k8s.io/v1beta2-")
			labelled++
		}
	}
	if labelled != 10 {
		t.Fatalf("%d CRDs are labelled for v1beta1, want 10", labelled)
	}
}

// writeMachinePool returns a file with an empty machine pool, in v1beta1 for Capstan's kinds.
func writeMachinePool(t *testing.T, cluster, version string) string {
	t.Helper()
	manifests := strings.NewReplacer("CLUSTER", cluster, "VERSION", version).Replace(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: MachinePool
metadata: {name: CLUSTER-mp-0, namespace: default}
spec:
  clusterName: CLUSTER
  replicas: 0
  template:
    spec:
      clusterName: CLUSTER
      version: VERSION
      bootstrap:
        configRef: {apiGroup: bootstrap.capstan.dev, kind: CapstanConfig, name: CLUSTER-mp-0}
      infrastructureRef: {apiGroup: infrastructure.capstan.dev, kind: CapstanMachinePool, name: CLUSTER-mp-0}
---
apiVersion: infrastructure.capstan.dev/v1beta1
kind: CapstanMachinePool
metadata: {name: CLUSTER-mp-0, namespace: default}
spec:
  machineTemplate:
    spec:
      memory: 768Mi
      network:
        addressesFromPools:
        - {apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: machines}
---
apiVersion: bootstrap.capstan.dev/v1beta1
kind: CapstanConfig
metadata: {name: CLUSTER-mp-0, namespace: default}
spec: {}
`)
	file := filepath.Join(t.TempDir(), "machinepool.yaml")
	if err := os.WriteFile(file, []byte(manifests), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// running waits until the control plane and both workers have a version, and Cluster API reports the cluster as
// available.
func running(t *testing.T, c *harness.Cluster, version string) {
	t.Helper()
	harness.Eventually(t, "three Nodes of "+version, 6*time.Minute, func(ctx context.Context) error {
		if err := c.NodesReady(ctx, 3); err != nil {
			return err
		}
		nodes := &corev1.NodeList{}
		if err := c.Client.List(ctx, nodes); err != nil {
			return err
		}
		for _, node := range nodes.Items {
			if got := node.Status.NodeInfo.KubeletVersion; got != version {
				return fmt.Errorf("%s has %s", node.Name, got)
			}
		}
		return nil
	})
	harness.Eventually(t, "an available Cluster", time.Minute, func(ctx context.Context) error {
		cluster := &clusterv1.Cluster{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
			return err
		}
		if !conditions.IsTrue(cluster, clusterv1.AvailableCondition) {
			return fmt.Errorf("conditions: %v", cluster.Status.Conditions)
		}
		return nil
	})
}

// upgraded waits until the control plane has only machines of the new version.
func upgraded(t *testing.T, c *harness.Cluster) {
	t.Helper()
	cp := &unstructured.Unstructured{}
	cp.SetAPIVersion("controlplane.capstan.dev/v1beta1")
	cp.SetKind("CapstanControlPlane")
	harness.Eventually(t, "the upgraded control plane", 6*time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: c.Name + "-control-plane"}, cp); err != nil {
			return err
		}
		status, _, _ := unstructured.NestedMap(cp.Object, "status")
		got := fmt.Sprintf("%v %v %v %v %v", status["version"], status["ready"], status["replicas"], status["updatedReplicas"], status["unavailableReplicas"])
		if want := harness.KubernetesVersion + " true 1 1 0"; got != want {
			return fmt.Errorf("status is %q, want %q", got, want)
		}
		return nil
	})
}
