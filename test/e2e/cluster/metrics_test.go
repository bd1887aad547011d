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

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

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

// tops returns nil when there are values of all nodes and of the pods. It runs kubectl only then, because its start is slow.
func tops(ctx context.Context, t *testing.T, c *harness.Cluster) error {
	for what, want := range map[string]int{"nodes": 3, "pods": 2} {
		have, err := c.Metrics(ctx, what)
		if err != nil {
			return err
		}
		if have < want {
			return fmt.Errorf("there are metrics of %d %s, want %d", have, what, want)
		}
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
	harness.Eventually(t, "values of nodes and pods", metricsPatience, func(ctx context.Context) error { return tops(ctx, t, c) })
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
	key := client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "echo"}
	for _, step := range []struct {
		target   string
		replicas int32
	}{{"100Ki", 3}, {"1Gi", 2}} {
		c.MustKubectl(t, "patch", "hpa", "echo", "--type=json", "-p",
			`[{"op":"replace","path":"/spec/metrics/0/resource/target/averageValue","value":"`+step.target+`"}]`)
		harness.Eventually(t, fmt.Sprint(step.replicas, " pods"), metricsPatience, func(ctx context.Context) error {
			echo, scaler := &appsv1.Deployment{}, &autoscalingv2.HorizontalPodAutoscaler{}
			if err := errors.Join(c.Client.Get(ctx, key, echo), c.Client.Get(ctx, key, scaler)); err != nil {
				return err
			}
			if *echo.Spec.Replicas != step.replicas {
				return fmt.Errorf("%d pods: %+v", *echo.Spec.Replicas, scaler.Status)
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
	harness.Eventually(t, "the API servers refuse the server", time.Minute, func(ctx context.Context) error {
		if have, err := c.Metrics(ctx, "nodes"); err == nil {
			return fmt.Errorf("there are still metrics of %d nodes", have)
		}
		return nil
	})
	patch(was)
	topWorks(t, c)
}
