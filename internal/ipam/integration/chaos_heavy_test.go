//go:build soak

package integration

import "testing"

// TestNoDuplicatesHeavy runs the test of duplicate addresses with thousands of claims and many more killed managers. It
// takes some minutes of two processors, so only `make soak` runs it.
func TestNoDuplicatesHeavy(t *testing.T) {
	testNoDuplicates(t, &churn{names: 90, claims: 2000, kills: 10, pauses: 3})
}
