//go:build e2e

// Package ipam tests clusters whose machines and endpoint have their addresses from an IP pool, end to
// end (IPAM-07). Needs root and the built binaries.
package ipam

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane that all tests of this package share.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
