// Package versions finds the built versions of Kubernetes for tests and benchmarks, and has the default one.
//
// Layer: test. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package versions

import (
	"errors"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/mod/semver"
)

// Default is the Kubernetes version of `make test` and of the benchmarks: that of the first minor in KUBE_MINORS of the Makefile.
const Default = "v1.36.3"

// FormerMinor returns the newest built version with an earlier minor than the given version. bin is the folder of the
// built binaries.
func FormerMinor(bin, version string) (string, error) {
	dirs, err := os.ReadDir(filepath.Join(bin, "kubernetes"))
	if err != nil {
		return "", err
	}
	var found []string
	for _, d := range dirs {
		if semver.IsValid(d.Name()) && semver.Compare(semver.MajorMinor(d.Name()), semver.MajorMinor(version)) < 0 {
			found = append(found, d.Name())
		}
	}
	if len(found) == 0 {
		return "", errors.New("bin/kubernetes has no version of the previous minor: run `make build-kube`")
	}
	return slices.MaxFunc(found, semver.Compare), nil
}
