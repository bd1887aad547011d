//go:build e2e

package integration

import "testing"

// Never twice, with thousands of claims and many more managers killed. It takes
// some minutes, so that only `make test-e2e` runs it.
func TestNeverTwiceHeavy(t *testing.T) { testNeverTwice(t, 90, 2000, 10) }
