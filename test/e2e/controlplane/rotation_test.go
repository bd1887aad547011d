//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestRotation_CP15 replaces the certificate authority of a cluster (docs/certificates.md). Meanwhile a client that has
// only the old authority writes, and a pod sends requests to the API server with the credentials of its volume. The test
// kills the manager in each phase, and a member of etcd while machines get their new certificates. No connection fails
// for lack of trust. In the end no component trusts the old authority.
func TestRotation_CP15(t *testing.T) {
	s := &subject{Cluster: plane.CreateCluster(t, "default", "ca", "--workers", "1"), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	s.ready(t)
	before, old := s.Kubeconfig, s.authorities(t)
	if len(old) != 1 {
		t.Fatalf("the secret has %d certificate authorities", len(old))
	}
	s.startRequests(t)
	w := startWriter(t, s.withToken(t))

	start := time.Now()
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Certificates.RotateCAAfter = metav1.Now() })
	for _, phase := range phases {
		s.rotating(t, phase)
		t.Logf("%s after %.1f s", phase, time.Since(start).Seconds())
		if err := killManagers(); err != nil {
			t.Error(err)
		}
		if phase == controlplanev1.SigningNewReason {
			s.killMember(t)
		}
	}
	s.rotating(t, controlplanev1.NotRotatingReason)
	t.Logf("took %.1f s; longest gap between acknowledged writes %.1f s", time.Since(start).Seconds(), w.LongestGap().Seconds())

	now := s.authorities(t)
	if len(now) != 1 || now[0] == old[0] {
		t.Errorf("the certificate authorities are %v, want %v", now, old)
	}
	s.wantRefusedKubeconfig(t, before)
	s.Connect(t)
	s.etcd = memberClient(t, s.Kubeconfig)
	s.ready(t)
	s.wantTrust(t, start)
	s.nodesHave(t, now[0])
	harness.Eventually(t, "the API server reaches the worker's kubelet", limit, func(context.Context) error {
		_, err := s.Kubectl(t, "exec", "asks", "--", "/kube/kubectl", "version", "--client")
		return err
	})
	w.check(t)

	// The rotation is complete: the same value starts no further rotation.
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Remediation.MaxRetry = ptr.To[int32](5) })
	harness.Eventually(t, "the control plane is idle after a change of its spec", time.Minute, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if cp.Status.ObservedGeneration != cp.Generation || conditions.GetReason(cp, controlplanev1.CertificateAuthorityRotatingCondition) != controlplanev1.NotRotatingReason {
			return errors.New(explain(cp, nil))
		}
		return nil
	})
	if again := s.authorities(t); !slices.Equal(again, now) {
		t.Errorf("rotated again: %v", again)
	}
}

// ready waits for one control plane machine and one worker.
func (s *subject) ready(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "two Nodes", limit, func(ctx context.Context) error { return s.NodesReady(ctx, 2) })
}

func (s *subject) authorities(t *testing.T) []string {
	t.Helper()
	ca := &corev1.Secret{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: s.Namespace, Name: secret.Name(s.Name, secret.ClusterCA)}, ca); err != nil {
		t.Fatal(err)
	}
	out, err := nodeconfig.Fingerprints(ca.Data[secret.TLSCrtDataName])
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// phases of a rotation, in their order.
var phases = []string{controlplanev1.TrustingNewReason, controlplanev1.SigningNewReason, controlplanev1.DroppingOldReason}

// rotating waits for a phase of the rotation, or for its end. It fails if a phase ends unseen, because the test kills a
// process in each phase. Each phase lasts as long as a rollout, which takes many seconds.
func (s *subject) rotating(t *testing.T, phase string) {
	t.Helper()
	harness.Eventually(t, phase, limit, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		machines, err := s.machines(ctx)
		if err != nil {
			return err
		}
		reason := conditions.GetReason(cp, controlplanev1.CertificateAuthorityRotatingCondition)
		if at := slices.Index(phases, phase); at >= 0 && slices.Contains(phases[at+1:], reason) {
			t.Fatalf("%s ended before it was seen: %s", phase, reason)
		}
		if cp.Status.ObservedGeneration != cp.Generation || reason != phase {
			return errors.New(explain(cp, machines))
		}
		return nil
	})
}

func (s *subject) killMember(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "a member of etcd is killed", limit, func(context.Context) error {
		what, err := killOn(s.Name, "etcd", 0, 1)
		if err == nil {
			t.Logf("killed %s", what)
		}
		return err
	})
}

// startRequests starts a pod on the worker. It sends a request to the API server every other second, with the token and
// the authority of its volume. The kubelet records each failed request, with its cause, as an event of the pod.
func (s *subject) startRequests(t *testing.T) {
	t.Helper()
	plane.Must(t, "load", "image", harness.Bin()+"/images/echo.tar", "--cluster", s.Name, "--namespace", s.Namespace)
	s.Apply(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: asks}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: asks}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: asks, namespace: default}]
