package config_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv"
)

// program is a stand-in for a program in bin/. The packages contain what it prints about itself.
const program = `#!/bin/sh
if [ "$1" = man-pages ]; then echo page >"$2/page.1"; fi
if [ "$1" = version ]; then echo "capstan v0.1.0"; fi
`

// lister is a stand-in for tools/sbom that prints the programs.
const lister = `package main

import (
	"fmt"
	"os"
)

func main() {
	for _, argument := range os.Args[5:] {
		fmt.Println(argument)
	}
}
`

// What a release of the test's checkout contains, without the command and the Kubernetes version.
var (
	ofHost  = []string{"capstand", "capstan-init", "node/bin/runc", "images/pause.tar"}
	ofPlane = []string{"manager", "clusterctl", "capi/capi-core-manager", "capi/crds/clusters.yaml", "capi/repository/cluster-api/v1.0.0/metadata.yaml"}
	// other is what else is in bin/ after tests, other builds and an upgrade of a Kubernetes version.
	other = []string{
		"ssh/usr/sbin/sshd", "flux/source-controller", "tools/helm", "kubernetes/v1.0.0/kubelet", "capi/capi-kubeadm-bootstrap-manager",
		"capi/kubeadm-crds/configs.yaml", "capi/repository/bootstrap-kubeadm/v1.0.0/metadata.yaml",
	}
)

// newCheckout returns a copy of this checkout in which bin/ contains stand-ins, and the file of the Kubernetes version.
func newCheckout(t *testing.T) (root, kubelet string) {
	t.Helper()
	root = t.TempDir()
	for _, folder := range []string{"hack", "config", "docs", "kube/v1.36"} {
		if err := os.CopyFS(filepath.Join(root, folder), os.DirFS(filepath.Join(testenv.Root(), folder))); err != nil {
			t.Fatal(err)
		}
	}
	files := []string{"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "internal/node/provision/audit-policy.yaml"}
	for _, file := range files {
		data, err := os.ReadFile(filepath.Join(testenv.Root(), file))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(root, file), string(data))
	}
	found := regexp.MustCompile(`GIT_VERSION=(\S+)`).FindStringSubmatch(readText(t, "kube", "v1.36", "version.env"))
	kubelet = "kubernetes/" + found[1] + "/kubelet"
	for _, file := range slices.Concat([]string{"capstan", kubelet}, ofHost, ofPlane, other) {
		write(t, filepath.Join(root, "bin", file), program)
	}
	write(t, filepath.Join(root, "tools", "sbom", "main.go"), lister)
	write(t, filepath.Join(root, "tools", "sbom", "go.mod"), "module sbom\n")
	return root, kubelet
}

