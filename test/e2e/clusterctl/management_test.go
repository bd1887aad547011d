//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// The variables of each installation configure its managers. Other planes on this host use the default range for
// networks of machines.
var variables = []string{"CLUSTER_TOPOLOGY=true", "CAPSTAN_MACHINE_NETWORK_POOL=10.217.0.0/16"}

var providerFlags = []string{"--infrastructure", "capstan", "--control-plane", "capstan", "--bootstrap", "capstan", "--ipam", "capstan"}

// CTL-05, CTL-06, CTL-15, ALL-05: the real clusterctl installs Cluster API core and an earlier release of Capstan's
// providers as Deployments on a cluster of Capstan. The providers connect to a host over TCP and create a cluster there.
// An upgrade to the current release does not change its machines.
func TestManagementCluster(t *testing.T) {
	t.Setenv("CAPSTAN_WORKER_MEMORY", "2Gi")
	management := plane.CreateCluster(t, "default", "management", "--workers", "1")
	t.Setenv("CAPSTAN_WORKER_MEMORY", "768Mi")
	kubeconfig := management.Kubeconfig
	signer(t, kubeconfig, management.Client)
	installEarlier(t, management)

	addHost(t, management)
	tenant := addTenant(t, kubeconfig, "--infrastructure", "capstan", "--worker-machine-count", "1")
	ready(t, tenant, 2)

	t.Run("a namespace that the host does not allow gets no machine", func(t *testing.T) { checkTenancy(t, management) })
	t.Run("an upgrade changes no machine", func(t *testing.T) { upgradedByClusterctl(t, management, tenant) })
	t.Run("deleted", func(t *testing.T) {
		deleteTenant(t, kubeconfig, tenant)
		mustKubectl(t, kubeconfig, "", "delete", "capstanhost", "rack", "--timeout=3m")
		// Delete one provider at a time: clusterctl lists kinds that it has found before, and the kinds of the previous
		// provider may already be deleted.
		for i := 0; i < len(providerFlags); i += 2 {
			mustClusterctl(t, nil, "delete", "--kubeconfig", kubeconfig, "--include-crd", providerFlags[i], providerFlags[i+1])
			group := map[string]string{"--control-plane": "controlplane"}[providerFlags[i]]
			if group == "" {
				group = strings.TrimPrefix(providerFlags[i], "--")
			}
			harness.Eventually(t, "no kinds of "+group, time.Minute, func(context.Context) error {
				if left := mustKubectl(t, kubeconfig, "", "get", "crd", "-o", "name"); strings.Contains(left, "."+group+".capstan.dev") {
					return fmt.Errorf("remaining: %s", left)
				}
				return nil
			})
		}
	})
}

// loadImages builds the images of a release and loads them into the cluster's machines.
func loadImages(t *testing.T, c *harness.Cluster, version string) {
	t.Helper()
	if err := release("images", version); err != nil {
		t.Fatal(err)
	}
	archives, err := filepath.Glob(filepath.Join(dist, "assets", version, "*-image.tar"))
	if err != nil || len(archives) != 2 {
		t.Fatalf("%v, %v", archives, err)
	}
	for _, archive := range archives {
		c.Plane.Must(t, "load", "image", archive, "--cluster", c.Name, "--namespace", c.Namespace)
	}
}

// addHost starts another capstand on this host for the management cluster.
func addHost(t *testing.T, management *harness.Cluster) {
	t.Helper()
	// The gateway of the machines' network is the host itself.
	cluster := &infrav1.CapstanCluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: management.Namespace, Name: management.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, management.Kubeconfig, startHost(t, "rack", cluster.Spec.ControlPlaneEndpoint.Host, "tenants"), "apply", "-f", "-")
	mustKubectl(t, management.Kubeconfig, "", "wait", "--for=condition=Ready", "capstanhost/rack", "--timeout=120s")
}

// startHost starts another capstand on this host until the end of the test. It serves over TCP for a namespace.
// startHost returns the manifests of its CapstanHost and of the Secret with its credentials.
func startHost(t *testing.T, name, ip, namespace string) string {
	t.Helper()
	root, err := os.MkdirTemp("", "cap")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort(ip, "7443")
	manifests, err := plane.Capstan(t.Context(), "host", "credentials", name, "--address", address, "--dir", filepath.Join(root, "tls"), "--allow-namespace", namespace)
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(root, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(harness.Bin(), "capstand"), "--root", root, "--assets", harness.Bin(), "--name", name, "--listen", address)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("tail", "-n", "30", log.Name()).Output()
			t.Logf("capstand of %s:\n%s", name, out)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		_ = os.RemoveAll(root)
	})
	return manifests
}

