package cli

import (
	"os"
	"os/exec"
	"testing"

	"capstan.dev/capstan/internal/testenv"
)

// TestOtherSystems builds the command for Windows, and compiles it with its tests. It finds code for Linux in the command of
// workstations, that for macOS included: Windows shares less with Linux. `make release` builds for all systems, and
// `make vet-workstations` compiles the tests for all.
func TestOtherSystems(t *testing.T) {
	for _, args := range [][]string{{"build", "-o", os.DevNull, "./cmd/capstan"}, {"vet", "./internal/cli/...", "./cmd/capstan"}} {
		command := exec.CommandContext(t.Context(), "go", args...)
		command.Dir = testenv.Root()
		command.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64")
		if out, err := command.CombinedOutput(); err != nil {
			t.Errorf("go %s: %v\n%s", args[0], err, out)
		}
	}
}
