//go:build e2e

// Package cluster tests whole clusters on real machines, end to end: created, used, hurt, restarted,
// deleted. Needs root and the built binaries.
package cluster

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane that all tests of this package share.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
