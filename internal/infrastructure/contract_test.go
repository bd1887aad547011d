package infrastructure_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"sigs.k8s.io/cluster-api/util/contract"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

func load[T any](t *testing.T, path ...string) *T {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(append([]string{testenv.Root(), "config", "infrastructure"}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	out := new(T)
	if err := yaml.UnmarshalStrict(data, out); err != nil {
		t.Fatal(err)
	}
	return out
}

func crds(t *testing.T) (out []*apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(testenv.Root(), "config", "infrastructure", "crd", "bases", "*.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d CRDs: %v", len(files), err)
	}
	for _, f := range files {
		out = append(out, load[apiextensionsv1.CustomResourceDefinition](t, "crd", "bases", filepath.Base(f)))
	}
	return out
}

// ALL-01, ALL-02, ALL-03, ALL-04, ALL-06: the expectations of core and clusterctl about CRDs.
func TestCRDs(t *testing.T) {
	for _, crd := range crds(t) {
		names := crd.Spec.Names
		if want := contract.CalculateCRDName(infrav1.GroupVersion.Group, names.Kind); crd.Name != want {
			t.Errorf("ALL-03: %s should be named %s", crd.Name, want)
		}
		scope := apiextensionsv1.NamespaceScoped
		if names.Kind == "CapstanHost" {
			scope = apiextensionsv1.ClusterScoped
			if _, ok := crd.Labels["clusterctl.cluster.x-k8s.io/move-hierarchy"]; !ok {
				t.Error("ALL-11: hosts must be moved")
			}
		}
		if crd.Spec.Scope != scope {
			t.Errorf("ALL-01: %s is %s", names.Kind, crd.Spec.Scope)
		}
		if names.ListKind != names.Kind+"List" || !env.Scheme.Recognizes(infrav1.GroupVersion.WithKind(names.ListKind)) {
			t.Errorf("ALL-02: the list of %s is %s", names.Kind, names.ListKind)
		}
		if crd.Labels["cluster.x-k8s.io/v1beta2"] != "v1beta2" || !slices.ContainsFunc(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
			return v.Name == "v1beta2" && v.Served && v.Storage
		}) {
			t.Errorf("ALL-04: %s: labels %v", names.Kind, crd.Labels)
		}
		served := slices.ContainsFunc(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
			return v.Name == "v1beta1" && v.Served && v.Deprecated && v.DeprecationWarning != nil
		})
		if labelled := crd.Labels["cluster.x-k8s.io/v1beta1"] == "v1beta1"; labelled != served || served != (names.Kind != "CapstanHost" && names.Kind != "CapstanVolume") {
			t.Errorf("ALL-04: %s: labels %v, v1beta1 served and deprecated: %t", names.Kind, crd.Labels, served)
		}
		if slices.Contains(names.Categories, "cluster-api") == (names.Kind == "CapstanVolume") || len(names.ShortNames) == 0 {
			t.Errorf("ALL-06: %s: %+v", names.Kind, names)
		}
		for _, v := range crd.Spec.Versions {
			if len(v.AdditionalPrinterColumns) == 0 {
				t.Errorf("ALL-06: %s %s has no columns", names.Kind, v.Name)
			}
		}
	}
}

func allows(rules []rbacv1.PolicyRule, group, resource, verb string) bool {
	return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
		return slices.Contains(r.APIGroups, group) && slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, verb)
	})
}

// ALL-05: core has all rights that it needs on every kind and template, and can set them as blocking owners.
func TestAggregatedRole_ALL05(t *testing.T) {
	role := load[rbacv1.ClusterRole](t, "rbac", "aggregated_role.yaml")
	if role.Labels["cluster.x-k8s.io/aggregate-to-manager"] != "true" {
		t.Error("the role is not aggregated")
	}
	for _, crd := range crds(t) {
		if crd.Spec.Scope == apiextensionsv1.ClusterScoped || !slices.Contains(crd.Spec.Names.Categories, "cluster-api") {
			continue // Core does not use hosts and volumes.
		}
		for _, verb := range []string{"create", "delete", "get", "list", "patch", "update", "watch"} {
			if !allows(role.Rules, infrav1.GroupVersion.Group, crd.Spec.Names.Plural, verb) {
				t.Errorf("core cannot %s %s", verb, crd.Spec.Names.Plural)
			}
		}
		if !allows(role.Rules, infrav1.GroupVersion.Group, crd.Spec.Names.Plural+"/finalizers", "update") {
			t.Errorf("core cannot update finalizers of %s", crd.Spec.Names.Plural)
		}
	}
}

// IC-13: the manager has rights on its own kinds and their status, and changes no Secrets. TestRoles_IC13 of package config checks the rights
// of all roles on Clusters.
func TestManagerRole_IC13(t *testing.T) {
	role := load[rbacv1.ClusterRole](t, "rbac", "role.yaml")
	for _, verb := range []string{"create", "delete", "update", "patch"} {
		if allows(role.Rules, "", "secrets", verb) {
			t.Errorf("the manager can %s secrets", verb)
		}
	}
	for _, resource := range []string{"capstanclusters", "capstanclusters/status", "capstanmachines", "capstanmachines/status", "capstanhosts/status", "capstanmachinetemplates/status"} {
		if !allows(role.Rules, infrav1.GroupVersion.Group, resource, "patch") {
			t.Errorf("the manager cannot patch %s", resource)
		}
	}
}
