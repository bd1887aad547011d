//go:build e2e

package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
)

// TestLifecycle creates, uses and deletes one cluster. Each part depends on the previous ones. CP-01: the control
// plane's components run; CP-24: DNS and the service proxy run; IC-12 and IM-09: the deletion leaves no trace. Rows
// CP-23, CP-25, IM-01, IM-03.
func TestLifecycle(t *testing.T) {
	empty, err := harness.Look()
	if err != nil {
		t.Fatal(err)
	}
	c := plane.CreateCluster(t, "default", "alpha", "--workers", "2")

	for _, part := range []struct {
		name string
		run  func(*testing.T, *harness.Cluster)
	}{
		{"nodes match their machines", checkNodes},
		{"API server requires authentication", checkAnonymous},
		{"pods can be reached by Service and DNS", checkWorkload},
		{"pods see the size of their machine", checkPodViews},
		{"secrets are encrypted at rest", checkEncryption},
		{"users get their own certificates", checkUserCertificate},
		{"private keys stay private", checkPrivateKeys},
		{"manifests are applied once", checkManifests},
		{"a ClusterResourceSet is applied", checkResourceSet},
		{"killed services restart", killServices},
		{"a killed machine restarts", killMachine},
		{"killed daemons restart without effect on machines", killDaemons},
		{"a reboot", reboot},
		{"a pod that fills its disk is evicted", evictFromFullDisk},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, c) }) {
			t.FailNow()
		}
	}
	t.Run("the deletion stops pods in order and removes everything", func(t *testing.T) {
		check := stopsInOrder(t, c)
		c.Delete(t)
		check(t)
		nothingLeft(t, empty)
		secrets := &corev1.SecretList{}
		if err := plane.Client.List(t.Context(), secrets, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}); err != nil {
			t.Fatal(err)
		}
		for _, s := range secrets.Items {
			t.Errorf("secret %s remains", s.Name)
		}
	})
}

// checkNodes: IM-01 providerID, IM-03 addresses, limits reported as capacity, BC-06 no taint left on workers.
func checkNodes(t *testing.T, c *harness.Cluster) {
	harness.Eventually(t, "three Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	for _, m := range c.Machines(t) {
		node := &corev1.Node{}
		if err := c.Client.Get(t.Context(), client.ObjectKey{Name: m.Name}, node); err != nil {
			t.Fatal(err)
		}
		if node.Spec.ProviderID != m.Spec.ProviderID || node.Spec.ProviderID == "" {
			t.Errorf("%s: Node has providerID %q, machine %q", m.Name, node.Spec.ProviderID, m.Spec.ProviderID)
		}
		if got, want := internalIP(node), m.Spec.Network.Addresses[0].Address; got != want {
			t.Errorf("%s: Node has address %s, machine %s", m.Name, got, want)
		}
		if m.Spec.Memory == nil {
			t.Fatalf("%s: the template of the test has no memory limit", m.Name)
		}
		if got, want := node.Status.Capacity.Memory(), m.Spec.Memory; got.Cmp(*want) != 0 {
			t.Errorf("%s: Node has memory %s, machine %s", m.Name, got, want)
		}
		if got, want := node.Status.Capacity.Cpu(), resource.NewQuantity(int64(m.Spec.CPUs), resource.DecimalSI); m.Spec.CPUs != 0 && got.Cmp(*want) != 0 {
			t.Errorf("%s: Node has %s processors, machine %s", m.Name, got, want)
		}
		if got := node.Status.NodeInfo.KubeletVersion; got != harness.KubernetesVersion {
			t.Errorf("%s: kubelet has version %s", m.Name, got)
		}
		harness.Eventually(t, "taints of "+m.Name, 30*time.Second, func(ctx context.Context) error {
			if err := c.Client.Get(ctx, client.ObjectKey{Name: m.Name}, node); err != nil {
				return err
			}
			_, controlPlane := m.Labels[clusterv1.MachineControlPlaneLabel]
			tainted := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
				return taint.Key == "node-role.kubernetes.io/control-plane" && taint.Effect == corev1.TaintEffectNoSchedule
			})
			if tainted != controlPlane || len(node.Spec.Taints) > 1 || !tainted && len(node.Spec.Taints) > 0 {
				return fmt.Errorf("taints are %v", node.Spec.Taints)
			}
			return nil
		})
	}
}

func internalIP(node *corev1.Node) string {
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return a.Address
		}
	}
	return ""
}

