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
	says(metav1.ConditionFalse, "manifest login: the secret manifests does not exist")
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
