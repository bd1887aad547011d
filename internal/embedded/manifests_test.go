package embedded

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"

	"capstan.dev/capstan/config"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/version"
)

const components = `
apiVersion: v1
kind: Namespace
metadata: {name: capi-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: capi-controller-manager, namespace: capi-system}
---
apiVersion: v1
kind: Service
metadata: {name: capi-webhook-service, namespace: capi-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: capi-manager, namespace: capi-system}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: capi-serving-cert, namespace: capi-system}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: clusters.cluster.x-k8s.io
  labels: {cluster.x-k8s.io/v1beta2: v1beta2}
  annotations: {cert-manager.io/inject-ca-from: capi-system/capi-serving-cert, other: stays}
spec:
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {service: {name: capi-webhook-service, namespace: capi-system, path: /convert}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: plain.example.com}
spec: {conversion: {strategy: None}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: capi-validating-webhook-configuration}
webhooks:
- name: one
  clientConfig: {service: {name: capi-webhook-service, namespace: capi-system, path: /validate-one}}
- name: two
  clientConfig: {service: {name: capi-webhook-service, namespace: capi-system, path: /validate-two}}
`

func find(t *testing.T, objects []*unstructured.Unstructured, kind, name string) *unstructured.Unstructured {
	t.Helper()
	for _, o := range objects {
		if o.GetKind() == kind && o.GetName() == name {
			return o
		}
	}
	t.Fatalf("no %s %s among %d objects", kind, name, len(objects))
	return nil
}

// CTL-08, CTL-15: the installed objects have clusterctl's labels and do not depend on pods.
func TestInstall(t *testing.T) {
	objects, err := manifest.Parse([]byte(components))
	if err != nil {
		t.Fatal(err)
	}
	p := provider{name: "cluster-api", kind: clusterctlv1.CoreProviderType, namespace: "capi-system", version: "v1.14.2", objects: objects}
	got, err := p.install(webhooks{port: 20001, caBundle: []byte("CA")})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range got {
		if o.GetLabels()["cluster.x-k8s.io/provider"] != "cluster-api" {
			t.Errorf("%s %s has labels %v", o.GetKind(), o.GetName(), o.GetLabels())
		}
		if _, found := o.GetLabels()["clusterctl.cluster.x-k8s.io"]; !found {
			t.Errorf("%s %s lacks clusterctl's label", o.GetKind(), o.GetName())
		}
		if slices.Contains([]string{"Deployment", "Service", "ServiceAccount", "Certificate"}, o.GetKind()) {
			t.Errorf("%s is useless without pods", o.GetKind())
		}
	}
	crd := find(t, got, "CustomResourceDefinition", "clusters.cluster.x-k8s.io")
	if crd.GetLabels()["cluster.x-k8s.io/v1beta2"] != "v1beta2" {
		t.Error("the contract's label is missing")
	}
	if a := crd.GetAnnotations(); len(a) != 1 || a["other"] != "stays" {
		t.Errorf("annotations are %v", a)
	}
	url, _, _ := unstructured.NestedString(crd.Object, "spec", "conversion", "webhook", "clientConfig", "url")
	if url != "https://127.0.0.1:20001/convert" {
		t.Errorf("the URL of the conversion webhook is %q", url)
	}
	if _, found, _ := unstructured.NestedMap(crd.Object, "spec", "conversion", "webhook", "clientConfig", "service"); found {
		t.Error("the conversion webhook still has a Service")
	}
	hooks, _, _ := unstructured.NestedSlice(find(t, got, "ValidatingWebhookConfiguration", "capi-validating-webhook-configuration").Object, "webhooks")
	clientConfig := hooks[1].(map[string]any)["clientConfig"].(map[string]any)
	if clientConfig["url"] != "https://127.0.0.1:20001/validate-two" || clientConfig["caBundle"] != base64.StdEncoding.EncodeToString([]byte("CA")) {
		t.Errorf("the client config of the webhook is %v", clientConfig)
	}
	// The original is not changed, because the next start installs it again.
	if _, found, _ := unstructured.NestedMap(p.objects[5].Object, "spec", "conversion", "webhook", "clientConfig", "service"); !found {
		t.Error("install changed its input")
	}
}