// write writes a file that can be executed unless its name has an extension.
func write(t *testing.T, file, content string) {
	t.Helper()
	mode := fs.FileMode(0o755)
	if filepath.Ext(file) != "" {
		mode = 0o644
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

// run runs a program in a folder and returns the lines of its output.
func run(t *testing.T, folder, name string, args ...string) []string {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir = folder
	c.Env = append(os.Environ(), "COMPRESSION=none", "SOURCE_DATE_EPOCH=4000000000")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// checkFiles compares lines, of which folders end with a slash, with the wanted files. Each folder must be there too: programs that
// unpack an archive create a missing one with their own umask.
func checkFiles(t *testing.T, what string, lines []string, wanted ...[]string) {
	t.Helper()
	want := map[string]bool{}
	for _, file := range slices.Concat(wanted...) {
		want[file] = true
		for folder := filepath.Dir(file); folder != "."; folder = filepath.Dir(folder) {
			want[folder+"/"] = true
		}
	}
	for _, line := range lines {
		if !want[line] {
			t.Errorf("%s: expected no %s", what, line)
		}
		delete(want, line)
	}
	for file := range want {
		t.Errorf("%s: expected %s, found no such file", what, file)
	}
}

// unpack unpacks a Debian package and returns the folder.
func unpack(t *testing.T, assets, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(assets, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("want one package %s, found %v: %v", pattern, found, err)
	}
	to := t.TempDir()
	run(t, to, "dpkg-deb", "-x", found[0], ".")
	return to
}

// TestShippedFiles: archives, packages and the bill of materials contain the programs of a release, and nothing else that is in bin/. The
// documents of a package lead to files of the package.
func TestShippedFiles(t *testing.T) {
	root, kubelet := newCheckout(t)
	assets := filepath.Join(root, "dist", "assets", releaseVersion)
	workstation := filepath.Join(assets, "capstan-cli-windows-amd64.exe") // Its modules are not those of Linux.
	write(t, workstation, program)
	for _, part := range []string{"host", "plane", "sbom", "packages"} {
		run(t, root, "hack/release.sh", part, releaseVersion)
	}
	ofCommand, ofKubernetes := []string{"capstan"}, []string{kubelet}

	units := []string{"systemd/capstand.service", "systemd/capstand.default"}
	archive := run(t, assets, "tar", "-tzf", "capstan-host-linux-"+runtime.GOARCH+".tar.gz")
	checkFiles(t, "archive of a host", archive, ofCommand, ofKubernetes, ofHost, units)
	archive = run(t, assets, "tar", "-tzf", "capstan-linux-"+runtime.GOARCH+".tar.gz")
	checkFiles(t, "archive of a plane", archive, ofCommand, ofKubernetes, ofHost, ofPlane, units, []string{"systemd/capstan.service"})

	for pattern, want := range map[string][]string{
		"capstan-cli_*.deb": ofCommand, "capstan-kubernetes-*.deb": ofKubernetes, "capstan_*.deb": slices.Concat(ofHost, ofPlane, []string{"systemd/capstand.default"}),
	} {
		lib := filepath.Join(unpack(t, assets, pattern), "usr", "lib", "capstan")
		checkFiles(t, pattern, run(t, lib, "find", ".", "-mindepth", "1", "-type", "d", "-printf", "%P/\n", "-o", "-type", "f", "-printf", "%P\n"), want)
	}
	checkLinks(t, filepath.Join(unpack(t, assets, "capstan-cli_*.deb"), "usr", "share", "doc", "capstan-cli"))

	programs := []string{workstation}
	for _, file := range slices.Concat(ofCommand, ofKubernetes, ofHost, ofPlane) {
		if filepath.Ext(file) == "" {
			programs = append(programs, filepath.Join(root, "bin", file))
		}
	}
	listed := run(t, assets, "cat", "capstan-"+releaseVersion+"-linux-"+runtime.GOARCH+".spdx.json")
	if slices.Sort(programs); !slices.Equal(programs, listed) {
		t.Errorf("bill of materials: want %v, got %v", programs, listed)
	}
}

// checkLinks checks that relative links in the documents of a folder lead to files.
func checkLinks(t *testing.T, folder string) {
	t.Helper()
	link := regexp.MustCompile(`\]\(([^)\s#:]+)[)#]`)
	code := regexp.MustCompile("(?ms)^ *```.*?\n *```|`[^`\n]+`")
	checked := 0
	err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		data, err := os.ReadFile(path)
		for _, found := range link.FindAllStringSubmatch(code.ReplaceAllString(string(data), ""), -1) {
			checked++
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), found[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return err
	})
	if err != nil || checked < 100 {
		t.Errorf("found %d links: %v", checked, err)
	}
}

// TestReleaseSetsUp: make release installs the packages that it needs before it builds.
func TestReleaseSetsUp(t *testing.T) {
	steps := run(t, testenv.Root(), "env", "-u", "MAKEFLAGS", "make", "--no-print-directory", "--dry-run", "release", "VERSION="+releaseVersion)
	if steps[0] != "hack/setup.sh" {
		t.Errorf("want hack/setup.sh as the first step, found %s", steps[0])
	}
}

// TestReleaseOfOtherPrograms: a release accepts the programs that make build-capstan builds for its version. It refuses those of another
// version, those with a limit of the validity of certificates, and those whose build did not end.
func TestReleaseOfOtherPrograms(t *testing.T) {
	root, _ := newCheckout(t)
	flags := filepath.Join(root, "bin", ".stamp", "linker-flags")
	write(t, flags, "")
	build := func(settings ...string) {
		steps := run(t, testenv.Root(), "env", append([]string{"-u", "MAKEFLAGS", "make", "--no-print-directory", "--dry-run", "build-capstan"}, settings...)...)
		run(t, root, "sh", "-c", steps[len(steps)-1]) // which writes the flags
	}
	build("VERSION=" + releaseVersion)
	if out, err := exec.Command(filepath.Join(root, "hack", "release.sh"), "programs", releaseVersion).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	refused := func(what string) {
		t.Helper()
		out, err := exec.Command(filepath.Join(root, "hack", "release.sh"), "programs", releaseVersion).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "run make release VERSION="+releaseVersion) {
			t.Errorf("%s: %v, %s", what, err, out)
		}
	}
	build("VERSION=v0.1.1")
	refused("another version")
	build()
	refused("no version")
	build("VERSION="+releaseVersion, "STAMP=$(if $(VERSION),-X capstan.dev/capstan/internal/version.Version=$(VERSION)) -X capstan.dev/capstan/internal/pki.maxLife=12m")
	refused("a limit of the validity")
	if err := os.Remove(flags); err != nil {
		t.Fatal(err)
	}
	refused("a build that did not end")
}
