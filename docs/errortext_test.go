package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNoErrorTexts checks that no decision depends on the text of an error, because a library may change it. errors.Is,
// errors.As, the functions of apierrors and the reasons of package refusal identify errors.
func TestNoErrorTexts(t *testing.T) {
	eachSource(t, func(set *token.FileSet, file *ast.File) {
		for _, call := range errorTextSearches(file) {
			t.Errorf("%s searches the text of an error: use errors.Is, errors.As, or a typed error", set.Position(call.Pos()))
		}
	})
}

// TestErrorTextsAreUniform checks that errors say "expected ..., found ...", and not "wanted" or "got".
func TestErrorTextsAreUniform(t *testing.T) {
	other := regexp.MustCompile(`\b(wanted|got)\b`)
	eachSource(t, func(set *token.FileSet, file *ast.File) {
		for _, text := range errorTexts(file) {
			if other.MatchString(text.Value) {
				t.Errorf("%s: an error says %s: write \"expected ..., found ...\"", set.Position(text.Pos()), text.Value)
			}
		}
	})
}

// TestSecretsHaveTheNameOfTheirKind checks that texts write the kind Secret like all other kinds.
func TestSecretsHaveTheNameOfTheirKind(t *testing.T) {
	other := regexp.MustCompile(`\b(the|this|in|its) secret\b|\bsecret [%<]`)
	eachSource(t, func(set *token.FileSet, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING && other.MatchString(text.Value) {
				t.Errorf("%s: a text says %s: write Secret", set.Position(text.Pos()), text.Value)
			}
			return true
		})
	})
}

// eachSource parses the files of the programs, without their tests and the package for tests.
func eachSource(t *testing.T, visit func(*token.FileSet, *ast.File)) {
	t.Helper()
	files := 0
	for _, root := range []string{"api", "cmd", "internal"} {
		err := filepath.WalkDir(filepath.Join("..", root), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "/testenv/") {
				return err
			}
			files++
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return err
			}
			visit(set, file)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 350 {
		t.Errorf("found %d files", files)
	}
}

// errorTexts returns the first arguments of errors.New and fmt.Errorf.
func errorTexts(file *ast.File) (out []*ast.BasicLit) {
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		function, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || function.Sel.Name != "Errorf" && function.Sel.Name != "New" {
			return true
		}
		if from, ok := function.X.(*ast.Ident); !ok || from.Name != "fmt" && from.Name != "errors" {
			return true
		}
		if text, ok := call.Args[0].(*ast.BasicLit); ok && text.Kind == token.STRING {
			out = append(out, text)
		}
		return true
	})
	return out
}

func TestErrorTextSearches(t *testing.T) {
	for body, want := range map[string]int{
		`_ = strings.Contains(err.Error(), "gone")`:                    1,
		`_ = strings.HasPrefix(strings.ToLower(err.Error()), "gone")`:  1,
		`text := err.Error(); _ = strings.Contains(text, "gone")`:      1,
		`_ = gone.MatchString(err.Error())`:                            1,
		`_ = strings.Contains(status.Convert(err).Message(), "gone")`:  1,
		`switch { case strings.HasSuffix(cause.err.Error(), "gone"):}`: 1,
		`_ = strings.TrimSpace(err.Error())`:                           0,
		`_ = strings.Contains(name, "gone")`:                           0,
		`_ = fmt.Sprintf("%s", err.Error())`:                           0,
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nfunc f() { "+body+" }", 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(errorTextSearches(file)); got != want {
			t.Errorf("%s: found %d, want %d", body, got, want)
		}
	}
}

// searches are the names of functions that search for a text, in packages strings, bytes and regexp.
var searches = []string{
	"Contains", "ContainsAny", "Count", "Cut", "CutPrefix", "CutSuffix", "EqualFold", "HasPrefix", "HasSuffix", "Index",
	"LastIndex", "Match", "MatchString", "FindString", "FindStringIndex", "FindStringSubmatch",
}

// errorTextSearches returns the calls that search the text of an error: err.Error(), the message of a gRPC status, or a
// variable of the same function with one of them.
func errorTextSearches(file *ast.File) (found []*ast.CallExpr) {
	for _, decl := range file.Decls {
		var texts []string
		isText := func(n ast.Node) (is bool) {
			ast.Inspect(n, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.CallExpr:
					method, ok := n.Fun.(*ast.SelectorExpr)
					is = is || ok && len(n.Args) == 0 && (method.Sel.Name == "Error" || method.Sel.Name == "Message")
				case *ast.Ident:
					is = is || slices.Contains(texts, n.Name)
				}
				return true
			})
			return is
		}
		ast.Inspect(decl, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				for i, left := range n.Lhs {
					if name, ok := left.(*ast.Ident); ok && len(n.Rhs) == len(n.Lhs) && isErrorCall(n.Rhs[i]) {
						texts = append(texts, name.Name)
					}
				}
			case *ast.CallExpr:
				function, ok := n.Fun.(*ast.SelectorExpr)
				if ok && slices.Contains(searches, function.Sel.Name) && slices.ContainsFunc(n.Args, func(a ast.Expr) bool { return isText(a) }) {
					found = append(found, n)
				}
			}
			return true
		})
	}
	return found
}

// isErrorCall reports whether an expression is err.Error().
func isErrorCall(e ast.Expr) bool {
	call, ok := e.(*ast.CallExpr)
	if !ok || len(call.Args) > 0 {
		return false
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	return ok && method.Sel.Name == "Error"
}