func TestInventory(t *testing.T) {
	p := provider{name: "capstan", kind: clusterctlv1.InfrastructureProviderType, namespace: managerNamespace, version: "v0.1.0"}
	o := p.inventory()
	if o.GetName() != "infrastructure-capstan" || o.GetNamespace() != managerNamespace || o.GetKind() != "Provider" || o.GetAPIVersion() != "clusterctl.cluster.x-k8s.io/v1alpha3" {
		t.Errorf("inventory is %s %s %s/%s", o.GetAPIVersion(), o.GetKind(), o.GetNamespace(), o.GetName())
	}
	if o.Object["type"] != "InfrastructureProvider" || o.Object["providerName"] != "capstan" || o.Object["version"] != "v0.1.0" {
		t.Errorf("inventory is %v", o.Object)
	}
	if o.GetLabels()["clusterctl.cluster.x-k8s.io/core"] != "inventory" {
		t.Errorf("labels are %v", o.GetLabels())
	}
}

func TestLoadOurs(t *testing.T) {
	const role = "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: manager-role}\n"
	files := fstest.MapFS{
		"ipam/crd/bases/a.yaml":          {Data: []byte("apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: a.ipam.capstan.dev}\n")},
		"ipam/rbac/role.yaml":            {Data: []byte(role)},
		"ipam/rbac/role_binding.yaml":    {Data: []byte("apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: manager-rolebinding}\nroleRef: {kind: ClusterRole, name: manager-role}\n")},
		"ipam/rbac/metrics_role.yaml":    {Data: []byte("apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: metrics-reader}\n")},
		"ipam/rbac/aggregated_role.yaml": {Data: []byte("apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: capstan-ipam-for-core, labels: {cluster.x-k8s.io/aggregate-to-manager: 'true'}}\n")},
		"ipam/rbac/kustomization.yaml":   {Data: []byte("resources: [role.yaml]\n")},
		"ipam/webhook/manifests.yaml":    {Data: []byte("apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingWebhookConfiguration\nmetadata: {name: validating-webhook-configuration}\n")},
		"bootstrap/rbac/role.yaml":       {Data: []byte(role)},
	}
	providers, err := loadOurs(files, "v0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range providers {
		for _, o := range p.objects {
			names = append(names, p.label()+" "+o.GetKind()+" "+o.GetName())
		}
	}
	want := []string{
		"bootstrap-capstan Namespace capstan-bootstrap-system",
		"bootstrap-capstan ClusterRole capstan-bootstrap-manager-role",
		"ipam-capstan Namespace capstan-ipam-system",
		"ipam-capstan CustomResourceDefinition a.ipam.capstan.dev",
		"ipam-capstan ClusterRole capstan-ipam-for-core",
		"ipam-capstan ClusterRole capstan-ipam-metrics-reader",
		"ipam-capstan ClusterRole capstan-ipam-manager-role",
		"ipam-capstan ClusterRoleBinding capstan-ipam-manager-role",
		"ipam-capstan ValidatingWebhookConfiguration capstan-ipam-validating-webhook-configuration",
	}
	if !slices.Equal(names, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(names, "\n"), strings.Join(want, "\n"))
	}
}

// The manifests contain every provider of the suite, and each object once.
func TestEmbeddedManifests(t *testing.T) {
	providers, err := loadOurs(config.FS, version.Version)
	if err != nil {
		t.Fatal(err)
	}
	if len(providers) != len(ourProviders) {
		t.Errorf("got %[2]d providers, want %[1]d", len(ourProviders), len(providers))
	}
	seen := map[string]string{}
	for _, p := range providers {
		objects, err := p.install(webhooks{port: 1, caBundle: []byte("CA")})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			key := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
			if other, found := seen[key]; found {
				t.Errorf("%s is in %s and %s", key, other, p.label())
			}
			seen[key] = p.label()
		}
	}
}

func TestAggregate(t *testing.T) {
	objects, err := manifest.Parse([]byte(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: all}
aggregationRule: {clusterRoleSelectors: [{matchLabels: {cluster.x-k8s.io/aggregate-to-manager: "true"}}]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: part, labels: {cluster.x-k8s.io/aggregate-to-manager: "true"}}
rules: [{apiGroups: [a], resources: [b], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: other}
rules: [{apiGroups: [secret], resources: [c], verbs: [get]}]
`))
	if err != nil {
		t.Fatal(err)
	}
	rules, _, _ := unstructured.NestedSlice(find(t, aggregate(objects), "ClusterRole", "all").Object, "rules")
	if len(rules) != 1 || rules[0].(map[string]any)["apiGroups"].([]any)[0] != "a" {
		t.Errorf("rules are %v", rules)
	}
	if _, found := find(t, objects, "ClusterRole", "all").Object["rules"]; found {
		t.Error("aggregate changed its input")
	}
}
