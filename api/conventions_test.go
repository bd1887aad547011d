package api_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

// TestReasonsAreDocumented_IC03 (IC-03): what cannot be mended is a condition with a documented reason, so every condition
// type and every reason has a description.
func TestReasonsAreDocumented_IC03(t *testing.T) {
	files, err := filepath.Glob("*/v1beta*/*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			decl, ok := n.(*ast.GenDecl)
			if !ok || decl.Tok != token.CONST {
				return true
			}
			for _, s := range decl.Specs {
				spec := s.(*ast.ValueSpec)
				name := spec.Names[0].Name
				if !strings.HasSuffix(name, "Reason") && !strings.HasSuffix(name, "Condition") {
					continue
				}
				found++
				if spec.Doc == nil && spec.Comment == nil && !mentioned(decl, name) {
					t.Errorf("%s: %s has no comment with its meaning", file, name)
				}
			}
			return false
		})
	}
	if found < 50 {
		t.Errorf("only %d reasons and conditions found", found)
	}
}

// IC-03: the comment of status.conditions names each condition of its kind. The comment of a block of constants names the kinds.
func TestConditionsAreListed_IC03(t *testing.T) {
	kindNames := regexp.MustCompile(`\b(Capstan[A-Z]\w+|EtcdMember)\b`)
	found := 0
	for _, folder := range []string{"bootstrap", "controlplane", "etcd", "infrastructure", "ipam"} {
		packages, lists := parseFolder(t, filepath.Join(folder, "v1beta2")), map[string]string{}
		for _, file := range packages {
			ast.Inspect(file, func(n ast.Node) bool { return conditionList(n, lists) })
		}
		for _, file := range packages {
			for _, decl := range file.Decls {
				block, ok := decl.(*ast.GenDecl)
				if !ok || block.Tok != token.CONST {
					continue
				}
				title, _, _ := strings.Cut(block.Doc.Text(), ".")
				for _, kind := range kindNames.FindAllString(title, -1) {
					for _, condition := range literalConditions(block) {
						found++
						if list, exists := lists[kind]; exists && !strings.Contains(list, condition) {
							t.Errorf("%s: the comment of status.conditions does not name %s", kind, condition)
						}
					}
				}
			}
		}
	}
	if found < 30 {
		t.Errorf("only %d conditions found", found)
	}
}

// parseFolder parses the files of a package.
func parseFolder(t *testing.T, folder string) (parsed []*ast.File) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		one, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		parsed = append(parsed, one)
	}
	return parsed
}

// conditionList adds the comment of the field Conditions of a status to lists, by kind.
func conditionList(n ast.Node, lists map[string]string) bool {
	spec, ok := n.(*ast.TypeSpec)
	if !ok {
		return true
	}
	kind, isStatus := strings.CutSuffix(spec.Name.Name, "Status")
	if fields, ok := spec.Type.(*ast.StructType); ok && isStatus {
		for _, field := range fields.Fields.List {
			if len(field.Names) == 1 && field.Names[0].Name == "Conditions" {
				lists[kind] = field.Doc.Text()
			}
		}
	}
	return false
}

// literalConditions returns the values of the conditions in a block, without those of core and those that Machines have.
func literalConditions(block *ast.GenDecl) (conditions []string) {
	for _, s := range block.Specs {
		spec := s.(*ast.ValueSpec)
		if !strings.HasSuffix(spec.Names[0].Name, "Condition") {
			continue
		}
		if value, ok := spec.Values[0].(*ast.BasicLit); ok && !strings.Contains(spec.Doc.Text(), "of a Machine:") {
			conditions = append(conditions, strings.Trim(value.Value, `"`))
		}
	}
	return conditions
}

// mentioned says whether the comment of another constant of the same block speaks of this one, too.
func mentioned(decl *ast.GenDecl, name string) bool {
	for _, s := range decl.Specs {
		if strings.Contains(s.(*ast.ValueSpec).Doc.Text(), name) {
			return true
		}
	}
	return false
}

