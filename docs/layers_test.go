package docs

import (
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "capstan.dev/capstan/"

// layers lists which layers the packages of a layer can import, besides their own.
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
	"cmd": "main",

	"internal/cidr": "library", "internal/backoff": "library", "internal/conversion": "library", "internal/manager/replace": "library",
	"internal/changes": "library", "internal/naming": "library", "internal/polarity": "library", "internal/selection": "library", "internal/thread": "library",
	"internal/kubeconfig": "library", "internal/atomicfile": "library", "internal/pki": "library",

	// The two sides of a boundary share these: manager and host, manager and node, host and node.
	"internal/host/hostpb": "contract", "internal/host/owner": "contract", "internal/host/credentials": "contract",
	"internal/host/refusal": "contract", "internal/machineapi": "contract",
	"internal/node/nodeconfig": "contract", "internal/node/cloudconfig": "contract", "internal/node/initapi": "contract",
	"internal/node/kube": "contract", "internal/node/provision/manifests": "contract",

	"internal/bootstrap": "reconciler", "internal/controlplane": "reconciler", "internal/infrastructure": "reconciler",
	"internal/ipam": "reconciler", "internal/reconciling": "reconciler", "internal/expiry": "reconciler",
	"internal/manager": "manager",
	"internal/host":    "host", "internal/node": "node",
	"internal/cli": "tool", "internal/doctor": "tool", "internal/embedded": "tool",

	"internal/testenv": "test", "internal/host/conformance": "test", "internal/bootstrap/testcluster": "test", "internal/host/network/ownnet": "test",
	"internal/infrastructure/connections/fakehost": "test", "internal/infrastructure/machinepool/integration": "test",
	"internal/ipam/integration": "test",
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
}

func packages(t *testing.T) []listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-tags=e2e", "-json=ImportPath,Name,Dir,GoFiles,Imports", "./...")
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

// TestLayers checks that no package imports a package of a higher layer, that host and node do not import each other, and
// that no program contains test code.
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
		for _, imported := range p.Imports {
			path, ours := strings.CutPrefix(imported, module)
			if other := layer(path); ours && other != own && !slices.Contains(layers[own], other) {
				t.Errorf("%s (layer %s) imports %s (layer %s): layer %s can import %v", p.ImportPath, own, path, other, own, layers[own])
			}
		}
	}
}

// TestInotify checks that one package uses inotify: the one that goes on when a pod has used up its budget.
func TestInotify(t *testing.T) {
	for _, p := range packages(t) {
		if slices.Contains(p.Imports, "github.com/fsnotify/fsnotify") && p.ImportPath != "internal/changes" {
			t.Errorf("%s imports fsnotify: use internal/changes, which goes on without inotify", p.ImportPath)
		}
	}
}

// TestPackageComments checks that the comment of each package describes it and names its layer.
func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 || layer(p.ImportPath) == "test" {
			continue
		}
		comment := packageComment(t, p)
		if p.Name != "main" && !strings.HasPrefix(comment, "Package "+p.Name+" ") {
			t.Errorf("the comment of %s is %q, want: Package %s …", p.ImportPath, comment, p.Name)
		}
		if want := "Layer: " + layer(p.ImportPath) + "."; !slices.Contains(strings.Split(comment, "\n"), want) {
			t.Errorf("the comment of package %s must contain the line %q", p.ImportPath, want)
		}
	}
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
