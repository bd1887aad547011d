//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/test/e2e/harness"
)

// The cluster has a fixed network, so that etcd can listen on an address that its machines reach: the host's address in
// it.
const (
	externalNetwork = "10.231.0.0/24"
	externalHost    = "10.231.0.1"
	externalPort    = "12379"
)

// TestExternalEtcd_CP15 creates a cluster with an etcd of the user. It runs outside of the machines and requires client
// certificates. A condition reports a missing or broken Secret, and no Machine is created until the user corrects it. The cluster is
// created with manifests, one of which the API server refuses.
func TestExternalEtcd_CP15(t *testing.T) {
	dir := t.TempDir()
	etcdCertificates(t, dir)
	template := plane.Must(t, "create", "cluster", "ext", "--dry-run", "--workers", "0")
	for from, to := range map[string]string{
		"kind: CapstanCluster\nmetadata:": "kind: CapstanCluster\nspec:\n  network:\n    machineCIDR: " + externalNetwork + "\nmetadata:",
		"  replicas: 1\n  version: ":      fmt.Sprintf("  config: {cluster: {etcd: {external: {endpoints: [\"https://%s\"]}}}}\n%s  replicas: 1\n  version: ", net.JoinHostPort(externalHost, externalPort), firstManifests),
	} {
		if strings.Count(template, from) != 1 {
			t.Fatalf("the template has not one %q:\n%s", from, template)
		}
		template = strings.Replace(template, from, to, 1)
	}
	file := filepath.Join(dir, "template.yaml")
	if err := os.WriteFile(file, []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &subject{Cluster: &harness.Cluster{Plane: plane, Namespace: "default", Name: "ext"}, made: map[string]bool{}}
	t.Cleanup(func() { s.Delete(t) })
	plane.Must(t, "create", "cluster", "ext", "--from", file, "--workers", "0", "--wait=false")

	s.wantMessage(t, "the Secret ext-etcd does not exist: an external etcd needs it")
	s.wantMessage(t, "the Secret ext-apiserver-etcd-client does not exist: an external etcd needs it")
	s.keep(t, secret.EtcdCA, file, "") // not a certificate
	s.keep(t, secret.APIServerEtcdClient, filepath.Join(dir, "client.crt"), filepath.Join(dir, "server.key"))
	s.wantMessage(t, "the Secret ext-apiserver-etcd-client is broken")
	if n := len(s.mustMachines(t)); n > 0 {
		t.Errorf("%d Machines were created", n)
	}
	s.keep(t, secret.EtcdCA, filepath.Join(dir, "ca.crt"), "")
	s.keep(t, secret.APIServerEtcdClient, filepath.Join(dir, "client.crt"), filepath.Join(dir, "client.key"))

	startEtcd(t, dir)
	s.wantServing(t, 1)
	s.Connect(t)
	checkFirstManifests(t, s)
	s.MustKubectl(t, "create", "configmap", "kept")
	if out, err := etcdctl(t, dir, true, "get", "--keys-only", "/registry/configmaps/default/kept"); err != nil || !strings.Contains(out, "kept") {
		t.Errorf("etcd does not contain the written object: %q, %v", out, err)
	}
	if out, err := etcdctl(t, dir, false, "get", "--keys-only", "/registry/configmaps/default/kept"); err == nil {
		t.Errorf("etcd accepts clients without a certificate: %q", out)
	}
	// Without members on the machines, any number of machines is valid.
	s.scale(t, 2)
	s.wantServing(t, 2)
	for name := range s.mustMachines(t) {
		if found := plane.Find(t, name, "etcd"); len(found) > 0 {
			t.Errorf("%s runs etcd", name)
		}
	}
	s.scale(t, 1)
	s.wantServing(t, 1)
	s.MustKubectl(t, "get", "configmap", "kept")
}

// firstManifests are in the template of the cluster. The API server refuses the second one, and the third one is valid.
const firstManifests = `  manifests:
  - name: team
    content: "{apiVersion: v1, kind: Namespace, metadata: {name: team}}"
  - name: settings
    content: "{apiVersion: v1, kind: ConfigMap, metadata: {name: Not_a_Name, namespace: team}}"
  - name: later
    content: "{apiVersion: v1, kind: ServiceAccount, metadata: {name: later, namespace: team}}"
`

// checkFirstManifests: a new cluster has the objects of its manifests up to the refused one. The condition names that one, and the
// rest follows when it is corrected.
func checkFirstManifests(t *testing.T, s *subject) {
	t.Helper()
	says := func(status metav1.ConditionStatus, words ...string) {
		t.Helper()
		harness.Eventually(t, "ManifestsApplied "+string(status), limit, func(ctx context.Context) error {
			cp, err := s.controlPlane(ctx)
			if err != nil {
				return err
			}
			c := conditions.Get(cp, controlplanev1.ManifestsAppliedCondition)
			if c == nil || c.Status != status || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(c.Message, w) }) {
				return fmt.Errorf("the condition is %+v, want the words %q", c, words)
			}
			return nil
		})
	}
	says(metav1.ConditionFalse, "manifest settings: ", "ConfigMap", "Not_a_Name", "RFC 1123")
	s.MustKubectl(t, "get", "namespace", "team")
	if _, err := s.Kubectl(t, "get", "serviceaccount", "later", "--namespace=team"); err == nil {
		t.Error("a manifest was applied before an earlier one")
	}
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Manifests[1].Content = strings.Replace(cp.Spec.Manifests[1].Content, "Not_a_Name", "settings", 1)
	})
	says(metav1.ConditionTrue)
	s.MustKubectl(t, "get", "--namespace=team", "configmap/settings", "serviceaccount/later")
}

