//go:build e2e && operator

package clusterctl

import (
	"bytes"
	"compress/gzip"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// coreProvider lets the operator install Cluster API core. The Secret has the variables of all providers.
const coreProvider = `
apiVersion: v1
kind: Secret
metadata: {name: variables, namespace: capi-system}
stringData: {CLUSTER_TOPOLOGY: "true", CAPSTAN_MACHINE_NETWORK_POOL: 10.217.0.0/16}
---
apiVersion: operator.cluster.x-k8s.io/v1alpha2
kind: CoreProvider
metadata: {name: cluster-api, namespace: capi-system}
spec:
  version: VERSION
  configSecret: {name: variables, namespace: capi-system}
  fetchConfig: {selector: {matchLabels: {provider.cluster.x-k8s.io/name: cluster-api}}}
`

// operatorKinds are the kinds of the release's objects for the operator, with their namespaces.
var operatorKinds = [][2]string{
	{"infrastructureprovider", "capstan-infrastructure-system"}, {"controlplaneprovider", "capstan-control-plane-system"},
	{"bootstrapprovider", "capstan-bootstrap-system"}, {"ipamprovider", "capstan-ipam-system"},
}

// TestOperator: the manager of Cluster API Operator installs Cluster API core and the four providers of the release on a cluster of
// Capstan, from ConfigMaps. The providers become ready and create a cluster. A removed provider keeps its kinds.
func TestOperator(t *testing.T) {
	t.Setenv("CAPSTAN_WORKER_MEMORY", "2Gi")
	management := plane.CreateCluster(t, "default", "management", "--workers", "1")
	kubeconfig := management.Kubeconfig
	signer(t, kubeconfig, management.Client)
	loadImages(t, management, version)
	mustKubectl(t, kubeconfig, "", "apply", "--server-side", "-f", filepath.Join(operatorModule(t), "config", "crd", "bases"))
	mustKubectl(t, kubeconfig, "", "wait", "--for=condition=Established", "--timeout=1m", "crd/coreproviders.operator.cluster.x-k8s.io", "crd/ipamproviders.operator.cluster.x-k8s.io")
	applyProviders(t, management)
	startOperator(t, kubeconfig)

	mustKubectl(t, kubeconfig, "", "-n", "capi-system", "wait", "--for=condition=Ready", "--timeout=4m", "coreprovider/cluster-api")
	for _, kind := range operatorKinds {
		for _, condition := range []string{"ProviderInstalled", "Ready"} {
			mustKubectl(t, kubeconfig, "", "-n", kind[1], "wait", "--for=condition="+condition, "--timeout=4m", kind[0]+"/capstan")
		}
		if got := mustKubectl(t, kubeconfig, "", "-n", kind[1], "get", kind[0], "capstan", "-o", "jsonpath={.status.installedVersion} {.status.contract}"); got != version+" v1beta2" {
			t.Errorf("%s: installed %q", kind[0], got)
		}
	}
	wantDeployments(t, kubeconfig)
	createTenant(t, management)

	mustKubectl(t, kubeconfig, "", "-n", "capstan-ipam-system", "delete", "ipamprovider", "capstan", "--timeout=2m")
	if left := mustKubectl(t, kubeconfig, "", "-n", "capstan-ipam-system", "get", "deployments", "-o", "name"); left != "" {
		t.Errorf("left of the removed provider: %s", left)
	}
	mustKubectl(t, kubeconfig, "", "get", "crd", "capstanippools.ipam.capstan.dev")
}

// operatorModule returns the folder of the operator's module.
func operatorModule(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-C", filepath.Join(testenv.Root(), "tools", "cluster-api-operator"), "-m", "-f", "{{.Dir}}", "sigs.k8s.io/cluster-api-operator").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// applyProviders creates the objects that the operator reads: core in a compressed ConfigMap, and the file of the release.
func applyProviders(t *testing.T, management *harness.Cluster) {
	t.Helper()
	kubeconfig := management.Kubeconfig
	folders, err := filepath.Glob(filepath.Join(dist, "repository", "cluster-api", "*"))
	if err != nil || len(folders) != 1 {
		t.Fatalf("core: %v, %v", folders, err)
	}
	components, err := os.ReadFile(filepath.Join(folders[0], "core-components.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	metadata, err := os.ReadFile(filepath.Join(folders[0], "metadata.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var compressed bytes.Buffer
	writer := gzip.NewWriter(&compressed)
	if _, err := writer.Write(components); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, kubeconfig, "", "create", "namespace", "capi-system")
	if err := management.Client.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "capi-system", Name: filepath.Base(folders[0]),
			Labels:      map[string]string{"provider.cluster.x-k8s.io/name": "cluster-api"},
			Annotations: map[string]string{"provider.cluster.x-k8s.io/compressed": "true"},
		},
		Data: map[string]string{"metadata": string(metadata)}, BinaryData: map[string][]byte{"components": compressed.Bytes()},
	}); err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, kubeconfig, strings.ReplaceAll(coreProvider, "VERSION", filepath.Base(folders[0])), "apply", "-f", "-")
	mustKubectl(t, kubeconfig, "", "apply", "--server-side", "-f", filepath.Join(dist, "assets", version, "operator-providers.yaml"))
	mustKubectl(t, kubeconfig, "", "-n", "capstan-infrastructure-system", "patch", "infrastructureprovider", "capstan", "--type", "merge",
		"-p", `{"spec": {"configSecret": {"name": "variables", "namespace": "capi-system"}}}`)
}

