package api_test

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

// sameMeaning maps fields of v1beta1 to those of v1beta2. A template has the fields of its objects.
var sameMeaning = strings.NewReplacer(
	".spec.template.spec.", ".spec.",
	".status.v1beta2.", ".status.",
	"machineTemplate.minReadySeconds", "machineTemplate.spec.minReadySeconds",
	"machineTemplate.readinessGates", "machineTemplate.spec.readinessGates",
	"machineTemplate.taints", "machineTemplate.spec.taints",
)

// otherContract are the fields that differ because the contracts do. "*" stands for all fields that begin like this.
var otherContract = []string{
	// Objects that contain the others.
	".status.v1beta2", ".spec.machineTemplate", ".spec.machineTemplate.spec",
	// The same settings with another type.
	".spec.machineTemplate.infrastructureRef*", ".spec.machineTemplate.spec.infrastructureRef*",
	".spec.machineTemplate.node*", ".spec.machineTemplate.spec.deletion*", ".status.failureDomains*",
	// Fields of one contract.
	".status.ready", ".status.initialized", ".status.initialization*", ".status.failureReason", ".status.failureMessage",
	".status.updatedReplicas", ".status.unavailableReplicas", ".status.upToDateReplicas", ".status.externalManagedControlPlane",
}

// TestVersionsHaveEqualRules: the versions of a kind have the same fields with the same rules, patterns and bounds. Otherwise a value could
// be stored through one version that the other refuses.
func TestVersionsHaveEqualRules(t *testing.T) {
	kinds, used := 0, map[string]bool{}
	for _, crd := range testcrds.All(t) {
		versions := map[string]map[string]string{}
		for _, v := range crd.Spec.Versions {
			versions[v.Name] = map[string]string{}
			collectRules(t, v.Name, "", *v.Schema.OpenAPIV3Schema, versions[v.Name])
		}
		if len(versions) < 2 {
			continue
		}
		kinds++
		v1beta1, v1beta2 := versions["v1beta1"], versions["v1beta2"]
		all := maps.Clone(v1beta1)
		maps.Copy(all, v1beta2)
		for _, field := range slices.Sorted(maps.Keys(all)) {
			if v1beta1[field] == v1beta2[field] {
				continue
			}
			if i := slices.IndexFunc(otherContract, func(o string) bool { return covers(o, field) }); i >= 0 {
				used[otherContract[i]] = true
				continue
			}
			t.Errorf("%s%s differs:\nv1beta1: %s\nv1beta2: %s", crd.Spec.Names.Kind, field, v1beta1[field], v1beta2[field])
		}
	}
	if kinds < 9 {
		t.Errorf("only %d kinds have two versions", kinds)
	}
	for _, o := range otherContract {
		if !used[o] {
			t.Errorf("no kind differs in %s: remove it from the list", o)
		}
	}
}

// covers reports whether an entry of otherContract covers a field.
func covers(entry, field string) bool {
	prefix, whole := strings.CutSuffix(entry, "*")
	return field == entry || whole && strings.HasPrefix(field, prefix)
}

// collectRules writes the rules of each field, as JSON, by its path in v1beta2.
func collectRules(t *testing.T, version, path string, schema apiextensionsv1.JSONSchemaProps, out map[string]string) {
	t.Helper()
	if version == "v1beta1" && path == ".status.conditions" {
		return // Cluster API's own type. The conditions of v1beta2 are in status.v1beta2.
	}
	for name, field := range schema.Properties {
		collectRules(t, version, path+"."+name, field, out)
	}
	if schema.Items != nil && schema.Items.Schema != nil {
		collectRules(t, version, path+"[]", *schema.Items.Schema, out)
	}
	if schema.AdditionalProperties != nil && schema.AdditionalProperties.Schema != nil {
		collectRules(t, version, path+"{}", *schema.AdditionalProperties.Schema, out)
	}
	schema.Description, schema.Properties, schema.Items, schema.AdditionalProperties = "", nil, nil, nil
	rules, err := json.Marshal(schema)
	if err != nil {
		t.Fatal(err)
	}
	out[sameMeaning.Replace(path)] = string(rules)
}
