//go:build e2e && flux

// Package flux runs the controllers of Flux against a management plane. The test needs root, git and the built binaries.
package flux

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
