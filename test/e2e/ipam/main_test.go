//go:build e2e

// Package ipam contains end-to-end tests of clusters whose machines and endpoint have addresses from an IP pool
// (IPAM-07). It needs root and the built binaries.
package ipam

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane of all tests of this package.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
