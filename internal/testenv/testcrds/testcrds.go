// Package testcrds reads CRDs in tests.
package testcrds

import (
	"io/fs"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/config"
)

// All returns the CRDs of the providers, as their files contain them.
func All(t testing.TB) []*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	return In(t, config.FS, "*/crd/bases/*.yaml")
}

// In returns the CRDs in the files that match a pattern. There must be one at least.
func In(t testing.TB, folder fs.FS, pattern string) (all []*apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	files, err := fs.Glob(folder, pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(files), err)
	}
	for _, file := range files {
		data, err := fs.ReadFile(folder, file)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all = append(all, crd)
	}
	return all
}
