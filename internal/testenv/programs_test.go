package testenv_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv"
)

// TestKubernetesPrograms: each build of Kubernetes contains the programs that envtest, capstan-init and the embedded management plane
// start. A test in the module of a minor would link all of Kubernetes once more.
func TestKubernetesPrograms(t *testing.T) {
	assets, err := testenv.Assets()
	if err != nil {
		t.Fatal(err)
	}
	builds, err := filepath.Glob(filepath.Join(filepath.Dir(assets), "v*", "capstan-kube"))
	if err != nil || len(builds) == 0 {
		t.Fatalf("expected builds of Kubernetes in %s, found none: run `make build-kube` (%v)", filepath.Dir(assets), err)
	}
	for _, build := range builds {
		out, err := exec.Command(build, "--list").Output()
		if err != nil {
			t.Errorf("%s --list: %v", build, err)
		}
		have := strings.Fields(string(out))
		for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"} {
			if !slices.Contains(have, name) {
				t.Errorf("%s has no program %s: it has %v", build, name, have)
			}
		}
	}
}
