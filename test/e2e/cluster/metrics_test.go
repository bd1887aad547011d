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

	"capstan.dev/capstan/templates"
	"capstan.dev/capstan/test/e2e/harness"
)

const metricsPatience = 3 * time.Minute

// testMetrics: a cluster with metrics-server answers kubectl top, and an autoscaler follows the usage of pods. API servers refuse
// a server that another authority has certified. TestLife of test/e2e/controlplane has the metrics of three control plane machines, and
// loses some of them.
func testMetrics(t *testing.T, c *harness.Cluster) {
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
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, c) }) {
			t.FailNow()
		}
	}
	c.MustKubectl(t, "delete", "hpa", "echo") // The following parts decide about the pods.
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

// tops returns nil when there are values of all nodes and of the pods.
func tops(t *testing.T, c *harness.Cluster) error {
	for what, want := range map[string]int{"nodes": 3, "pods": 2} {
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
	harness.Eventually(t, "values of nodes and pods", metricsPatience, func(context.Context) error { return tops(t, c) })
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
