package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"
	modules "golang.org/x/mod/module"
)

// programs are the modules of the programs that a plane and its clusters run, and of the tests of Kubernetes. The module of an older
// Kubernetes minor has another client-go.
var programs = []string{"kube/v1.36", "kube/conformance", "etcd", "node", "capi", "coredns", "metrics-server"}

// TestLibraries: all programs have client-go, and the libraries that client-go uses, in the versions of the root module. Go compiles them
// once. With other versions, the first build of a cluster took three minutes more.
func TestLibraries(t *testing.T) {
	expected := libraries(t)
	if len(expected) < 20 {
		t.Errorf("found only %d libraries of client-go", len(expected))
	}
	for _, folder := range programs {
		file := filepath.Join("..", folder, "go.mod")
		for _, found := range required(t, file) {
			if want, ok := expected[found.Path]; ok && found.Version != want {
				t.Errorf("%s requires %s, and the root module %s: run hack/libraries.sh %s", file, found, want, folder)
			}
		}
	}
}

// libraries are the modules that hack/libraries.sh prints, with their versions.
func libraries(t *testing.T) map[string]string {
	t.Helper()
	list := exec.Command("../hack/libraries.sh")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if path, version, ok := strings.Cut(strings.TrimSpace(line), "@"); ok {
			versions[path] = version
		}
	}
	return versions
}

// required are the requirements and the replacements of a module. Both need the same version: the paths in a compiled package are those of
// the requirement, so Go compiles it again if only its replacement is the same.
func required(t *testing.T, file string) (out []modules.Version) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := modfile.Parse(file, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range parsed.Require {
		out = append(out, r.Mod)
	}
	for _, r := range parsed.Replace {
		out = append(out, modules.Version{Path: r.Old.Path, Version: r.New.Version})
	}
	return out
}
