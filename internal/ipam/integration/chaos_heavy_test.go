//go:build e2e

package integration

import "testing"

// Never twice, with thousands of claims and many more managers killed. It takes
// some minutes:
//
//	go test -tags e2e -timeout 30m -run TestNeverTwiceHeavy ./internal/ipam/integration
func TestNeverTwiceHeavy(t *testing.T) { testNeverTwice(t, 90, 3000, 60) }