// addTenant creates the cluster of a tenant with the installed providers. args are those of clusterctl generate cluster.
func addTenant(t *testing.T, kubeconfig string, args ...string) *harness.Cluster {
	t.Helper()
	tenant := &harness.Cluster{Plane: plane, Namespace: "tenants", Name: "tenant"}
	mustKubectl(t, kubeconfig, "", "create", "namespace", tenant.Namespace)
	generate := append([]string{"generate", "cluster", tenant.Name, "--kubeconfig", kubeconfig,
		"--target-namespace", tenant.Namespace, "--kubernetes-version", harness.KubernetesVersion}, args...)
	mustKubectl(t, kubeconfig, mustClusterctl(t, []string{"CAPSTAN_CONTROL_PLANE_MEMORY=1536Mi"}, generate...), "apply", "-f", "-")
	t.Cleanup(func() { deleteTenant(t, kubeconfig, tenant) })
	connectTenant(t, kubeconfig, tenant)
	return tenant
}

// connectTenant connects to a cluster of the management cluster.
func connectTenant(t *testing.T, kubeconfig string, c *harness.Cluster) {
	t.Helper()
	var data string
	harness.Eventually(t, "the kubeconfig of "+c.Name, 2*time.Minute, func(context.Context) (err error) {
		data, err = clusterctl(t, nil, "get", "kubeconfig", c.Name, "--namespace", c.Namespace, "--kubeconfig", kubeconfig)
		return err
	})
	c.ConnectWith(t, data)
}

func deleteTenant(t *testing.T, kubeconfig string, c *harness.Cluster) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if _, err := harness.Command(ctx, nil, harness.Kubectl(), "--kubeconfig", kubeconfig, "-n", c.Namespace, "delete", "cluster", c.Name, "--ignore-not-found", "--timeout=5m"); err != nil {
		t.Error(err)
	}
}

// checkTenancy creates a cluster in a namespace that the host does not admit (ALL-18).
func checkTenancy(t *testing.T, management *harness.Cluster) {
	if err := management.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "strangers"}}); err != nil {
		t.Fatal(err)
	}
	kubeconfig := management.Kubeconfig
	mustKubectl(t, kubeconfig, mustClusterctl(t, nil, "generate", "cluster", "stranger", "--kubeconfig", kubeconfig,
		"--infrastructure", "capstan", "--target-namespace", "strangers", "--kubernetes-version", harness.KubernetesVersion), "apply", "-f", "-")
	harness.Eventually(t, "the cause in a condition", time.Minute, func(ctx context.Context) error {
		c := &infrav1.CapstanCluster{}
		if err := management.Client.Get(ctx, client.ObjectKey{Namespace: "strangers", Name: "stranger"}, c); err != nil {
			return err
		}
		if message := conditions.GetMessage(c, infrav1.HostsAvailableCondition); !strings.Contains(message, "admits namespace strangers") {
			return fmt.Errorf("conditions: %v", c.Status.Conditions)
		}
		return nil
	})
	mustKubectl(t, kubeconfig, "", "-n", "strangers", "delete", "cluster", "stranger", "--timeout=3m")
}

// processesOf returns the process ids of capstan-init for the machines of clusters.
func processesOf(t *testing.T, clusters ...*harness.Cluster) map[string]int {
	t.Helper()
	all, err := harness.Processes()
	if err != nil {
		t.Fatal(err)
	}
	pids := map[string]int{}
	for _, p := range all {
		mine := slices.ContainsFunc(clusters, func(c *harness.Cluster) bool { return strings.HasPrefix(p.Machine, c.Name+"-") })
		if first, ok := pids[p.Machine]; mine && p.Name == "capstan-init" && (!ok || p.PID < first) {
			pids[p.Machine] = p.PID
		}
	}
	if len(pids) < len(clusters) {
		t.Fatalf("machines: %v", pids)
	}
	return pids
}
