//go:build linux

package cli

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlconfig "sigs.k8s.io/cluster-api/cmd/clusterctl/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cli/diagnosis"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/testenv/expect"
)

// remotePlane creates what `capstan status` shows of a management plane, in a namespace.
func (s *site) remotePlane(namespace string) {
	s.t.Helper()
	objects, err := manifest.Parse(clusterctlconfig.ClusterctlAPIManifest)
	if err != nil {
		s.t.Fatal(err)
	}
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, crd := range diagnosis.Typed[apiextensionsv1.CustomResourceDefinition](objects) {
		crds = append(crds, &crd)
	}
	if _, err := envtest.InstallCRDs(s.env.Config, envtest.CRDInstallOptions{CRDs: crds, MaxTime: expect.Patience}); err != nil {
		s.t.Fatal(err)
	}
	provider := parseObject(s.t, "{apiVersion: clusterctl.cluster.x-k8s.io/v1alpha3, kind: Provider, providerName: capstan, type: InfrastructureProvider, version: v0.9.9, metadata: {name: infrastructure-capstan}}")
	provider.SetNamespace(namespace)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "manager-1"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "manager", Image: "manager"}}}}
	unrelated := pod.DeepCopy()
	unrelated.Name = "unrelated"
	pod.Labels = map[string]string{clusterv1.ProviderNameLabel: provider.GetName()}
	machine := capstanMachine(namespace, "changing", map[string]string{clusterv1.ClusterNameLabel: "first"})
	machine.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
	s.create(provider, pod, unrelated, machine, clusterNamed(namespace, "first"), hostNamed("rack-7", namespace))
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "manager", RestartCount: 3}}}
	machine.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Status: metav1.ConditionTrue, Reason: infrav1.WaitingForUpdateReason, LastTransitionTime: metav1.Now()}}
	if err := errors.Join(s.env.Client.Status().Update(s.t.Context(), pod), s.env.Client.Status().Update(s.t.Context(), machine)); err != nil {
		s.t.Fatal(err)
	}
}

// testStatus: the status of a remote management plane contains what its user can read, and names the rest.
func (s *site) testStatus() {
	t, own := s.t, s.env.Namespace(s.t)
	s.remotePlane(own)
	s.bind("reader", viewerRole, own)
	const noPods = "pods (all namespaces): pods is forbidden"
	for name, test := range map[string]struct {
		user     string
		code     int
		has, not []string
	}{
		"an administrator": {"", exitOK, []string{
			"Kubernetes: v", "capstan Infrastructure v0.9.9 " + own, "manager-1 " + own + " Running true 3", own + " first ", "- rack-7 ", own + "/changing worker of first 1 - " + infrav1.WaitingForUpdateReason,
		}, []string{"unrelated", "Cannot be read"}},
		"a reader of one namespace": {"reader", exitOK, []string{
			"capstan Infrastructure v0.9.9", "providers.clusterctl.cluster.x-k8s.io (all namespaces but " + own + ")", own + " first ", "/changing", noPods, "list and watch on pods", hostViewerRole,
		}, []string{"manager-1", "rack-7 "}},
		"a stranger": {"nobody", exitFailed, []string{"Kubernetes: v", noPods, "providers.clusterctl.cluster.x-k8s.io (all namespaces)"}, []string{"v0.9.9", "rack-7", "first"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := s.capstan(s.kubeconfig(test.user, own), "status")
			code := exitOK
			if err != nil {
				code = exitCode(err)
			}
			shown := strings.Join(strings.Fields(out), " ")
			found := func(text string) bool { return strings.Contains(shown, text) }
			missing := func(text string) bool { return !found(text) }
			if code != test.code || slices.ContainsFunc(test.has, missing) || slices.ContainsFunc(test.not, found) {
				t.Errorf("exit code %d, %v, want %d, all of %q, none of %q, found:\n%s", code, err, test.code, test.has, test.not, out)
			}
		})
	}
	out, err := s.capstan(s.kubeconfig("reader", own), "status", "-o", "json")
	var got apiStatus
	if err := errors.Join(err, json.Unmarshal([]byte(out), &got)); err != nil || len(got.Providers) != 1 || len(got.Managers) != 0 || len(got.Updates) != 1 || len(got.Clusters) != 1 ||
		!slices.ContainsFunc(got.Unreadable, func(g gap) bool { return g.Resource == "pods" }) {
		t.Errorf("%v: %s", err, out)
	}
}
