//go:build e2e

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/templates"
	"capstan.dev/capstan/test/e2e/harness"
)

const ccmImage = "registry.capstan.dev/test-ccm:v1"

// runCloudControllerManager (CP-24) takes a cluster whose kubelets leave the initialization of Nodes to an external cloud
// controller manager (test/ccm). The cluster becomes available without it. Then it initializes the Nodes of the control
// plane and of the workers.
func runCloudControllerManager(t *testing.T, c *harness.Cluster) {
	harness.Eventually(t, "two Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 2) })
	for _, node := range nodes(t, c) {
		if !uninitialized(&node) {
			t.Errorf("%s has the taints %v before there is a cloud controller manager", node.Name, node.Spec.Taints)
		}
	}
	for _, archive := range []string{filepath.Join(harness.Bin(), "images", "echo.tar"), ccmArchive(t)} {
		plane.Must(t, "load", "image", archive, "--cluster", c.Name, "--namespace", c.Namespace)
	}
	c.MustKubectl(t, "run", "plain", "--image", "registry.capstan.dev/echo:v1", "--restart=Never")
	harness.Eventually(t, "an ordinary pod waits for the cloud controller manager", time.Minute, func(context.Context) error {
		message := c.MustKubectl(t, "get", "pod", "plain", "-o", `jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}`)
		if !strings.Contains(message, "2 node(s) had untolerated taint(s)") {
			return fmt.Errorf("the scheduler reports %q", message)
		}
		return nil
	})

	c.Apply(t, ccmManifests)
	c.MustKubectl(t, "-n", "kube-system", "create", "configmap", "cloud", "--from-file", "instances.yaml="+instances(t, c))
	harness.Eventually(t, "the Nodes are initialized", time.Minute, func(context.Context) error { return initialized(t, c) })
	c.MustKubectl(t, "wait", "--for=condition=Ready", "pod/plain", "--timeout=2m")
	if holder := c.MustKubectl(t, "-n", "kube-system", "get", "lease", "cloud-controller-manager", "-o", "jsonpath={.spec.holderIdentity}"); holder == "" {
		t.Error("no cloud controller manager has won an election")
	}
	// The serving certificate of the kubelet matches the addresses that the cloud reports, and pods use the DNS of the
	// cluster.
	if out := c.MustKubectl(t, "exec", "plain", "--", "/echo", "lookup", "kubernetes.default"); strings.TrimSpace(out) != "10.96.0.1" {
		t.Errorf("kubernetes.default is %q", out)
	}
}

// externalTemplate writes the default template with kubelets that have an external cloud provider.
func externalTemplate(t *testing.T) string {
	t.Helper()
	template, err := templates.FS.ReadFile("cluster-template.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const kubelet = "kubelet: {extraArgs: [{name: cloud-provider, value: external}]}"
	text := strings.Replace(string(template), "  machineTemplate:\n", "  config: {"+kubelet+"}\n  machineTemplate:\n", 1) + "    spec: {" + kubelet + "}\n"
	file := filepath.Join(t.TempDir(), "template.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// ccmArchive builds the image of the cloud controller manager.
func ccmArchive(t *testing.T) string {
	t.Helper()
	dir, root := t.TempDir(), testenv.Root()
	archive := filepath.Join(dir, "ccm.tar")
	for _, command := range []struct {
		dir  string
		args []string
	}{
		{root, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, "ccm"), "./test/ccm"}},
		{filepath.Join(root, "node", "images"), []string{"go", "run", "./mkimage", "-name", ccmImage, "-out", archive, filepath.Join(dir, "ccm")}},
	} {
		cmd := exec.CommandContext(t.Context(), command.args[0], command.args[1:]...)
		cmd.Dir, cmd.Env = command.dir, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", command.args, err, out)
		}
	}
	return archive
}

// instances writes the list of instances of the cloud: one for each machine.
func instances(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	var list []map[string]any
	for _, m := range c.Machines(t) {
		list = append(list, map[string]any{
			"name": m.Name, "providerID": m.Spec.ProviderID, "type": "container", "zone": "box", "region": "rack", "addresses": m.Status.Addresses,
		})
	}
	data, err := yaml.Marshal(map[string]any{"instances": list})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "instances.yaml")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// initialized returns an error for Nodes that the cloud controller manager has not initialized, or that do not match
// their machines.
func initialized(t *testing.T, c *harness.Cluster) error {
	t.Helper()
	machines := map[string]infrav1.CapstanMachine{}
	for _, m := range c.Machines(t) {
		machines[m.Name] = m
	}
	var errs []error
	for _, node := range nodes(t, c) {
		m := machines[node.Name]
		if uninitialized(&node) || node.Labels[corev1.LabelTopologyZone] != "box" || node.Labels[corev1.LabelInstanceTypeStable] != "container" {
			errs = append(errs, fmt.Errorf("%s has the taints %v and the labels %v", node.Name, node.Spec.Taints, node.Labels))
			continue
		}
		if node.Spec.ProviderID == "" || node.Spec.ProviderID != m.Spec.ProviderID || internalIP(&node) != m.Spec.Network.Addresses[0].Address {
			errs = append(errs, fmt.Errorf("%s has the provider id %q and the addresses %v, its machine %q and %v", node.Name,
				node.Spec.ProviderID, node.Status.Addresses, m.Spec.ProviderID, m.Spec.Network.Addresses))
		}
	}
	return errors.Join(errs...)
}

func nodes(t *testing.T, c *harness.Cluster) []corev1.Node {
	t.Helper()
	list := &corev1.NodeList{}
	harness.Eventually(t, "the Nodes", time.Minute, func(ctx context.Context) error { return c.Client.List(ctx, list, &client.ListOptions{}) })
	return list.Items
}

func uninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == cloudproviderapi.TaintExternalCloudProvider })
}

