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
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestRotation_CP15 replaces the certificate authority of a cluster (docs/certificates.md) while a client that
// only knows the old one writes, a pod asks the API server with what it has in its volume, the manager is killed in
// each phase, and a member of etcd while machines get their new certificates. Nobody ever distrusts anybody, and in the
// end nothing trusts the old one.
func TestRotation_CP15(t *testing.T) {
	s := &subject{Cluster: plane.CreateCluster(t, "default", "ca", "--workers", "1"), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	s.ready(t)
	before, old := s.Kubeconfig, s.authorities(t)
	if len(old) != 1 {
		t.Fatalf("the secret has %d certificate authorities", len(old))
	}
	s.askAllTheWhile(t)
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
	t.Logf("took %.1f s; longest gap between acknowledged writes %.1f s", time.Since(start).Seconds(), w.longestGap().Seconds())

	now := s.authorities(t)
	if len(now) != 1 || now[0] == old[0] {
		t.Errorf("the certificate authorities are %v, they were %v", now, old)
	}
	s.worthless(t, before)
	s.Connect(t)
	s.etcd = memberClient(t, s.Kubeconfig)
	s.ready(t)
	s.stillAsks(t, start)
	s.nodesHave(t, now[0])
	harness.Eventually(t, "the API server reaches the worker's kubelet", limit, func(context.Context) error {
		_, err := s.Kubectl(t, "exec", "asks", "--", "/kube/kubectl", "version", "--client")
		return err
	})
	w.check(t)

	// Done once and for all: the same wish begins nothing.
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
		metav1.SetMetaDataAnnotation(&cp.ObjectMeta, "touched", "yes")
	})
	harness.Eventually(t, "the control plane rests", time.Minute, func(ctx context.Context) error {
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

// rotating waits for a phase of the rotation, or for its end. No phase may be over before it was seen, or nothing would
// be killed in it: each lasts as long as a rollout does, which is many seconds.
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
			t.Fatalf("%s was over before it was seen: %s", phase, reason)
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

// askAllTheWhile runs a pod on the worker that asks the API server each other second with its token, trusting what is
// in its volume. The kubelet records every answer that fails, with its cause, as an event of the pod.
func (s *subject) askAllTheWhile(t *testing.T) {
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
	s.Apply(t, asking("asks"))
	harness.Eventually(t, "the pod's questions are answered", limit, s.answered)

	// One that the API server does not know shows that distrust is seen.
	s.Apply(t, asking("stranger", "--token=nobody"))
	harness.Eventually(t, "the stranger is seen", limit, func(ctx context.Context) error {
		failed, distrust, err := s.failedAnswers(ctx, "stranger", time.Time{})
		if err == nil && len(distrust) == 0 {
			err = fmt.Errorf("found %q", failed)
		}
		return err
	})
	s.MustKubectl(t, "delete", "pod", "stranger")
}

// asking is a pod whose readiness is that kubectl, with more arguments than it usually has, gets an answer. The time for
// it is ample, for the box may be slow.
func asking(name string, args ...string) string {
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

// answered says whether the pod's last question was answered.
func (s *subject) answered(ctx context.Context) error {
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

// failedAnswers are those that a pod got since some time, and which of them say that it or the API server was not
// trusted. Others fail too while a member of etcd comes back, or on a box that has other work.
func (s *subject) failedAnswers(ctx context.Context, pod string, since time.Time) (all, distrust []string, err error) {
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

// stillAsks checks that the pod is the one of before, that its questions are answered in the end, and that since the
// rotation began none failed for want of trust.
func (s *subject) stillAsks(t *testing.T, since time.Time) {
	t.Helper()
	harness.Eventually(t, "the pod's questions are answered in the end", limit, s.answered)
	harness.Eventually(t, "the pod's answers that failed are read", limit, func(ctx context.Context) error {
		pod, err := s.asks(ctx)
		if err != nil {
			return err
		}
		failed, distrust, err := s.failedAnswers(ctx, "asks", since)
		if err != nil {
			return err
		}
		t.Logf("answers that failed: %q", failed)
		for _, message := range distrust {
			t.Errorf("the pod's question failed: %s", message)
		}
		if n := pod.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("the pod was started again %d times", n)
		}
		return nil
	})
}

// withToken is the cluster as a client sees it that has a token, and the certificate authority of before.
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

// worthless checks that an administrator's kubeconfig of before is worth nothing.
func (s *subject) worthless(t *testing.T, kubeconfig string) {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "the kubeconfig of before is refused", limit, func(ctx context.Context) error {
		if _, err := c.CoreV1().Namespaces().List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("found %w", err)
		}
		return nil
	})
}

// nodesHave checks that every machine has nothing but the new authority, in its files too.
func (s *subject) nodesHave(t *testing.T, want string) {
	t.Helper()
	nodes := &corev1.NodeList{}
	published := &corev1.ConfigMap{}
	harness.Eventually(t, "Nodes and what the API server publishes are read", limit, func(ctx context.Context) error {
		return errors.Join(s.Client.List(ctx, nodes), s.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}, published))
	})
	for _, n := range nodes.Items {
		if n.Annotations[nodeconfig.TrustedAuthoritiesAnnotation] != want || n.Annotations[nodeconfig.KubeletAuthorityAnnotation] != want {
			t.Errorf("Node %s: %v", n.Name, n.Annotations)
		}
	}
	files, err := filepath.Glob(filepath.Join(plane.Root, "hosts", "*", "machines", "*", "rootfs", "etc", "kubernetes", "pki", "ca.crt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no machine's ca.crt: %v", err)
	}
	for _, file := range files {
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "..", "..", "hostname"))
		if !strings.HasPrefix(string(name), s.Name+"-") {
			continue
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if has, err := nodeconfig.Fingerprints(data); err != nil || !slices.Equal(has, []string{want}) {
			t.Errorf("%s: %v, %v", strings.TrimSpace(string(name)), has, err)
		}
	}
	if has, err := nodeconfig.Fingerprints([]byte(published.Data["client-ca-file"])); err != nil || !slices.Equal(has, []string{want}) {
		t.Errorf("extension-apiserver-authentication: %v, %v", has, err)
	}
}
