//go:build e2e

// Package controlplane tests control planes of several machines on real machines, end to end: scaled,
// rolled out, hurt, repaired, under a load of writes. Needs root and the built binaries.
package controlplane

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane that all tests of this package share.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
