package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// TestReasonsAreConstants (IC-03): the reasons of conditions are constants of the API, because the page of conditions contains these. The
// test finds texts in calls of SetCondition, in literals of metav1.Condition, and in assignments to reasons.
func TestReasonsAreConstants(t *testing.T) {
	files := 0
	for _, folder := range []string{"infrastructure", "controlplane", "bootstrap", "ipam", "expiry"} {
		err := filepath.WalkDir(filepath.Join("../internal", folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			positions := token.NewFileSet()
			file, err := parser.ParseFile(positions, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			files++
			ast.Inspect(file, func(n ast.Node) bool {
				for _, reason := range conditionReasons(n) {
					if literal, ok := reason.(*ast.BasicLit); ok && literal.Value != `""` {
						t.Errorf("%s: the reason %s is a text: use a constant of the API", positions.Position(literal.Pos()), literal.Value)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 100 {
		t.Errorf("found only %d files", files)
	}
}

// conditionReasons returns the expressions that a node uses as reasons of conditions.
func conditionReasons(n ast.Node) (reasons []ast.Expr) {
	switch n := n.(type) {
	case *ast.CallExpr:
		if function, ok := n.Fun.(*ast.SelectorExpr); ok && function.Sel.Name == "SetCondition" && len(n.Args) > 3 {
			reasons = append(reasons, n.Args[3])
		}
	case *ast.CompositeLit:
		if kind, ok := n.Type.(*ast.SelectorExpr); !ok || kind.Sel.Name != "Condition" {
			return nil
		}
		for _, e := range n.Elts {
			if pair, ok := e.(*ast.KeyValueExpr); ok && nameOf(pair.Key) == "Reason" {
				reasons = append(reasons, pair.Value)
			}
		}
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if strings.EqualFold(nameOf(to), "reason") && len(n.Lhs) == len(n.Rhs) {
				reasons = append(reasons, n.Rhs[i])
			}
		}
	}
	return reasons
}

// nameOf returns the name of a variable or of a field.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
