//go:build e2e

package cluster

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/test/e2e/harness"
)

// TestClustersWithTheSameName creates two clusters with the same name in two namespaces. They have the same Pod and
// Service networks, on a host without bridge-nf-call-iptables. Both work: one with a cloud controller manager (CP-24), and the other
// one with machines of images. Neither reaches the machines of the other.
func TestClustersWithTheSameName(t *testing.T) {
	withoutBridgeNetfilter(t)
	t.Cleanup(func() {
		if left := blockVolumes(t); len(left) > 0 {
			t.Errorf("loop devices of the host have %v after the clusters are gone", left)
		}
	})
	left := createTwin(t, "left", "--workers", "1", "--from", externalTemplate(t))
	right := createTwin(t, "right", "--workers", "0")
	t.Run("a cloud controller manager", func(t *testing.T) { runCloudControllerManager(t, left) })
	t.Run("images", func(t *testing.T) { runImages(t, right) })
	t.Run("the machines of one cluster do not reach those of the other", func(t *testing.T) {
		from, own, foreign := left.Worker(t).Name, left.ControlPlaneMachine(t), right.ControlPlaneMachine(t)
		harness.Eventually(t, "the API server of the own cluster", time.Minute, func(context.Context) error {
			if code := statusOf(t, from, own.Spec.Network.Addresses[0].Address); code != "200" {
				return fmt.Errorf("the answer is %q", code)
			}
			return nil
		})
		if code := statusOf(t, from, foreign.Spec.Network.Addresses[0].Address); code != "000" {
			t.Errorf("the API server of the other cluster answers %q", code)
		}
	})
	t.Run("one is deleted, the other one continues", func(t *testing.T) {
		left.Delete(t)
		harness.Eventually(t, "the Nodes of the other one", time.Minute, func(ctx context.Context) error { return right.NodesReady(ctx, 4) })
	})
}

// createTwin creates a cluster in a namespace.
func createTwin(t *testing.T, namespace string, args ...string) *harness.Cluster {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := plane.Client.Create(t.Context(), ns); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	return plane.CreateCluster(t, namespace, "twin", args...)
}

// statusOf sends a request to the API server of a machine from another machine. It returns 000 if there is no
// connection.
func statusOf(t *testing.T, machine, address string) string {
	t.Helper()
	// Each machine sees /usr of the host, which always contains bash, but possibly not curl.
	script := fmt.Sprintf("if timeout 3 bash -c 'exec 3<>/dev/tcp/%s/6443' 2>/dev/null; then echo 200; else echo 000; fi", address)
	return strings.TrimSpace(inMachine(t, machine, "bash", "-c", script))
}

// withoutBridgeNetfilter disables bridge-nf-call-iptables for a test, if the kernel has it.
func withoutBridgeNetfilter(t *testing.T) {
	t.Helper()
	for _, path := range []string{"/proc/sys/net/bridge/bridge-nf-call-iptables", "/proc/sys/net/bridge/bridge-nf-call-ip6tables"} {
		old, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("0"), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(path, old, 0o644); err != nil {
				t.Error(err)
			}
		})
	}
}
