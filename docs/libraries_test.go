package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"
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
		for path, version := range required(t, file) {
			if want, ok := expected[path]; ok && version != want {
				t.Errorf("%s requires %s %s, and the root module %s: run hack/libraries.sh %s", file, path, version, want, folder)
			}
		}
	}
}

// libraries are the modules of client-go, with their versions.
func libraries(t *testing.T) map[string]string {
	t.Helper()
	list := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}} {{.Version}}{{end}}",
		"k8s.io/client-go/dynamic", "k8s.io/client-go/kubernetes", "k8s.io/client-go/tools/cache", "k8s.io/client-go/tools/clientcmd")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if path, version, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			versions[path] = version
		}
	}
	return versions
}

// required are the requirements of a module, with the version of a replacement.
func required(t *testing.T, file string) map[string]string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	module, err := modfile.Parse(file, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for _, r := range module.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	for _, r := range module.Replace {
		versions[r.Old.Path] = r.New.Version
	}
	return versions
}
