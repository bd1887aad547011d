// Package testcrds reads in tests the CRDs of the providers.
package testcrds

import (
	"io/fs"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/config"
)

// All returns the CRDs of the providers, as their files contain them.
func All(t testing.TB) (all []*apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	files, err := fs.Glob(config.FS, "*/crd/bases/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := config.FS.ReadFile(file)
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
