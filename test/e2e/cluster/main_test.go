//go:build e2e

// Package cluster contains end-to-end tests of whole clusters on real machines. The tests create, use, damage, restart
// and delete them. They need root and the built binaries.
package cluster

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane of all tests of this package.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
