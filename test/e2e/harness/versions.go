//go:build e2e

package harness

import (
	"testing"

	"capstan.dev/capstan/test/versions"
)

// FormerMinor returns the newest version of the minor before KubernetesVersion's, among the built versions.
func FormerMinor(t *testing.T) string {
	t.Helper()
	version, err := versions.FormerMinor(Bin(), KubernetesVersion)
	if err != nil {
		t.Fatal(err)
	}
	return version
}
