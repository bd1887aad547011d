//go:build e2e

package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// checkManifests: the control plane provider applies each manifest once. The condition names a missing Secret.
func checkManifests(t *testing.T, c *harness.Cluster) {
	ctx := t.Context()
	list := &controlplanev1.CapstanControlPlaneList{}
	if err := plane.Client.List(ctx, list, client.InNamespace(c.Namespace)); err != nil || len(list.Items) != 1 {
		t.Fatalf("%d control planes, %v", len(list.Items), err)
	}
	controlPlane := &list.Items[0]
	before := controlPlane.DeepCopy()
	controlPlane.Spec.Manifests = []controlplanev1.Manifest{
		{Name: "team", Content: "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: bot, namespace: team}\n"},
		{Name: "login", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "manifests", Key: "login.yaml"}}},
	}
	if err := plane.Client.Patch(ctx, controlPlane, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	says := func(status metav1.ConditionStatus, message string) {
		t.Helper()
		harness.Eventually(t, "the condition ManifestsApplied "+string(status), time.Minute, func(ctx context.Context) error {
			if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(controlPlane), controlPlane); err != nil {
				return err
			}
			if c := conditions.Get(controlPlane, controlplanev1.ManifestsAppliedCondition); c == nil || c.Status != status || !strings.Contains(c.Message, message) {
				return fmt.Errorf("it is %+v", c)
			}
			return nil
		})
	}
	says(metav1.ConditionFalse, "manifest login: the Secret manifests does not exist")
	c.MustKubectl(t, "get", "serviceaccount", "bot", "--namespace=team")
	c.MustKubectl(t, "delete", "serviceaccount", "bot", "--namespace=team")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "manifests"}, StringData: map[string]string{
		"login.yaml": "apiVersion: v1\nkind: Secret\nmetadata: {name: login, namespace: team}\nstringData: {password: hidden}\n",
	}}
	if err := plane.Client.Create(ctx, secret); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(ctx), secret) })
	says(metav1.ConditionTrue, "")
	if got := c.MustKubectl(t, "get", "secret", "login", "--namespace=team", "-o", "jsonpath={.data.password}"); got != "aGlkZGVu" {
		t.Errorf("the Secret of the manifest contains %q", got)
	}
	if _, err := c.Kubectl(t, "get", "serviceaccount", "bot", "--namespace=team"); err == nil {
		t.Error("a manifest was applied again")
	}
}

// checkResourceSet: Cluster API core applies the ConfigMap of a ClusterResourceSet to the cluster that has its label, and then a
// change of the ConfigMap.
func checkResourceSet(t *testing.T, c *harness.Cluster) {
	ctx := t.Context()
	manifest := func(text string) map[string]string {
		return map[string]string{"greeting.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: greeting, namespace: default}\ndata: {text: " + text + "}\n"}
	}
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "greeting"}, Data: manifest("hello")}
	set := &addonsv1.ClusterResourceSet{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "greeting"}}
	set.Spec = addonsv1.ClusterResourceSetSpec{
		ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"greeted": "yes"}},
		Strategy:        string(addonsv1.ClusterResourceSetStrategyReconcile),
		Resources:       []addonsv1.ResourceRef{{Kind: "ConfigMap", Name: content.Name}},
	}
	for _, obj := range []client.Object{content, set} {
		if err := plane.Client.Create(ctx, obj); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(ctx), obj) })
	}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name}}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"greeted":"yes"}}}`))
	if err := plane.Client.Patch(ctx, cluster, patch); err != nil {
		t.Fatal(err)
	}
	applied := func(want string) {
		t.Helper()
		harness.Eventually(t, "the ConfigMap with "+want, 3*time.Minute, func(ctx context.Context) error {
			got := &corev1.ConfigMap{}
			if err := c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "greeting"}, got); err != nil || got.Data["text"] != want {
				return fmt.Errorf("it contains %v, %w", got.Data, err)
			}
			return nil
		})
	}
	applied("hello")
	before := content.DeepCopy()
	content.Data = manifest("goodbye")
	if err := plane.Client.Patch(ctx, content, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	applied("goodbye")
}
