package config_test

import (
	"os"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

// ALL-14: released versions are still served, and versions.txt contains every kind.
func TestReleasedVersionsAreServed(t *testing.T) {
	served := map[string]bool{}
	for _, crd := range testcrds.All(t) {
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