// ccmManifests are those of docs/cloud-controller-manager.md, with a cloud that is a ConfigMap.
const ccmManifests = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: cloud-controller-manager, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: cloud-controller-manager}
rules:
- {apiGroups: [""], resources: [nodes], verbs: [get, list, watch, update, patch, delete]}
- {apiGroups: [""], resources: [nodes/status], verbs: [patch]}
- {apiGroups: [""], resources: [services], verbs: [list, watch]}
- {apiGroups: ["", events.k8s.io], resources: [events], verbs: [create, patch, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: cloud-controller-manager}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cloud-controller-manager}
subjects: [{kind: ServiceAccount, name: cloud-controller-manager, namespace: kube-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: cloud-controller-manager-authentication}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:auth-delegator"}
subjects: [{kind: ServiceAccount, name: cloud-controller-manager, namespace: kube-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: cloud-controller-manager-authentication, namespace: kube-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: extension-apiserver-authentication-reader}
subjects: [{kind: ServiceAccount, name: cloud-controller-manager, namespace: kube-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: cloud-controller-manager, namespace: kube-system}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create, get, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: cloud-controller-manager, namespace: kube-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: cloud-controller-manager}
subjects: [{kind: ServiceAccount, name: cloud-controller-manager, namespace: kube-system}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: cloud-controller-manager, namespace: kube-system}
spec:
  selector: {matchLabels: {app: cloud-controller-manager}}
  template:
    metadata: {labels: {app: cloud-controller-manager}}
    spec:
      serviceAccountName: cloud-controller-manager
      hostNetwork: true
      priorityClassName: system-cluster-critical
      nodeSelector: {node-role.kubernetes.io/control-plane: ""}
      tolerations:
      - {key: node.cloudprovider.kubernetes.io/uninitialized, value: "true", effect: NoSchedule}
      - {key: node-role.kubernetes.io/control-plane, effect: NoSchedule}
      containers:
      - name: cloud-controller-manager
        image: ` + ccmImage + `
        command: [/ccm]
        args:
        - --cloud-provider=file
        - --cloud-config=/etc/cloud/instances.yaml
        - --controllers=cloud-node-controller,cloud-node-lifecycle-controller
        - --leader-elect=true
        volumeMounts: [{name: cloud, mountPath: /etc/cloud}]
      volumes: [{name: cloud, configMap: {name: cloud}}]
`
