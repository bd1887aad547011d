package controlplane

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/templates"
)

// TestCRDs (ALL-01 to ALL-04, ALL-06, BC-01, CP-04, CP-12): names, labels, scope, lists, categories, columns, docs.
// Row ALL-03.
func TestCRDs(t *testing.T) {
	for kind, group := range map[string]string{
		"CapstanControlPlane": "controlplane.capstan.dev", "CapstanControlPlaneTemplate": "controlplane.capstan.dev",
		"CapstanConfig": "bootstrap.capstan.dev", "CapstanConfigTemplate": "bootstrap.capstan.dev",
	} {
		t.Run(kind, func(t *testing.T) {
			crd := getCRD(t, contract.CalculateCRDName(group, kind))
			names := crd.Spec.Names
			if crd.Spec.Scope != apiextensionsv1.NamespaceScoped || names.ListKind != kind+"List" || len(names.ShortNames) == 0 ||
				!slices.Contains(names.Categories, "cluster-api") {
				t.Errorf("ALL-01, ALL-02: %s, %v", crd.Spec.Scope, names)
			}
			if len(crd.Spec.Versions) != 2 {
				t.Errorf("ALL-04: %d versions", len(crd.Spec.Versions))
			}
			for _, version := range crd.Spec.Versions {
				hub := version.Name == "v1beta2"
				if crd.Labels["cluster.x-k8s.io/"+version.Name] != version.Name || version.Storage != hub || version.Deprecated == hub || !version.Served {
					t.Errorf("ALL-04: labels %v, version %s", crd.Labels, version.Name)
				}
				if len(version.AdditionalPrinterColumns) == 0 {
					t.Errorf("ALL-06: %s has no columns", version.Name)
				}
			}
		})
	}
	for _, version := range getCRD(t, "capstancontrolplanes.controlplane.capstan.dev").Spec.Versions {
		scale := version.Subresources.Scale
		if scale.SpecReplicasPath != ".spec.replicas" || scale.StatusReplicasPath != ".status.replicas" || *scale.LabelSelectorPath != ".status.selector" {
			t.Errorf("CP-04: %s: %v", version.Name, scale)
		}
	}
}

func getCRD(t *testing.T, name string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	obj := &unstructured.Unstructured{}
	obj.SetAPIVersion("apiextensions.k8s.io/v1")
	obj.SetKind("CustomResourceDefinition")
	if err := env.Client.Get(context.Background(), client.ObjectKey{Name: name}, obj); err != nil {
		t.Fatalf("ALL-03: %v", err)
	}
	data, err := yaml.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(data, crd); err != nil {
		t.Fatal(err)
	}
	return crd
}

// TestClusterTemplate (CTL-09): the default output of the template is accepted.
func TestClusterTemplate(t *testing.T) {
	data, err := templates.FS.ReadFile("cluster-template.yaml")
	if err != nil {
		t.Fatal(err)
	}
	given := map[string]string{"CLUSTER_NAME": "demo", "NAMESPACE": env.Namespace(t), "KUBERNETES_VERSION": "v1.36.3"}
	text := regexp.MustCompile(`\$\{([A-Z0-9_]+)(?::=([^}]*))?\}`).ReplaceAllStringFunc(string(data), func(match string) string {
		name, value, _ := strings.Cut(strings.Trim(match, "${}"), ":=")
		if v, ok := given[name]; ok {
			return v
		}
		if value == "" {
			t.Errorf("the variable %s has no default", name)
		}
		return value
	})
	for document := range strings.SplitSeq(text, "\n---\n") {
		obj := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), obj); err != nil {
			t.Fatal(err)
		}
		if err := env.Client.Create(context.Background(), obj, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
			t.Errorf("%s %s: %v", obj.GetKind(), obj.GetName(), err)
		}
	}
}
