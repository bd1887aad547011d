package docs

import (
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "capstan.dev/capstan/"

// layers contains the layers that the packages of a layer can import, besides their own.
var layers = map[string][]string{
	"api":        nil,
	"library":    {"api"},
	"contract":   {"api", "library"},
	"reconciler": {"api", "library", "contract"},
	"manager":    {"api", "library", "contract", "reconciler"},
	"host":       {"api", "library", "contract"},
	"node":       {"api", "library", "contract"},
	"tool":       {"api", "library", "contract", "host", "node"},
	"main":       {"api", "library", "contract", "reconciler", "manager", "host", "node", "tool"},
	"test":       {"api", "library", "contract", "reconciler", "manager", "host", "node", "tool"},
}

// layerOf assigns folders to layers; the longest prefix decides.
var layerOf = map[string]string{
	"api": "api", "config": "library", "templates": "library", "docs": "test", "test": "test",
	"cmd": "main", "hack": "main",

	"internal/cidr": "library", "internal/backoff": "library", "internal/boottime": "library", "internal/conversion": "library", "internal/manager/replace": "library",
	"internal/changes": "library", "internal/clearfolder": "library", "internal/endingreader": "library", "internal/foreignfile": "library", "internal/manifest": "library", "internal/version": "library", "internal/manpages": "library", "internal/logging": "library", "internal/loopdevice": "library", "internal/naming": "library", "internal/order": "library", "internal/polarity": "library", "internal/projectquota": "library", "internal/searchpath": "library", "internal/selection": "library", "internal/shorten": "library", "internal/stall": "library", "internal/stored": "library", "internal/thread": "library", "internal/tracing": "library", "internal/wakeup": "library",
	"internal/contentsource": "library", "internal/kubeconfig": "library", "internal/atomicfile": "library", "internal/imagearchive": "library", "internal/pki": "library",

	// The two sides of a boundary share these packages: manager and host, manager and node, host and node.
	"internal/host/hostpb": "contract", "internal/host/owner": "contract", "internal/host/credentials": "contract", "internal/host/joining": "contract",
	"internal/host/refusal": "contract", "internal/overhead": "contract", "internal/machineapi": "contract", "internal/accessapi": "contract",
	"internal/inplace": "contract", "internal/node/nodeconfig": "contract", "internal/node/cloudconfig": "contract", "internal/node/initapi": "contract",
	"internal/node/kube": "contract", "internal/node/provision/manifests": "contract",

	"internal/bootstrap": "reconciler", "internal/controlplane": "reconciler", "internal/infrastructure": "reconciler",
	"internal/ipam": "reconciler", "internal/reconciling": "reconciler", "internal/expiry": "reconciler", "internal/nodedrain": "reconciler",
	"internal/manager": "manager",
	"internal/host":    "host", "internal/node": "node",
	"internal/cli": "tool", "internal/doctor": "tool", "internal/embedded": "tool",

	"internal/testenv": "test", "internal/host/conformance": "test", "internal/node/process/processtest": "test",
	"internal/infrastructure/connections/fakehost": "test", "internal/infrastructure/machinepool/integration": "test",
	"internal/ipam/integration": "test",
}

// testsImport contains the additional layers that the tests of a package can import.
var testsImport = map[string][]string{
	"config":                  {"reconciler", "tool"}, // compares roles and manifests with the code that needs them
	"internal/infrastructure": {"manager"},            // checks that a manifest can replace live objects
}

// layer returns the layer of a package by its path below the module, or "".
func layer(path string) string {
	for prefix := path; ; prefix = prefix[:strings.LastIndexByte(prefix, '/')] {
		if l, ok := layerOf[prefix]; ok {
			return l
		}
		if !strings.Contains(prefix, "/") {
			return ""
		}
	}
}

type listed struct {
	ImportPath, Name, Dir string
	GoFiles, Imports      []string
	// TestImports and XTestImports are the imports of the tests inside and outside of the package.
	TestImports, XTestImports []string
}

// packages lists the packages of this module, or those that other arguments of go list select.
func packages(t *testing.T, arguments ...string) []listed {
	t.Helper()
	if len(arguments) == 0 {
		arguments = []string{"./..."}
	}
	cmd := exec.Command("go", append([]string{"list", "-e", "-tags=e2e", "-json=ImportPath,Name,Dir,GoFiles,Imports,TestImports,XTestImports"}, arguments...)...)
	cmd.Dir = ".."
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all []listed
	for d := json.NewDecoder(out); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		all = append(all, p)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestLayers checks that no package and no test imports a package of a higher layer, that host and node do not import each
// other, and that no program contains test code.
func TestLayers(t *testing.T) {
	all := packages(t)
	if len(all) < 80 {
		t.Fatalf("found %d packages", len(all))
	}
	for _, p := range all {
		own := layer(p.ImportPath)
		if own == "" {
			t.Errorf("%s has no layer: add its folder to layerOf", p.ImportPath)
		}
		check(t, p.ImportPath, own, p.Imports, layers[own])
		check(t, "the test of "+p.ImportPath, own, slices.Concat(p.TestImports, p.XTestImports),
			slices.Concat([]string{"test"}, layers[own], testsImport[p.ImportPath]))
	}
}

// check reports imports that are neither in the own layer nor in the allowed ones.
func check(t *testing.T, importer, own string, imports, allowed []string) {
	t.Helper()
	for _, imported := range imports {
		path, ours := strings.CutPrefix(imported, module)
		if other := layer(path); ours && other != own && !slices.Contains(allowed, other) {
			t.Errorf("%s (layer %s) imports %s (layer %s): expected only %v", importer, own, path, other, allowed)
		}
	}
}

// TestInotify checks that only internal/changes uses inotify, because it also works when a pod has exhausted the limit
// of inotify. On hosts, this includes all libraries, except that of CDI: package devices turns its watch off.
func TestInotify(t *testing.T) {
	for _, p := range append(packages(t), packages(t, "-deps", "./cmd/capstand", "./cmd/capstan-init")...) {
		if slices.Contains(p.Imports, "github.com/fsnotify/fsnotify") && p.ImportPath != "internal/changes" && p.ImportPath != "tags.cncf.io/container-device-interface/pkg/cdi" {
			t.Errorf("%s imports fsnotify: use internal/changes, which also works without inotify", p.ImportPath)
		}
	}
	for _, p := range packages(t) {
		for _, name := range p.GoFiles {
			source, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(source), ".InotifyInit") {
				t.Errorf("%s of %s uses inotify: use internal/changes, which also works without it", name, p.ImportPath)
			}
		}
	}
}

// TestFolders checks that the tables of packages.md have a row for each package, in the table of its layer.
func TestFolders(t *testing.T) {
	listed := map[string][]string{}
	for name := range layers {
		listed[name] = packageRows(t, name)
	}
	for _, p := range packages(t) {
		own := layer(p.ImportPath)
		if !slices.ContainsFunc(listed[own], func(row string) bool { return matches(row, p.ImportPath) }) {
			t.Errorf("packages.md has no row with %s below the heading of the layer %s", p.ImportPath, own)
		}
		for other, rows := range listed {
			if other != own && slices.Contains(rows, p.ImportPath) {
				t.Errorf("packages.md has %s in the layer %s, want %s", p.ImportPath, other, own)
			}
		}
	}
}

func matches(pattern, name string) bool {
	found, _ := filepath.Match(pattern, name)
	return found
}

// packageRows reads the packages of the table of a layer, one in each row. A name in the place of a folder, like <group>, becomes *.
func packageRows(t *testing.T, layer string) (rows []string) {
	t.Helper()
	placeholder := regexp.MustCompile("<[a-z]+>")
	for _, line := range section(t, "packages.md", "## Layer "+layer) {
		if columns := cells(line); len(columns) == 2 && strings.HasPrefix(columns[0], "`") {
			rows = append(rows, placeholder.ReplaceAllString(strings.Trim(columns[0], "`"), "*"))
		}
	}
	if len(rows) == 0 {
		t.Errorf("packages.md has no packages below the heading of the layer %s", layer)
	}
	return rows
}

// TestPackageComments checks that the comment of each package describes it, and names its layer and the layers that it can import.
func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 || layer(p.ImportPath) == "test" {
			continue
		}
		comment := packageComment(t, p)
		if p.Name != "main" && !strings.HasPrefix(comment, "Package "+p.Name+" ") {
			t.Errorf("the comment of %s is %q, want: Package %s …", p.ImportPath, comment, p.Name)
		}
		var found []string
		for _, line := range strings.Split(comment, "\n") {
			if strings.HasPrefix(line, "Layer: ") {
				found = append(found, line)
			}
		}
		if want := []string{layerLine(layer(p.ImportPath))}; !slices.Equal(found, want) {
			t.Errorf("the comment of package %s has the lines %q, want %q", p.ImportPath, found, want)
		}
	}
}

// layerLine returns the last line of the comment of a package, for example "Layer: host. Allowed imports: api, library, contract."
func layerLine(layer string) string {
	allowed := "none"
	if len(layers[layer]) > 0 {
		allowed = strings.Join(layers[layer], ", ")
	}
	return "Layer: " + layer + ". Allowed imports: " + allowed + "."
}

func packageComment(t *testing.T, p listed) string {
	t.Helper()
	var comments []string
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if text := f.Doc.Text(); text != "" {
			comments = append(comments, text)
		}
	}
	if len(comments) > 1 {
		t.Errorf("%s has %d package comments, want one", p.ImportPath, len(comments))
	}
	return strings.Join(comments, "\n")
}