`)
	s.Apply(t, requestPod("asks"))
	harness.Eventually(t, "the pod's requests succeed", limit, s.lastRequestSucceeded)

	// A second pod trusts an unrelated authority. It shows that the test detects a lack of trust.
	s.Apply(t, requestPod("stranger", "--token=nobody"))
	harness.Eventually(t, "the failure of the second pod is reported", limit, func(ctx context.Context) error {
		failed, distrust, err := s.failedRequests(ctx, "stranger", time.Time{})
		if err == nil && len(distrust) == 0 {
			err = fmt.Errorf("found %q", failed)
		}
		return err
	})
	s.MustKubectl(t, "delete", "pod", "stranger")
}

// requestPod returns a pod whose readiness probe runs kubectl with additional arguments. The probe has a long timeout,
// because the host may be slow.
func requestPod(name string, args ...string) string {
	command := append([]string{"/kube/kubectl", "get", "--raw", "/api/v1/namespaces/default/serviceaccounts/asks"}, args...)
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  serviceAccountName: asks
  terminationGracePeriodSeconds: 1
  containers:
  - name: asks
    image: registry.capstan.dev/echo:v1
    args: [serve]
    readinessProbe:
      exec: {command: [%s]}
      periodSeconds: 2
      timeoutSeconds: 60
      failureThreshold: 1
    volumeMounts: [{name: kube, mountPath: /kube, readOnly: true}, {name: tmp, mountPath: /tmp}]
    env: [{name: HOME, value: /tmp}]
  volumes:
  - {name: kube, hostPath: {path: /opt/capstan/kubernetes/%s}}
  - {name: tmp, emptyDir: {}}
`, name, strings.Join(command, ", "), harness.KubernetesVersion)
}

// lastRequestSucceeded reports whether the pod's last request succeeded.
func (s *subject) lastRequestSucceeded(ctx context.Context) error {
	pod, err := s.asks(ctx)
	if err != nil {
		return err
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("the pod is not ready: %v", pod.Status.ContainerStatuses)
}

func (s *subject) asks(ctx context.Context) (*corev1.Pod, error) {
	pod := &corev1.Pod{}
	return pod, s.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "asks"}, pod)
}

// failedRequests returns the failed requests of a pod since a time, and those among them that failed for lack of trust.
// Requests also fail while a member of etcd restarts, or on a busy host.
func (s *subject) failedRequests(ctx context.Context, pod string, since time.Time) (all, distrust []string, err error) {
	list := &corev1.EventList{}
	if err := s.Client.List(ctx, list, client.InNamespace("default"), client.MatchingFields{"involvedObject.name": pod, "reason": "Unhealthy"}); err != nil {
		return nil, nil, err
	}
	for _, e := range list.Items {
		if e.LastTimestamp.Time.Before(since.Truncate(time.Second)) {
			continue
		}
		all = append(all, fmt.Sprintf("%d x %s", e.Count, e.Message))
		if strings.Contains(e.Message, "x509:") || strings.Contains(e.Message, "Unauthorized") {
			distrust = append(distrust, e.Message)
		}
	}
	return all, distrust, nil
}

// wantTrust checks that the pod was not restarted, that its requests succeed in the end, and that no request failed for
// lack of trust since the rotation began.
func (s *subject) wantTrust(t *testing.T, since time.Time) {
	t.Helper()
	harness.Eventually(t, "the pod's requests succeed in the end", limit, s.lastRequestSucceeded)
	harness.Eventually(t, "the failed requests of the pod are read", limit, func(ctx context.Context) error {
		pod, err := s.asks(ctx)
		if err != nil {
			return err
		}
		failed, distrust, err := s.failedRequests(ctx, "asks", since)
		if err != nil {
			return err
		}
		t.Logf("failed requests: %q", failed)
		for _, message := range distrust {
			t.Errorf("the pod's request failed: %s", message)
		}
		if n := pod.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("the pod was restarted %d times", n)
		}
		return nil
	})
}

// withToken returns the cluster for a client with a token and the previous certificate authority.
func (s *subject) withToken(t *testing.T) *harness.Cluster {
	t.Helper()
	config, err := clientcmd.LoadFromFile(s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	token := strings.TrimSpace(s.MustKubectl(t, "create", "token", "asks", "--duration", "1h"))
	for name := range config.AuthInfos {
		config.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: token}
	}
	out := *s.Cluster
	out.Kubeconfig = filepath.Join(t.TempDir(), "token")
	data, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out.Kubeconfig, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return &out
}

// wantRefusedKubeconfig checks that an administrator's kubeconfig from before the rotation does not work any more.
func (s *subject) wantRefusedKubeconfig(t *testing.T, kubeconfig string) {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "the previous kubeconfig is refused", limit, func(ctx context.Context) error {
		if _, err := c.CoreV1().Namespaces().List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("found %w", err)
		}
		return nil
	})
}

// nodesHave checks that every machine has only the new authority, also in its files.
func (s *subject) nodesHave(t *testing.T, want string) {
	t.Helper()
	nodes := &corev1.NodeList{}
	published := &corev1.ConfigMap{}
	harness.Eventually(t, "Nodes and published authorities are read", limit, func(ctx context.Context) error {
		return errors.Join(s.Client.List(ctx, nodes), s.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}, published))
	})
	if len(nodes.Items) != 2 {
		t.Errorf("%d Nodes, want two", len(nodes.Items))
	}
	for _, n := range nodes.Items {
		if n.Annotations[nodeconfig.TrustedAuthoritiesAnnotation] != want || n.Annotations[nodeconfig.KubeletAuthorityAnnotation] != want {
			t.Errorf("Node %s: %v", n.Name, n.Annotations)
		}
	}
	files, err := filepath.Glob(filepath.Join(plane.Root, "hosts", "*", "machines", "*", "rootfs", "etc", "kubernetes", "pki", "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, file := range files {
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "..", "..", "hostname"))
		if !strings.HasPrefix(string(name), s.Name+"-") {
			continue
		}
		ours++
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if has, err := nodeconfig.Fingerprints(data); err != nil || !slices.Equal(has, []string{want}) {
			t.Errorf("%s: %v, %v", strings.TrimSpace(string(name)), has, err)
		}
	}
	if ours != 2 {
		t.Errorf("%d machines of the cluster have ca.crt, want two: %v", ours, files)
	}
	if has, err := nodeconfig.Fingerprints([]byte(published.Data["client-ca-file"])); err != nil || !slices.Equal(has, []string{want}) {
		t.Errorf("extension-apiserver-authentication: %v, %v", has, err)
	}
}
