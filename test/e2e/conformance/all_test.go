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
)

// All conformance specs, or those with a name that matches "FOCUS". Each of Kubernetes' list must run and pass. "make conformance"
// runs it.
func TestAll(t *testing.T) {
	archives, err := os.ReadDir(filepath.Join(programs(), "images"))
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
	specs := run(t, images, conformance.Run{Focus: focus, Processes: 4, Timeout: 12 * time.Hour, Reports: filepath.Join(testenv.Root(), "dist", "conformance")})
	names, err := conformance.Names(t.Context(), programs(), focus)
	if err != nil {
		t.Fatal(err)
	}
	if err := conformance.Missing(specs, names); err != nil {
		t.Error(err)
	}
}

// Kubernetes' own specs of NetworkPolicy pass. Those that need SCTP between pods do not run: it is a module of the kernel. "make
// test-networkpolicy" runs them.
func TestNetworkPolicy(t *testing.T) {
	run(t, []string{"agnhost", "pause"}, conformance.Run{
		Focus: `\[Feature:NetworkPolicy\]`, Skip: `\[Feature:SCTPConnectivity\]`, Processes: 4, Timeout: 2 * time.Hour,
		Reports: filepath.Join(testenv.Root(), "dist", "networkpolicy"),
	})
}
