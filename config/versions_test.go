package config

import (
	"io/fs"
	"os"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// ALL-14: released versions are still served, and versions.txt contains every kind.
func TestReleasedVersionsAreServed(t *testing.T) {
	served := map[string]bool{}
	files, err := fs.Glob(FS, "*/crd/bases/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := FS.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		stored := 0
		for _, version := range crd.Spec.Versions {
			served[crd.Name+" "+version.Name] = version.Served
			if version.Storage {
				stored++
			}
		}
		if stored != 1 {
			t.Errorf("%s stores %d versions, want one", crd.Name, stored)
		}
	}
	released, err := os.ReadFile("versions.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(released)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if !served[line] {
			t.Errorf("%s was released and is no longer served", line)
		}
		delete(served, line)
	}
	for version := range served {
		t.Errorf("%s is not in versions.txt", version)
	}
}
