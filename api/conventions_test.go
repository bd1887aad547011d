package api_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// TestReasonsAreDocumented_IC03 (IC-03): what cannot be mended is a condition with a documented reason, so every condition
// type and every reason says what it means.
func TestReasonsAreDocumented_IC03(t *testing.T) {
	files, err := filepath.Glob("*/v1beta2/*.go")
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
					t.Errorf("%s: %s has no comment that says what it means", file, name)
				}
			}
			return false
		})
	}
	if found < 50 {
		t.Errorf("only %d reasons and conditions found", found)
	}
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

// TestNoTerminalFailures_CP08_CP11 (CP-08, CP-11): failures are conditions, which can pass; and every control plane machine is a Node
// of its cluster, so that no control plane claims to be managed by others.
func TestNoTerminalFailures_CP08_CP11(t *testing.T) {
	files, err := filepath.Glob("../config/*/crd/bases/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("only %v", files)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, crd); err != nil {
			t.Fatal(err)
		}
		for _, v := range crd.Spec.Versions {
			status := v.Schema.OpenAPIV3Schema.Properties["status"]
			for _, field := range []string{"failureReason", "failureMessage", "externalManagedControlPlane"} {
				if _, has := status.Properties[field]; has {
					t.Errorf("%s: status.%s", crd.Name, field)
				}
			}
			if _, has := status.Properties["conditions"]; !has && len(status.Properties) > 0 && !strings.HasSuffix(crd.Spec.Names.Kind, "Template") {
				t.Errorf("%s: no status.conditions", crd.Name)
			}
		}
	}
}
