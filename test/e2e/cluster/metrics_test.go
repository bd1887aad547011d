//go:build e2e

package cluster

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/templates"
	"capstan.dev/capstan/test/e2e/harness"
)

const metricsPatience = 3 * time.Minute

// TestMetrics: a cluster with metrics-server answers kubectl top, and an autoscaler follows the usage of pods. API servers refuse
// a server that another authority has certified. The metrics survive the growth of the control plane and the removal of a machine.
func TestMetrics(t *testing.T) {
	c := plane.CreateCluster(t, "default", "metrics", "--workers", "2", "--from", metricsTemplate(t))
	plane.Must(t, "load", "image", filepath.Join(harness.Bin(), "images", "echo.tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	c.Apply(t, harness.Echo("")+autoscaler)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *harness.Cluster)
	}{
		{"kubectl top", topWorks},
		{"rights", metricsNeedRights},
		{"an autoscaler", autoscales},
		{"another authority", otherAuthority},
		{"a removed control plane machine", metricsSurvive},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, c) }) {
			t.FailNow()
		}
	}
}

const autoscaler = `---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: echo}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: echo}
  minReplicas: 2
  maxReplicas: 3
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
  metrics: [{type: Resource, resource: {name: memory, target: {type: AverageValue, averageValue: 1Gi}}}]
`

// metricsTemplate writes the default template with metrics-server.
func metricsTemplate(t *testing.T) string {
	t.Helper()
	template, err := templates.FS.ReadFile("cluster-template.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(template), "  machineTemplate:\n", "  config: {cluster: {resourceMetrics: MetricsServer}}\n  machineTemplate:\n", 1)
	file := filepath.Join(t.TempDir(), "template.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// tops returns nil when there are values of n nodes and of the pods.
func tops(t *testing.T, c *harness.Cluster, n int) error {
	for what, want := range map[string]int{"nodes": n, "pods": 2} {
		out, err := c.Kubectl(t, "top", what, "--no-headers")
		if err != nil {
			return err
		}
		if lines := strings.Split(strings.TrimSpace(out), "\n"); len(lines) < want || strings.Contains(out, "unknown") {
			return fmt.Errorf("top %s has %q, want %d values", what, out, want)
		}
	}
	return nil
}

func topWorks(t *testing.T, c *harness.Cluster) {
	harness.Eventually(t, "values of nodes and pods", metricsPatience, func(context.Context) error { return tops(t, c, 3) })
}

func metricsNeedRights(t *testing.T, c *harness.Cluster) {
	for _, resource := range []string{"pods.metrics.k8s.io", "nodes.metrics.k8s.io"} {
		if out, err := c.Kubectl(t, "get", resource, "--as", "system:serviceaccount:default:default"); err == nil || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("a ServiceAccount without rights reads %s: %s, %v", resource, out, err)
		}
	}
}

// autoscales waits until the autoscaler has added a pod, because the pods use more than its target, and has removed it, because
// they use less than another target.
func autoscales(t *testing.T, c *harness.Cluster) {
	for _, step := range []struct{ target, replicas string }{{"100Ki", "3"}, {"1Gi", "2"}} {
		c.MustKubectl(t, "patch", "hpa", "echo", "--type=json", "-p",
			`[{"op":"replace","path":"/spec/metrics/0/resource/target/averageValue","value":"`+step.target+`"}]`)
		harness.Eventually(t, step.replicas+" pods", metricsPatience, func(context.Context) error {
			if replicas := c.MustKubectl(t, "get", "deployment", "echo", "-o", "jsonpath={.spec.replicas}"); replicas != step.replicas {
				return fmt.Errorf("%s pods: %s", replicas, c.MustKubectl(t, "get", "hpa", "echo", "-o", "jsonpath={.status}"))
			}
			return nil
		})
	}
}

const metricsAPIService = "apiservice/v1beta1.metrics.k8s.io"

// otherAuthority registers the API with an authority that has not certified the server: API servers do not use it.
func otherAuthority(t *testing.T, c *harness.Cluster) {
	was := c.MustKubectl(t, "get", metricsAPIService, "-o", "jsonpath={.spec.caBundle}")
	front := c.MustKubectl(t, "-n", "kube-system", "get", "configmap", "extension-apiserver-authentication", "-o", `jsonpath={.data.requestheader-client-ca-file}`)
	patch := func(bundle string) {
		t.Helper()
		c.MustKubectl(t, "patch", metricsAPIService, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"caBundle":%q}}`, bundle))
	}
	patch(base64.StdEncoding.EncodeToString([]byte(front)))
	harness.Eventually(t, "the API servers refuse the server", time.Minute, func(context.Context) error {
		if _, err := c.Kubectl(t, "top", "nodes"); err == nil {
			return errors.New("kubectl top still works")
		}
		return nil
	})
	patch(was)
	topWorks(t, c)
}

// metricsSurvive removes the first of three control plane machines.
func metricsSurvive(t *testing.T, c *harness.Cluster) {
	var owner string
	for _, reference := range c.ControlPlaneMachine(t).OwnerReferences {
		if reference.Kind == "Machine" {
			owner = reference.Name
		}
	}
	plane.Must(t, "scale", "cluster", c.Name, "--namespace", c.Namespace, "--control-plane-machines", "3")
	harness.Eventually(t, "five Nodes", 2*metricsPatience, func(ctx context.Context) error { return c.NodesReady(ctx, 5) })
	harness.Eventually(t, "three endpoints", metricsPatience, func(context.Context) error {
		ready := c.MustKubectl(t, "-n", "kube-system", "get", "endpointslices", "-l", "kubernetes.io/service-name=metrics-server", "-o", "jsonpath={.items[*].endpoints[0].conditions.ready}")
		if ready != "true true true" {
			return fmt.Errorf("ready: %q", ready)
		}
		return nil
	})
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: owner}}
	if err := plane.Client.Delete(t.Context(), machine); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "values without the removed machine", 2*metricsPatience, func(context.Context) error { return tops(t, c, 4) })
}
