//go:build e2e && helm

package clusterctl

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// providerNamespaces are the namespaces of the managers.
var providerNamespaces = []string{"capstan-infrastructure-system", "capstan-control-plane-system", "capstan-bootstrap-system", "capstan-ipam-system"}

// TestHelm: the program helm installs the chart of the release on a cluster of Capstan, refuses wrong values, upgrades the installation
// and removes it. Clusters outlive the upgrade and the removal. A second installation continues with them.
func TestHelm(t *testing.T) {
	t.Setenv("CAPSTAN_WORKER_MEMORY", "2Gi")
	management := plane.CreateCluster(t, "default", "management", "--workers", "1")
	t.Setenv("CAPSTAN_WORKER_MEMORY", "768Mi")
	kubeconfig := management.Kubeconfig
	signer(t, kubeconfig, management.Client)
	loadImages(t, management, version)
	mustClusterctl(t, variables, "init", "--kubeconfig", kubeconfig, "--wait-providers", "--core", "cluster-api", "--bootstrap", "-", "--control-plane", "-")

	chart := filepath.Join(dist, "assets", version, "capstan-"+strings.TrimPrefix(version, "v")+".tgz")
	install := []string{"upgrade", "--install", "capstan", chart, "--wait", "--timeout", "5m", "--set", "machineNetworkPool=10.217.0.0/16"}
	if out, err := helm(t, kubeconfig, append(install, "--set", "replicas=none")...); err == nil || !strings.Contains(err.Error(), "replicas") {
		t.Errorf("a wrong value: %v\n%s", err, out)
	}
	mustHelm(t, kubeconfig, install...)
	addHost(t, management)
	tenant := addTenant(t, kubeconfig, "--infrastructure", "capstan:"+version)
	ready(t, tenant, 1)
	before := processesOf(t, tenant)

	mustHelm(t, kubeconfig, "upgrade", "capstan", chart, "--reset-then-reuse-values", "--set", "replicas=2", "--wait", "--timeout", "5m")
	for _, namespace := range providerNamespaces {
		if got := mustKubectl(t, kubeconfig, "", "-n", namespace, "get", "deployments", "-o", "jsonpath={.items[*].status.readyReplicas}"); got != "2" {
			t.Errorf("%s: %q managers are ready, want 2", namespace, got)
		}
	}
	const want = "--machine-network-pool=10.217.0.0/16"
	if args := mustKubectl(t, kubeconfig, "", "-n", "capstan-infrastructure-system", "get", "deployments", "-o", "jsonpath={.items[*].spec.template.spec.containers[0].args}"); !strings.Contains(args, want) {
		t.Errorf("the upgrade did not keep the values: want %s in %s", want, args)
	}

	mustHelm(t, kubeconfig, "uninstall", "capstan", "--wait", "--timeout", "5m")
	for _, namespace := range providerNamespaces {
		if left, err := kubectl(t, kubeconfig, "", "-n", namespace, "get", "deployments", "-o", "name"); err != nil || left != "" {
			t.Errorf("left in %s: %s, %v", namespace, left, err)
		}
	}
	mustKubectl(t, kubeconfig, "", "-n", tenant.Namespace, "get", "capstancluster,capstancontrolplane,capstanmachine", "-o", "name")
	mustHelm(t, kubeconfig, install...)
	mustKubectl(t, kubeconfig, "", "-n", tenant.Namespace, "wait", "--for=condition=Available", "--timeout=3m", "cluster/"+tenant.Name)
	if after := processesOf(t, tenant); !maps.Equal(before, after) {
		t.Errorf("the machines' processes were %v, are %v", before, after)
	}
	deleteTenant(t, kubeconfig, tenant)
	mustKubectl(t, kubeconfig, "", "delete", "capstanhost", "rack", "--timeout=3m")
}

// helm runs the real helm with an empty configuration.
func helm(t *testing.T, kubeconfig string, args ...string) (string, error) {
	t.Helper()
	home := t.TempDir()
	return harness.Command(t.Context(), []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home, "XDG_CACHE_HOME=" + home, "XDG_DATA_HOME=" + home, "KUBECONFIG=" + kubeconfig},
		filepath.Join(harness.Bin(), "tools", "helm"), args...)
}

func mustHelm(t *testing.T, kubeconfig string, args ...string) {
	t.Helper()
	if out, err := helm(t, kubeconfig, args...); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
