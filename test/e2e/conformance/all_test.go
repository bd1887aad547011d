//go:build e2e && conformance

package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/conformance"
	"capstan.dev/capstan/test/e2e/harness"
)

// All conformance specs, or those whose names begin with "[FOCUS]". "make conformance" runs it.
func TestAll(t *testing.T) {
	archives, err := os.ReadDir(filepath.Join(harness.Bin(), "conformance", "images"))
	if err != nil {
		t.Fatal(err)
	}
	var images []string
	for _, archive := range archives {
		images = append(images, strings.TrimSuffix(archive.Name(), ".tar"))
	}
	focus := `\[Conformance\]`
	if group := os.Getenv("CAPSTAN_CONFORMANCE_FOCUS"); group != "" {
		focus = group + ".*" + focus
	}
	run(t, images, conformance.Run{Focus: focus, Processes: 4, Timeout: 12 * time.Hour, Reports: filepath.Join(testenv.Root(), "dist", "conformance")})
}