// startOperator runs the operator's manager on this box until the end of the test. Its webhooks only set defaults and are not
// registered.
func startOperator(t *testing.T, kubeconfig string) {
	t.Helper()
	dir := t.TempDir()
	crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"tls.crt": crt, "tls.key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ports.Address(t))
	cmd := exec.Command(filepath.Join(harness.Bin(), "cluster-api-operator", "cmd"), "--kubeconfig="+kubeconfig, "--webhook-cert-dir="+dir, "--webhook-port="+port,
		"--health-addr="+ports.Address(t), "--diagnostics-address="+ports.Address(t), "--profiler-address=")
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if t.Failed() {
			out, _ := exec.Command("tail", "-n", "40", log.Name()).Output()
			t.Logf("the operator:\n%s", out)
		}
	})
}

// wantDeployments: the managers of the release run with the variables of the Secret.
func wantDeployments(t *testing.T, kubeconfig string) {
	t.Helper()
	images := strings.Fields(mustKubectl(t, kubeconfig, "", "get", "deployments", "-A", "-o", "jsonpath={.items[*].spec.template.spec.containers[0].image}"))
	if n := len(slices.DeleteFunc(images, func(image string) bool { return !strings.HasSuffix(image, "/manager:"+version) })); n != len(operatorKinds) {
		t.Errorf("%d Deployments run manager:%s, want %d", n, version, len(operatorKinds))
	}
	const want = "--machine-network-pool=10.217.0.0/16"
	if args := mustKubectl(t, kubeconfig, "", "-n", "capstan-infrastructure-system", "get", "deployments", "-o", "jsonpath={.items[*].spec.template.spec.containers[0].args}"); !strings.Contains(args, want) {
		t.Errorf("the variable of the Secret did not reach the manager: want %s in %s", want, args)
	}
}

// createTenant creates a cluster with the installed providers, and deletes it.
func createTenant(t *testing.T, management *harness.Cluster) {
	t.Helper()
	kubeconfig := management.Kubeconfig
	addHost(t, management)
	tenant := addTenant(t, kubeconfig, "--infrastructure", "capstan:"+version)
	ready(t, tenant, 1)
	deleteTenant(t, kubeconfig, tenant)
	mustKubectl(t, kubeconfig, "", "delete", "capstanhost", "rack", "--timeout=3m")
}
