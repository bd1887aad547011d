package controlplane

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// unchecked disables the check of kubeconfigs for a namespace, and waits until the API server applies this.
func unchecked(t *testing.T, namespace string) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(ns), ns); err != nil {
		t.Fatal(err)
	}
	metav1.SetMetaDataLabel(&ns.ObjectMeta, KubeconfigCheckLabel, kubeconfigCheckDisabled)
	if err := env.Client.Update(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "namespace "+namespace+" is no longer checked", func() bool {
		return env.Client.Create(t.Context(), kubeconfigSecret(namespace, "probe-kubeconfig", `{user: {tokenFile: /x}}`), client.DryRunAll) == nil
	})
}

func kubeconfigSecret(namespace, name, user string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Type: clusterv1.ClusterSecretType,
		StringData: map[string]string{"value": fmt.Sprintf("{apiVersion: v1, kind: Config, users: [{name: a, %s]}", user[1:])},
	}
}

// The API server refuses kubeconfigs that make a reader run programs or read files. Other Secrets and other changes are
// accepted without the manager.
func TestKubeconfigSecrets(t *testing.T) {
	namespace := env.Namespace(t)
	secret := func(name, user string) *corev1.Secret { return kubeconfigSecret(namespace, name, user) }
	for name, test := range map[string]struct {
		secret *corev1.Secret
		want   string
	}{
		"a token":         {secret("token-kubeconfig", `{user: {token: a}}`), ""},
		"a proxy":         {secret("proxy-kubeconfig", `{user: {token: a}}], clusters: [{name: a, cluster: {proxy-url: "http://10.0.0.1", insecure-skip-tls-verify: true}}`), ""},
		"another name":    {secret("kubeconfig", `{user: {tokenFile: /x}}`), ""},
		"a token's file":  {secret("a-kubeconfig", `{user: {tokenFile: /x}}`), "the kubeconfig is refused: user.tokenFile: files are not read"},
		"a program":       {secret("a-kubeconfig", `{user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: x}}}`), "user.exec"},
		"a plugin":        {secret("a-kubeconfig", `{user: {auth-provider: {name: oidc}}}`), "user.auth-provider"},
		"a certificate":   {secret("a-kubeconfig", `{user: {client-certificate: /x}}`), "user.client-certificate"},
		"a key":           {secret("a-kubeconfig", `{user: {client-key: /x}}`), "user.client-key"},
		"an authority":    {secret("a-kubeconfig", `{user: {token: a}}], clusters: [{name: a, cluster: {certificate-authority: /x}}`), "cluster.certificate-authority"},
		"another context": {secret("a-kubeconfig", `{user: {token: a}}, {name: b, user: {tokenFile: /x}}`), "user.tokenFile"},
		"aliases":         {secret("a-kubeconfig", `{user: {token: &a a}}`), "YAML anchor"},
		"no kubeconfig":   {secret("a-kubeconfig", `{user: 1}`), "no valid kubeconfig"},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Refused(t, env.Client.Create(context.Background(), test.secret), test.want)
		})
	}
	good := secret("token-kubeconfig", `{user: {tokenFile: /x}}`)
	testenv.Refused(t, env.Client.Patch(context.Background(), good, client.Merge), "user.tokenFile")

	// A Secret is checked as soon as it contains a kubeconfig.
	empty := secret("empty-kubeconfig", `{user: {tokenFile: /x}}`)
	empty.StringData = nil
	testenv.Refused(t, env.Client.Create(t.Context(), empty), "")
	for _, data := range []map[string][]byte{nil, {"other": nil}} {
		empty.Data = data
		testenv.Refused(t, env.Client.Update(t.Context(), empty), "")
		filled := empty.DeepCopy()
		filled.StringData = secret("", `{user: {tokenFile: /x}}`).StringData
		testenv.Refused(t, env.Client.Update(t.Context(), filled), "user.tokenFile")
	}

	// An existing Secret can still be labelled, repaired and deleted.
	bad := kubeconfigSecret(env.Namespace(t), "old-kubeconfig", `{user: {tokenFile: /x}}`)
	unchecked(t, bad.Namespace)
	if err := env.Client.Create(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: bad.Namespace}}
	if err := env.Client.Patch(t.Context(), ns, client.RawPatch(client.Merge.Type(), fmt.Appendf(nil, `{"metadata":{"labels":{%q:null}}}`, KubeconfigCheckLabel))); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "the namespace is checked again", func() bool {
		return env.Client.Create(t.Context(), kubeconfigSecret(bad.Namespace, "probe-kubeconfig", `{user: {tokenFile: /x}}`), client.DryRunAll) != nil
	})
	bad.Labels = map[string]string{"a": "b"}
	testenv.Refused(t, env.Client.Update(t.Context(), bad), "")
	bad.Data["value"] = []byte(`{apiVersion: v1, kind: Config, users: [{name: a, user: {tokenFile: /y}}]}`)
	testenv.Refused(t, env.Client.Update(t.Context(), bad), "user.tokenFile")
	testenv.Refused(t, env.Client.Delete(t.Context(), bad), "")
}