func checkAnonymous(t *testing.T, c *harness.Cluster) {
	cluster := &clusterv1.Cluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	// The test checks only the status code, and sends no credentials.
	http := http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	for path, want := range map[string]int{"/readyz": 200, "/livez": 200, "/api": 401, "/api/v1/namespaces": 401, "/version": 401} {
		resp, err := http.Get("https://" + cluster.Spec.ControlPlaneEndpoint.String() + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s without credentials: want %d, got %d", path, want, resp.StatusCode)
		}
	}
}

// checkWorkload: pods on both workers reach each other by Service name; logs, exec and port-forward work.
func checkWorkload(t *testing.T, c *harness.Cluster) {
	c.Plane.Must(t, "load", "image", harness.Bin()+"/images/echo.tar", "--cluster", c.Name, "--namespace", c.Namespace)
	c.Apply(t, harness.Echo(""))
	c.MustKubectl(t, "rollout", "status", "deployment/echo", "--timeout=3m")
	pods := &corev1.PodList{}
	if err := c.Client.List(t.Context(), pods, client.InNamespace("default"), client.MatchingLabels{"app": "echo"}); err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) != 2 || pods.Items[0].Spec.NodeName == pods.Items[1].Spec.NodeName {
		t.Fatalf("want two pods on two nodes, found %d", len(pods.Items))
	}
	for _, pod := range pods.Items {
		// Each pod sends requests to the Service until each of the two has answered. So pods of both nodes can be
		// reached from both nodes, by name.
		answered := map[string]bool{}
		harness.Eventually(t, "answers of both pods to "+pod.Name, 30*time.Second, func(context.Context) error {
			out, err := c.Kubectl(t, "exec", pod.Name, "--", "/echo", "get", "http://echo.default.svc.cluster.local")
			if err != nil {
				return err
			}
			answered[strings.TrimSpace(out)] = true
			if len(answered) < 2 {
				return fmt.Errorf("only %v answered", answered)
			}
			return nil
		})
		if out := c.MustKubectl(t, "exec", pod.Name, "--", "/echo", "lookup", "kubernetes.default"); strings.TrimSpace(out) != "10.96.0.1" {
			t.Errorf("%s: kubernetes.default is %q", pod.Name, out)
		}
	}
	if _, err := c.Kubectl(t, "logs", pods.Items[0].Name); err != nil {
		t.Error(err)
	}
	checkPortForward(t, c, pods.Items[0].Name)
	checkAPIFromPod(t, c, pods.Items[0].Name)
}

// checkAPIFromPod connects to the API Service from a pod. The API server requires authentication.
func checkAPIFromPod(t *testing.T, c *harness.Cluster, pod string) {
	_, err := c.Kubectl(t, "exec", pod, "--", "/echo", "get", "https://kubernetes.default/api")
	// The image does not contain the cluster's authority, so the TLS client refuses the certificate of the API server.
	// This proves that the Service leads to the API server.
	if err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("the API Service from a pod: want an error about an unknown certificate authority, got %v", err)
	}
}

// checkEncryption reads a Secret's record in etcd.
func checkEncryption(t *testing.T, c *harness.Cluster) {
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "hidden"},
		StringData: map[string]string{"word": "abracadabra"},
	}
	if err := c.Client.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	record := inMachine(t, c.ControlPlaneMachine(t).Name,
		"/opt/capstan/kubernetes/"+harness.KubernetesVersion+"/etcdctl", "--endpoints=https://127.0.0.1:2379",
		"--cacert=/etc/kubernetes/pki/etcd/ca.crt", "--cert=/etc/kubernetes/pki/apiserver-etcd-client.crt", "--key=/etc/kubernetes/pki/apiserver-etcd-client.key",
		"get", "/registry/secrets/default/hidden", "--print-value-only")
	if !strings.HasPrefix(record, "k8s:enc:") || strings.Contains(record, "abracadabra") {
		t.Errorf("the record of the Secret is not encrypted: %.40q", record)
	}
}

func nothingLeft(t *testing.T, before harness.Holdings) {
	t.Helper()
	harness.Eventually(t, "the removal of all objects", 30*time.Second, func(context.Context) error {
		now, err := harness.Look()
		if err != nil {
			return err
		}
		if left := now.Minus(before); len(left) > 0 {
			return fmt.Errorf("remaining: %s", strings.Join(left, ", "))
		}
		return nil
	})
}

func gone(ctx context.Context, obj client.Object) error {
	err := plane.Client.Get(ctx, client.ObjectKeyFromObject(obj), obj)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s still exists", obj.GetName())
}
