//go:build e2e && flux

package flux

import (
	"context"
	"fmt"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// fleet is a Git repository, and Flux that applies its manifests to the plane.
type fleet struct {
	t             *testing.T
	folder        string // the working tree of the repository
	kubeconfig    string
	kustomization client.ObjectKey
}

// newFleet starts Flux's controllers and a server of an empty repository. All end with the test.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, folder: filepath.Join(t.TempDir(), "fleet"), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	if err := os.WriteFile(f.kubeconfig, []byte(plane.Must(t, "get", "kubeconfig", "--management")), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, module := range []string{"source-controller", "kustomize-controller"} {
		definitions := filepath.Join(f.run("go", "list", "-C", filepath.Join(testenv.Root(), "tools", "flux"), "-m", "-f", "{{.Dir}}", "github.com/fluxcd/"+module), "config", "crd", "bases")
		f.kubectl("apply", "--server-side", "-f", definitions)
		// kubectl wait fails while a definition has no conditions.
		harness.Eventually(t, "definitions of "+module, time.Minute, func(ctx context.Context) error {
			_, err := harness.Command(ctx, nil, harness.Kubectl(), "--kubeconfig", f.kubeconfig, "wait", "--for=condition=Established", "--timeout=1m", "-f", definitions)
			return err
		})
	}
	f.kubectl("create", "namespace", "flux-system")
	storage := ports.Address(t)
	f.start("source-controller", "--storage-path="+t.TempDir(), "--storage-addr="+storage, "--storage-adv-addr="+storage)
	f.start("kustomize-controller")

	f.git("init", "--quiet", "--initial-branch=main", f.folder)
	backend := &cgi.Handler{
		Path: filepath.Join(f.run("git", "--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + filepath.Dir(f.folder), "GIT_HTTP_EXPORT_ALL=1"},
	}
	server := httptest.NewServer(backend)
	t.Cleanup(server.Close)
	f.apply("repository.yaml", fmt.Sprintf(repository, server.URL))
	return f
}

const repository = `apiVersion: source.toolkit.fluxcd.io/v1
kind: GitRepository
metadata: {name: fleet, namespace: flux-system}
spec: {interval: 2s, url: %s/fleet/.git, ref: {branch: main}}
`

// start runs a controller of Flux on this box until the end of the test.
func (f *fleet) start(name string, args ...string) {
	f.t.Helper()
	log, err := os.Create(filepath.Join(f.t.TempDir(), name))
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(harness.Bin(), "flux", name), append(args, "--metrics-addr=0", "--health-addr="+ports.Address(f.t))...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+f.kubeconfig, "RUNTIME_NAMESPACE=flux-system", "HOME="+filepath.Dir(log.Name()), "TMPDIR="+filepath.Dir(log.Name()))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if f.t.Failed() {
			out, _ := exec.Command("tail", "-n", "40", log.Name()).Output()
			f.t.Logf("%s:\n%s", name, out)
		}
	})
}

// run returns the output of a program without white space around it.
func (f *fleet) run(name string, args ...string) string {
	f.t.Helper()
	out, err := harness.Command(f.t.Context(), nil, name, args...)
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

func (f *fleet) kubectl(args ...string) string {
	f.t.Helper()
	return f.run(harness.Kubectl(), append([]string{"--kubeconfig", f.kubeconfig}, args...)...)
}

func (f *fleet) git(args ...string) string {
	f.t.Helper()
	return f.run("git", append([]string{"-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgSign=false"}, args...)...)
}

// apply applies a manifest that is not in the repository.
func (f *fleet) apply(file, manifest string) {
	f.t.Helper()
	path := filepath.Join(f.t.TempDir(), file)
	if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
		f.t.Fatal(err)
	}
	f.kubectl("apply", "--server-side", "-f", path)
}

// commit writes files to the repository, removes those without content, and returns the revision as Flux calls it.
func (f *fleet) commit(files map[string]string) (revision string) {
	f.t.Helper()
	for name, content := range files {
		path := filepath.Join(f.folder, name)
		if content == "" {
			f.git("-C", f.folder, "rm", "--quiet", name)
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			f.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
	f.git("-C", f.folder, "add", "--all")
	f.git("-C", f.folder, "commit", "--quiet", "--message", "change")
	return "main@sha1:" + f.git("-C", f.folder, "rev-parse", "HEAD")
}

// documented applies the Kustomization of docs/gitops.md as it is.
func (f *fleet) documented() {
	f.t.Helper()
	page, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", "gitops.md"))
	if err != nil {
		f.t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)\n```yaml\n(apiVersion: kustomize.toolkit.fluxcd.io/[^\n]*\n.*?)\n```").FindSubmatch(page)
	if block == nil {
		f.t.Fatal("docs/gitops.md has no Kustomization")
	}
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(block[1], &o.Object); err != nil {
		f.t.Fatal(err)
	}
	f.kustomization = client.ObjectKeyFromObject(o)
	f.apply("kustomization.yaml", string(block[1]))
}

// status is the status of a Kustomization. Flux's own types are in another module.
type status struct {
	applied, handled string            // revision, and the last request
	conditions       map[string]string // as "True ReconciliationSucceeded: message"
	inventory        []string          // NAMESPACE_NAME_GROUP_KIND_VERSION
}

// look reads the Kustomization.
func (f *fleet) look(ctx context.Context) (status, error) {
	o := object(schema.GroupVersionKind{Group: "kustomize.toolkit.fluxcd.io", Version: "v1", Kind: "Kustomization"})
	if err := plane.Client.Get(ctx, f.kustomization, o); err != nil {
		return status{}, err
	}
	s := status{conditions: map[string]string{}}
	s.applied, _, _ = unstructured.NestedString(o.Object, "status", "lastAppliedRevision")
	s.handled, _, _ = unstructured.NestedString(o.Object, "status", "lastHandledReconcileAt")
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if c, _ := c.(map[string]any); c["observedGeneration"] == o.GetGeneration() {
			s.conditions[fmt.Sprint(c["type"])] = fmt.Sprintf("%v %v: %v", c["status"], c["reason"], c["message"])
		}
	}
	entries, _, _ := unstructured.NestedSlice(o.Object, "status", "inventory", "entries")
	for _, e := range entries {
		e, _ := e.(map[string]any)
		s.inventory = append(s.inventory, fmt.Sprintf("%v_%v", e["id"], e["v"]))
	}
	return s, nil
}

func object(kind schema.GroupVersionKind) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	return o
}

// objects reads the objects of the inventory.
func (f *fleet) objects(ctx context.Context) (map[string]*unstructured.Unstructured, error) {
	s, err := f.look(ctx)
	if err != nil {
		return nil, err
	}
	objects := map[string]*unstructured.Unstructured{}
	for _, entry := range s.inventory {
		part := strings.Split(entry, "_")
		if len(part) != 5 {
			return nil, fmt.Errorf("entry of the inventory: want five parts, found %q", entry)
		}
		o := object(schema.GroupVersionKind{Group: part[2], Version: part[4], Kind: part[3]})
		if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: part[0], Name: part[1]}, o); err != nil {
			return nil, err
		}
		objects[entry] = o
	}
	return objects, nil
}
