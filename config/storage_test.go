package config_test

import (
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane"
	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/reconciling"
)

// TestStoredVersions_ALL14: the manager of each kind with several versions migrates its stored objects. It uses the
// status if the kind has one. Its role allows the writes.
func TestStoredVersions_ALL14(t *testing.T) {
	for _, provider := range []reconciling.Provider{infrastructure.Provider(), controlplane.Provider, bootstrap.Provider, ipam.Provider} {
		configs := migrations(t, provider)
		objects := providers(t)[provider.Name]
		var rules []rbacv1.PolicyRule
		for _, role := range ofKind[rbacv1.ClusterRole](t, objects, "ClusterRole") {
			if role.Name == "capstan-"+provider.Name+"-manager" {
				rules = role.Rules
			}
		}
		for _, crd := range ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition") {
			config, found := configs[crd.Name]
			if found != (len(crd.Spec.Versions) > 1) {
				t.Errorf("%s has %d versions and a migration: %v", crd.Name, len(crd.Spec.Versions), found)
			}
			if !found {
				continue
			}
			hasStatus := crd.Spec.Versions[0].Subresources != nil && crd.Spec.Versions[0].Subresources.Status != nil
			if config.UseStatusForStorageVersionMigration != hasStatus {
				t.Errorf("%s is migrated by status: %v, and has a status: %v", crd.Name, !hasStatus, hasStatus)
			}
			checkMigrationRights(t, rules, crd, hasStatus)
		}
	}
}

func migrations(t *testing.T, provider reconciling.Provider) map[string]crdmigrator.ByObjectConfig {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := provider.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	configs := map[string]crdmigrator.ByObjectConfig{}
	for object, config := range provider.Versioned {
		gvk, err := apiutil.GVKForObject(object, scheme)
		if err != nil {
			t.Fatal(err)
		}
		configs[contract.CalculateCRDName(gvk.Group, gvk.Kind)] = config
	}
	return configs
}

func checkMigrationRights(t *testing.T, rules []rbacv1.PolicyRule, crd apiextensionsv1.CustomResourceDefinition, hasStatus bool) {
	t.Helper()
	const crds = "customresourcedefinitions"
	allowed := func(group, resource, name, verb string) {
		if !slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.APIGroups, group) && slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, verb) &&
				(name == "" && r.ResourceNames == nil || name != "" && slices.Contains(r.ResourceNames, name))
		}) {
			t.Errorf("%s: the manager cannot %s %s %s", crd.Name, verb, resource, name)
		}
	}
	for _, verb := range []string{"get", "list", "watch"} {
		allowed(apiextensionsv1.GroupName, crds, "", verb)
	}
	allowed(apiextensionsv1.GroupName, crds, crd.Name, "patch")
	allowed(apiextensionsv1.GroupName, crds+"/status", crd.Name, "patch")
	for _, verb := range []string{"list", "get", "patch"} {
		allowed(crd.Spec.Group, crd.Spec.Names.Plural, "", verb)
	}
	if hasStatus {
		allowed(crd.Spec.Group, crd.Spec.Names.Plural+"/status", "", "patch")
	}
}
