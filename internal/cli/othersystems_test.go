package cli

import (
	"os"
	"os/exec"
	"testing"

	"capstan.dev/capstan/internal/testenv"
)

// TestOtherSystems builds the command for Windows. It finds code for Linux in the command of workstations, that for macOS
// included: Windows shares less with Linux. `make release` builds for all systems.
func TestOtherSystems(t *testing.T) {
	build := exec.CommandContext(t.Context(), "go", "build", "-o", os.DevNull, "./cmd/capstan")
	build.Dir = testenv.Root()
	build.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64")
	if out, err := build.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