// etcdCertificates creates the certificates of etcd and of its client below dir.
func etcdCertificates(t *testing.T, dir string) {
	t.Helper()
	if err := certfiles.EnsureAuthority(dir, "ca", "etcd", time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, leaf := range []certfiles.Leaf{
		{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: "etcd", IPs: []net.IP{net.ParseIP(externalHost)}, Usages: pki.Both}},
		{Name: "client", CA: "ca", Leaf: pki.Leaf{CommonName: "apiserver", Usages: pki.Client}},
	} {
		if _, err := leaf.Ensure(dir, 24*time.Hour, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}

// keep stores a certificate, and its key if there is one, in a Secret of the cluster.
func (s *subject) keep(t *testing.T, purpose secret.Purpose, certFile, keyFile string) {
	t.Helper()
	data := map[string][]byte{}
	for name, file := range map[string]string{secret.TLSCrtDataName: certFile, secret.TLSKeyDataName: keyFile} {
		if file == "" {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		data[name] = content
	}
	wanted := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: secret.Name(s.Name, purpose), Labels: map[string]string{clusterv1.ClusterNameLabel: s.Name}},
		Type:       clusterv1.ClusterSecretType, Data: data,
	}
	t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(t.Context()), wanted) })
	if err := plane.Client.Delete(t.Context(), wanted.DeepCopy()); err != nil && !strings.Contains(err.Error(), "not found") {
		t.Fatal(err)
	}
	if err := plane.Client.Create(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
}

// wantMessage waits until the condition CertificatesAvailable has the message.
func (s *subject) wantMessage(t *testing.T, words string) {
	t.Helper()
	harness.Eventually(t, "CertificatesAvailable: "+words, limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if c := conditions.Get(cp, controlplanev1.CertificatesAvailableCondition); c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, words) {
			return errors.New(explain(cp, nil))
		}
		return nil
	})
}

// wantServing waits until n Machines are ready and the control plane is available.
func (s *subject) wantServing(t *testing.T, n int32) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d machines that serve", n), limit, func(ctx context.Context) error {
		machines, err := s.machines(ctx)
		if err != nil {
			return err
		}
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if len(machines) != int(n) || cp.Status.ReadyReplicas == nil || *cp.Status.ReadyReplicas != n || !conditions.IsTrue(cp, controlplanev1.AvailableCondition) {
			return errors.New(explain(cp, machines))
		}
		return nil
	})
}

// startEtcd starts etcd as soon as the host has its address in the cluster's network. etcd ends with the test.
func startEtcd(t *testing.T, dir string) {
	t.Helper()
	harness.Eventually(t, "the host's address in "+externalNetwork, limit, func(context.Context) error {
		listener, err := net.Listen("tcp", net.JoinHostPort(externalHost, externalPort))
		if err != nil {
			return err
		}
		return listener.Close()
	})
	client, peer := "https://"+net.JoinHostPort(externalHost, externalPort), "http://127.0.0.1:12380"
	cmd := exec.Command(filepath.Join(harness.Bin(), "kubernetes", harness.KubernetesVersion, "etcd"), "--name=external", "--data-dir="+filepath.Join(dir, "data"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=external="+peer,
		"--cert-file="+filepath.Join(dir, "server.crt"), "--key-file="+filepath.Join(dir, "server.key"), "--client-cert-auth", "--trusted-ca-file="+filepath.Join(dir, "ca.crt"))
	log, err := os.Create(filepath.Join(dir, "etcd.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			out, _ := os.ReadFile(filepath.Join(dir, "etcd.log"))
			t.Logf("etcd: %s", out[max(0, len(out)-4096):])
		}
	})
}

func etcdctl(t *testing.T, dir string, withCertificate bool, args ...string) (string, error) {
	t.Helper()
	all := []string{"--endpoints=https://" + net.JoinHostPort(externalHost, externalPort), "--cacert=" + filepath.Join(dir, "ca.crt"), "--command-timeout=5s"}
	if withCertificate {
		all = append(all, "--cert="+filepath.Join(dir, "client.crt"), "--key="+filepath.Join(dir, "client.key"))
	}
	return harness.Command(t.Context(), nil, filepath.Join(harness.Bin(), "kubernetes", harness.KubernetesVersion, "etcdctl"), append(all, args...)...)
}
