//go:build e2e

// Package controlplane contains end-to-end tests of control planes with several real machines. The tests scale, roll
// out, damage and repair them while a client writes. They need root and the built binaries.
package controlplane

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane of all tests of this package.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
