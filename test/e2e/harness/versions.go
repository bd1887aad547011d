//go:build e2e

package harness

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/mod/semver"
)

// FormerMinor is the newest version of the minor before KubernetesVersion's, of those that the box can run.
func FormerMinor(t *testing.T) string {
	t.Helper()
	dirs, err := os.ReadDir(filepath.Join(Bin(), "kubernetes"))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, d := range dirs {
		if semver.IsValid(d.Name()) && semver.Compare(semver.MajorMinor(d.Name()), semver.MajorMinor(KubernetesVersion)) < 0 {
			found = append(found, d.Name())
		}
	}
	if len(found) == 0 {
		t.Fatal("bin/kubernetes has no version of a former minor: run `make build-kube`")
	}
	return slices.MaxFunc(found, semver.Compare)
}
