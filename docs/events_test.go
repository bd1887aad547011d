package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

var (
	reasonConstant = regexp.MustCompile(`(?m)^\s*(\w+Reason)\s+=\s+"(\w+)"`)
	eventRow       = regexp.MustCompile("(?m)^\\| (`\\w+`(?:, `\\w+`)*) \\|")
)

// reasonArguments are the functions that record events, with the position of the reason in their arguments.
var reasonArguments = map[string]int{
	"Eventf": 3, "internal/controlplane": 2, "internal/infrastructure/machinepool": 1, "internal/ipam/addressclaim": 2,
}

// TestEvents: the page of events lists each reason in the code, and no other. Reasons that are variables are those of
// conditions, and the page names these conditions.
func TestEvents(t *testing.T) {
	data, err := os.ReadFile("events.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, row := range eventRow.FindAllStringSubmatch(string(data), -1) {
		for _, reason := range strings.Split(row[1], ", ") {
			listed = append(listed, strings.Trim(reason, "`"))
		}
	}
	constants, recorded := reasonConstants(t), []string{}
	for _, r := range recordedReasons(t) {
		if constants[r] != "" {
			r = constants[r]
		}
		recorded = append(recorded, r)
	}
	slices.Sort(recorded)
	for _, reason := range slices.Compact(recorded) {
		if !slices.Contains(listed, reason) {
			t.Errorf("events.md has no row for the reason %s", reason)
		}
	}
	for _, reason := range listed {
		if !slices.Contains(recorded, reason) {
			t.Errorf("events.md has the reason %s, and no code records it", reason)
		}
	}
	if len(listed) < 20 {
		t.Errorf("found only %d reasons", len(listed))
	}
}

// reasonConstants returns the values of the constants with reasons.
func reasonConstants(t *testing.T) map[string]string {
	t.Helper()
	values := map[string]string{"ProvisionedReason": clusterv1.ProvisionedReason}
	files, err := filepath.Glob("../api/*/v1beta2/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range reasonConstant.FindAllStringSubmatch(string(data), -1) {
			values[c[1]] = c[2]
		}
	}
	return values
}

// recordedReasons returns the reasons of the events in the code: texts, and names of constants.
func recordedReasons(t *testing.T) (reasons []string) {
	t.Helper()
	err := filepath.WalkDir("../internal", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(data), "vent") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, data, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		folder := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../")
		ast.Inspect(file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				reasons = append(reasons, reasonOf(folder, call)...)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return reasons
}

// reasonOf returns the reason of a call that records an event, unless a variable contains it.
func reasonOf(folder string, call *ast.CallExpr) []string {
	function, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	name := function.Sel.Name
	if name == "event" {
		name = folder
	}
	at, found := reasonArguments[name]
	if !found || at >= len(call.Args) {
		return nil
	}
	switch reason := call.Args[at].(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(reason.Value)
		if err == nil {
			return []string{text}
		}
	case *ast.SelectorExpr:
		if strings.HasSuffix(reason.Sel.Name, "Reason") && reason.Sel.Name != "Reason" {
			return []string{reason.Sel.Name}
		}
	}
	return nil
}
