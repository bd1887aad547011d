//go:build e2e

package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/versions"
)

// TestInit is the package of the PID 1 of machines without a cluster.
const TestInit = "capstan.dev/capstan/test/e2e/host/testinit"

// RunWithPrograms runs the tests of a package with a new folder that contains testinit, and returns the exit code.
func RunWithPrograms(m *testing.M, folder *string) int {
	if os.Geteuid() != 0 {
		fmt.Println("these tests create containers and networks: run them as root")
		return 1
	}
	dir, err := os.MkdirTemp("", "capstan-e2e-bin-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := GoBuild(filepath.Join(dir, filepath.Base(TestInit)), TestInit); err != nil {
		fmt.Println(err)
		return 1
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Println(err)
		return 1
	}
	*folder = dir
	return m.Run()
}

// StandIns returns a new assets folder for machines that start in a second: testinit is their PID 1 and their kubelet, whose presence is all
// that capstand checks. runc is the real one. programs is the folder of RunWithPrograms.
func StandIns(t *testing.T, programs string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	testinit := filepath.Join(programs, filepath.Base(TestInit))
	for to, from := range map[string]string{
		"capstan-init":  testinit,
		"node/bin/runc": filepath.Join(Bin(), "node", "bin", "runc"),
		"kubernetes/" + versions.Default + "/kubelet": testinit,
	} {
		data, err := os.ReadFile(from)
		if err != nil {
			t.Fatalf("%v; run `make build` first", err)
		}
		path := filepath.Join(folder, to)
		expect.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		expect.NoError(t, os.WriteFile(path, data, 0o755))
	}
	return folder
}

// GoBuild builds the program of a package.
func GoBuild(out, pkg string, flags ...string) error {
	cmd := exec.Command("go", append(append([]string{"build", "-o", out}, flags...), pkg)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, text)
	}
	return nil
}