// TestFieldsOfTheContract (ALL-09, ALL-16, IC-02, IC-03, IC-04, IM-04, CP-03, CP-06, CP-08, CP-09, CP-11, MP-09, BC-03): each
// version of a CRD has the fields of its contract, with their types, and none of the other contract.
func TestFieldsOfTheContract(t *testing.T) {
	failures := map[string]string{"status.failureReason": "string", "status.failureMessage": "string", "status.conditions[].severity": "string"}
	conditions := map[string]string{"status.conditions[].observedGeneration": "integer"}
	all := testcrds.All(t)
	for kind, contract := range map[string]struct{ v1beta1, v1beta2 map[string]string }{
		"capstanclusters": {
			map[string]string{"status.ready": "boolean", "status.failureDomains": "object"},
			map[string]string{"status.initialization.provisioned": "boolean", "status.failureDomains[].name": "string"},
		},
		"capstanmachines": {
			map[string]string{"status.ready": "boolean", "status.failureDomain": "string"},
			map[string]string{"status.initialization.provisioned": "boolean", "status.failureDomain": "string"},
		},
		"capstanmachinepools": {
			map[string]string{"status.ready": "boolean"},
			map[string]string{"status.initialization.provisioned": "boolean", "status.ready": "boolean"},
		},
		"capstanconfigs": {
			map[string]string{"status.ready": "boolean", "status.dataSecretName": "string"},
			map[string]string{"status.initialization.dataSecretCreated": "boolean", "status.dataSecretName": "string"},
		},
		"capstancontrolplanes": {
			map[string]string{
				"spec.machineTemplate.metadata": "object", "spec.machineTemplate.infrastructureRef.apiVersion": "string",
				"spec.machineTemplate.infrastructureRef.namespace": "string",
				"spec.machineTemplate.nodeDrainTimeout":            "string", "spec.machineTemplate.nodeVolumeDetachTimeout": "string",
				"spec.machineTemplate.nodeDeletionTimeout": "string",
				"spec.replicas": "integer", "status.replicas": "integer", "status.readyReplicas": "integer",
				"status.updatedReplicas": "integer", "status.unavailableReplicas": "integer", "status.selector": "string",
				"status.version": "string", "status.initialized": "boolean", "status.ready": "boolean",
				"status.externalManagedControlPlane": "boolean", "status.versions[].version": "string",
			},
			map[string]string{
				"spec.machineTemplate.metadata": "object", "spec.machineTemplate.spec.infrastructureRef.apiGroup": "string",
				"spec.machineTemplate.spec.deletion.nodeDrainTimeoutSeconds":        "integer",
				"spec.machineTemplate.spec.deletion.nodeVolumeDetachTimeoutSeconds": "integer",
				"spec.machineTemplate.spec.deletion.nodeDeletionTimeoutSeconds":     "integer",
				"spec.replicas": "integer", "status.replicas": "integer", "status.readyReplicas": "integer",
				"status.availableReplicas": "integer", "status.upToDateReplicas": "integer", "status.selector": "string",
				"status.version": "string", "status.versions[].version": "string",
				"status.initialization.controlPlaneInitialized": "boolean",
			},
		},
	} {
		found := slices.DeleteFunc(slices.Clone(all), func(crd *apiextensionsv1.CustomResourceDefinition) bool { return crd.Spec.Names.Plural != kind })
		if len(found) != 1 {
			t.Fatalf("%s: %d CRDs", kind, len(found))
		}
		crd := found[0]
		maps.Copy(contract.v1beta1, failures)
		maps.Copy(contract.v1beta2, conditions)
		wanted := map[string]map[string]string{"v1beta1": contract.v1beta1, "v1beta2": contract.v1beta2}
		if len(crd.Spec.Versions) != len(wanted) {
			t.Errorf("%s has %d versions, want %d", kind, len(crd.Spec.Versions), len(wanted))
		}
		for _, v := range crd.Spec.Versions {
			other := wanted[map[string]string{"v1beta1": "v1beta2", "v1beta2": "v1beta1"}[v.Name]]
			for field, want := range wanted[v.Name] {
				if got := typeOf(*v.Schema.OpenAPIV3Schema, field); got != want {
					t.Errorf("%s %s: %s has the type %q, want %q", kind, v.Name, field, got, want)
				}
			}
			for field, foreign := range other {
				if got := typeOf(*v.Schema.OpenAPIV3Schema, field); got == foreign && wanted[v.Name][field] == "" {
					t.Errorf("%s %s: %s belongs to the other contract", kind, v.Name, field)
				}
			}
		}
	}
}

// TestKinds (ALL-01, ALL-02, ALL-06, IPAM-01): only hosts and global pools are cluster-scoped, each kind has a list and short names, and
// each field has a description.
func TestKinds(t *testing.T) {
	crds := testcrds.All(t)
	if len(crds) < 12 {
		t.Fatalf("%d CRDs", len(crds))
	}
	for _, crd := range crds {
		names := crd.Spec.Names
		if clusterScoped := names.Kind == "CapstanHost" || names.Kind == "GlobalCapstanIPPool"; clusterScoped != (crd.Spec.Scope == apiextensionsv1.ClusterScoped) {
			t.Errorf("ALL-01: %s is %s", names.Kind, crd.Spec.Scope)
		}
		if names.ListKind != names.Kind+"List" {
			t.Errorf("ALL-02: the list of %s is %s", names.Kind, names.ListKind)
		}
		if len(names.ShortNames) == 0 || !slices.Contains(names.Categories, "capstan") {
			t.Errorf("ALL-06: %s has the short names %v and the categories %v", names.Kind, names.ShortNames, names.Categories)
		}
		for _, version := range crd.Spec.Versions {
			if template := strings.HasSuffix(names.Kind, "Template"); template != (typeOf(*version.Schema.OpenAPIV3Schema, "spec.template.spec") == "object") {
				t.Errorf("ALL-02: %s %s is a template: %t", names.Kind, version.Name, template)
			}
			for _, field := range undescribed(names.Kind, *version.Schema.OpenAPIV3Schema) {
				t.Errorf("ALL-06: %s of %s has no description", field, version.Name)
			}
		}
	}
}

// undescribed lists the fields without a text for `kubectl explain`.
func undescribed(path string, schema apiextensionsv1.JSONSchemaProps) (out []string) {
	for name, field := range schema.Properties {
		if field.Description == "" && name != "metadata" {
			out = append(out, path+"."+name)
		}
		out = append(out, undescribed(path+"."+name, field)...)
	}
	if schema.Items != nil && schema.Items.Schema != nil {
		out = append(out, undescribed(path+"[]", *schema.Items.Schema)...)
	}
	return out
}

// typeOf returns the type of a field, or nothing if the schema does not have it. "[]" stands for the items of a list.
func typeOf(schema apiextensionsv1.JSONSchemaProps, path string) string {
	for name := range strings.SplitSeq(path, ".") {
		field, items := strings.CutSuffix(name, "[]")
		next, ok := schema.Properties[field]
		if !ok || items && next.Items == nil {
			return ""
		}
		if schema = next; items {
			schema = *next.Items.Schema
		}
	}
	return schema.Type
}
