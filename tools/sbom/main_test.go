package main

import (
	"bytes"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/spdx/tools-golang/json"
)

// TestBillOfMaterials: the document names every module of a program, parses, and is the same at the second time.
func TestBillOfMaterials(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	var first, second bytes.Buffer
	for _, out := range []*bytes.Buffer{&first, &second} {
		if err := run(out, "test", "https://capstan.dev/sbom/test", []string{program}); err != nil {
			t.Fatal(err)
		}
	}
	if first.String() != second.String() {
		t.Error("two documents of one program differ")
	}
	doc, err := json.Read(&first)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, p := range doc.Packages {
		found[p.PackageName+"@"+p.PackageVersion] = true
	}
	info, _ := debug.ReadBuildInfo()
	if len(info.Deps) == 0 {
		t.Fatal("the test program has no modules")
	}
	for _, m := range info.Deps {
		if !found[m.Path+"@"+m.Version] {
			t.Errorf("the document does not name %s@%s", m.Path, m.Version)
		}
	}
	if !found["stdlib@"+info.GoVersion] || !strings.HasPrefix(doc.CreationInfo.Created, "2023-11-14") {
		t.Errorf("%v, created %s", found, doc.CreationInfo.Created)
	}
}

// TestBadInput: the error names the problem.
func TestBadInput(t *testing.T) {
	for name, c := range map[string]struct {
		namespace, program, want string
	}{
		"no namespace":     {"", "/bin/sh", "wanted -namespace"},
		"no such program":  {"https://x", "/does/not/exist", "no such file"},
		"not a Go program": {"https://x", "/bin/sh", "/bin/sh"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := run(&bytes.Buffer{}, "x", c.namespace, []string{c.program}); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("want an error with %q, got %v", c.want, err)
			}
		})
	}
}
