//go:build e2e && gitops

// Package gitops runs Flux and Argo CD against a management plane. The tests need root, git and the built binaries.
package gitops

import (
	"os"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }
