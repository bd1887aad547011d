//go:build e2e && gitops

package gitops

import (
	"context"
	"errors"
	"fmt"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/templates"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	file = "clusters/demo.yaml"
	// other stays in the repository when the cluster is removed.
	other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other, namespace: default}\n"
)

// clusterKey is the Cluster of the documented health check.
var clusterKey = client.ObjectKey{Namespace: "default", Name: "demo"}

// fleet is a Git repository whose manifests a tool applies to the plane.
type fleet struct {
	t             *testing.T
	folder        string // the working tree of the repository
	kubeconfig    string
	kustomization client.ObjectKey // of Flux
}

// newFleet starts a server of an empty repository, and returns its URL. It ends with the test.
func newFleet(t *testing.T) (f *fleet, url string) {
	t.Helper()
	f = &fleet{t: t, folder: filepath.Join(t.TempDir(), "fleet"), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	if err := os.WriteFile(f.kubeconfig, []byte(plane.Must(t, "get", "kubeconfig", "--management")), 0o600); err != nil {
		t.Fatal(err)
	}
	f.git("init", "--quiet", "--initial-branch=main", f.folder)
	server := httptest.NewServer(&cgi.Handler{
		Path: filepath.Join(f.run("git", "--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + filepath.Dir(f.folder), "GIT_HTTP_EXPORT_ALL=1"},
	})
	t.Cleanup(server.Close)
	return f, server.URL + "/fleet/.git"
}

// install creates the definitions of a program, and a namespace.
func (f *fleet) install(namespace string, definitions ...string) {
	f.t.Helper()
	for _, path := range definitions {
		f.kubectl("apply", "--server-side", "-f", path)
		// kubectl wait fails while a definition has no conditions.
		harness.Eventually(f.t, "definitions of "+path, time.Minute, func(ctx context.Context) error {
			_, err := harness.Command(ctx, nil, harness.Kubectl(), "--kubeconfig", f.kubeconfig, "wait", "--for=condition=Established", "--timeout=1m", "-f", path)
			return err
		})
	}
	f.kubectl("create", "namespace", namespace)
}

// module returns the folder of a module that a module below tools pins.
func (f *fleet) module(tool, path string) string {
	f.t.Helper()
	return f.run("go", "list", "-C", filepath.Join(testenv.Root(), "tools", tool), "-m", "-f", "{{.Dir}}", path)
}

// start runs a program of bin on this box until the end of the test.
func (f *fleet) start(name string, env []string, args ...string) {
	f.t.Helper()
	dir := f.t.TempDir()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(harness.Bin(), name), args...)
	cmd.Env = append(append(os.Environ(), "KUBECONFIG="+f.kubeconfig, "HOME="+dir, "TMPDIR="+dir), env...)
	cmd.Stdout, cmd.Stderr = log, log
	f.background(cmd)
	f.t.Cleanup(func() {
		log.Close()
		if f.t.Failed() {
			out, _ := exec.Command("tail", "-n", "40", log.Name()).Output()
			f.t.Logf("%s:\n%s", name, out)
		}
	})
}

// background runs a command until the end of the test.
func (f *fleet) background(cmd *exec.Cmd) {
	f.t.Helper()
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
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

// commit writes files to the repository, removes those without content, and returns the hash.
func (f *fleet) commit(files map[string]string) (hash string) {
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
	return f.git("-C", f.folder, "rev-parse", "HEAD")
}

// manifest returns a template for a repository with other values of variables. Flux replaces the other variables.
func manifest(t *testing.T, template string, values ...string) string {
	t.Helper()
	data, err := templates.FS.ReadFile(template)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for i := 0; i < len(values); i += 2 {
		if !strings.Contains(text, values[i]) {
			t.Fatalf("%s has no %s", template, values[i])
		}
		text = strings.ReplaceAll(text, values[i], values[i+1])
	}
	return text
}

// documented returns the YAML block of docs/gitops.md that contains a text.
func (f *fleet) documented(containing string) *unstructured.Unstructured {
	f.t.Helper()
	page, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", "gitops.md"))
	if err != nil {
		f.t.Fatal(err)
	}
	for _, block := range regexp.MustCompile("(?s)\n```yaml\n(.*?\n)```").FindAllSubmatch(page, -1) {
		if strings.Contains(string(block[1]), containing) {
			o := &unstructured.Unstructured{}
			if err := yaml.Unmarshal(block[1], &o.Object); err != nil {
				f.t.Fatal(err)
			}
			return o
		}
	}
	f.t.Fatalf("docs/gitops.md has no YAML block with %s", containing)
	return nil
}

// create applies an object that is not in the repository.
func (f *fleet) create(o *unstructured.Unstructured) {
	f.t.Helper()
	data, err := yaml.Marshal(o.Object)
	if err != nil {
		f.t.Fatal(err)
	}
	f.apply("object.yaml", string(data))
}

// read returns an object of the plane.
func read(ctx context.Context, kind schema.GroupVersionKind, namespace, name string) (*unstructured.Unstructured, error) {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	return o, plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, o)
}

// unchanged requires that a tool wrote nothing to a number of objects: the generation and the fields that the tool owns are the same.
// Controllers may write the status: unchanged returns an error then.
func (f *fleet) unchanged(tool string, number int, before, after map[string]*unstructured.Unstructured) (changed error) {
	f.t.Helper()
	if len(before) != number || len(after) != number {
		f.t.Fatalf("want %d objects of %s, found %d, then %d", number, tool, len(before), len(after))
	}
	for id, o := range after {
		was := before[id]
		if owned(o, tool) != owned(was, tool) {
			f.t.Fatalf("%s changed %s from %s to %s", tool, id, owned(was, tool), owned(o, tool))
		}
		if o.GetResourceVersion() != was.GetResourceVersion() {
			changed = fmt.Errorf("%s has changed", id)
		}
	}
	return changed
}

// owned returns the generation of an object, the fields that a tool owns, and the time when it changed them last.
func owned(o *unstructured.Unstructured, tool string) string {
	if o == nil {
		return "nothing"
	}
	for _, entry := range o.GetManagedFields() {
		if entry.Manager == tool && entry.Subresource == "" {
			return fmt.Sprintf("generation %d, %v: %s", o.GetGeneration(), entry.Time, entry.FieldsV1.Raw)
		}
	}
	return fmt.Sprintf("generation %d, no fields", o.GetGeneration())
}

// schedulable allows or forbids new machines on all hosts.
func (f *fleet) schedulable(yes bool) {
	f.t.Helper()
	hosts := &infrav1.CapstanHostList{}
	harness.Eventually(f.t, "hosts", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.List(ctx, hosts); err != nil || len(hosts.Items) > 0 {
			return err
		}
		return errors.New("there is none")
	})
	for _, host := range hosts.Items {
		f.kubectl("patch", "capstanhost", host.Name, "--type=merge", "-p", fmt.Sprintf(`{"spec": {"unschedulable": %v}}`, !yes))
	}
}

// available returns whether the Cluster is available, and why not.
func (f *fleet) available(ctx context.Context) (message string, yes bool) {
	cluster := &clusterv1.Cluster{}
	if err := plane.Client.Get(ctx, clusterKey, cluster); err != nil {
		return err.Error(), false
	}
	for _, c := range cluster.Status.Conditions {
		if c.Type == clusterv1.ClusterAvailableCondition {
			return c.Message, c.Status == "True"
		}
	}
	return "", false
}

func (f *fleet) nodes(cluster *harness.Cluster, n int) {
	f.t.Helper()
	harness.Eventually(f.t, "nodes", 5*time.Minute, func(ctx context.Context) error { return cluster.NodesReady(ctx, n) })
}

// removed waits until nothing of the cluster is left, and requires that the other file is still applied.
func (f *fleet) removed() {
	f.t.Helper()
	harness.Eventually(f.t, "removal", 5*time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, clusterKey, &clusterv1.Cluster{}); err == nil {
			return errors.New("the Cluster exists")
		} else if !apierrors.IsNotFound(err) {
			return err
		}
		// The category also has kinds without a namespace, which belong to the plane.
		left := strings.Fields(f.kubectl("get", "cluster-api,secrets", "-n", clusterKey.Namespace, "-o", "name"))
		left = slices.DeleteFunc(left, func(name string) bool {
			return strings.HasPrefix(name, "capstanhost.") || strings.HasPrefix(name, "extensionconfig.")
		})
		if len(left) > 0 {
			return fmt.Errorf("left of the cluster: %v", left)
		}
		return nil
	})
	f.kubectl("get", "configmap", "other", "-n", "default")
}
