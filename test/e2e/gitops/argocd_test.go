//go:build e2e && gitops

package gitops

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/cluster-api/cmd/clusterctl/client/yamlprocessor"

	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// objectsOfArgoCD are what Argo CD's API server would create.
const objectsOfArgoCD = `apiVersion: v1
kind: Secret
metadata: {name: argocd-secret, namespace: argocd, labels: {app.kubernetes.io/part-of: argocd}}
stringData: {server.secretkey: test}
---
apiVersion: argoproj.io/v1alpha1
kind: AppProject
metadata: {name: default, namespace: argocd}
spec:
  sourceRepos: ["*"]
  destinations: [{namespace: "*", server: "*"}]
  clusterResourceWhitelist: [{group: "*", kind: "*"}]
`

// startArgoCD runs the application controller and the repository server of Argo CD, with their cache. They end with the test.
func (f *fleet) startArgoCD() {
	f.t.Helper()
	module := f.module("argo-cd", "github.com/argoproj/argo-cd/v3")
	crds := filepath.Join(module, "manifests", "crds")
	f.install("argocd", filepath.Join(crds, "application-crd.yaml"), filepath.Join(crds, "appproject-crd.yaml"), filepath.Join(crds, "applicationset-crd.yaml"))
	f.apply("argocd.yaml", objectsOfArgoCD)
	config := f.documented("resource.customizations")
	config.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "ConfigMap"})
	config.SetName("argocd-cm")
	config.SetNamespace("argocd")
	config.SetLabels(map[string]string{"app.kubernetes.io/part-of": "argocd"})
	f.create(config)

	port := func() string { _, p, _ := net.SplitHostPort(ports.Address(f.t)); return p }
	redis, server := port(), port()
	cache := exec.Command("/usr/bin/redis-check-rdb") // Debian's redis-server is a link to it, in a package with a service.
	cache.Args = []string{"redis-server", "--port", redis, "--bind", "127.0.0.1", "--save", "", "--dir", f.t.TempDir()}
	f.background(cache)
	programs := f.t.TempDir() // A script of Argo CD's image. Files of modules cannot be executed.
	f.run("install", "-m", "755", filepath.Join(module, "hack", "git-verify-wrapper.sh"), programs)
	env := []string{"PATH=" + programs + ":" + os.Getenv("PATH"), "ARGOCD_FAKE_IN_CLUSTER=true", "ARGOCD_GPG_ENABLED=false", "ARGOCD_TLS_DATA_PATH=" + f.t.TempDir(), "ARGOCD_SSH_DATA_PATH=" + f.t.TempDir()}
	f.start("argo-cd/cmd", append(env, "ARGOCD_BINARY_NAME=argocd-repo-server"), "--address=127.0.0.1", "--port="+server,
		"--metrics-address=127.0.0.1", "--metrics-port="+port(), "--redis=127.0.0.1:"+redis, "--disable-tls", "--client-ca-path=", "--revision-cache-expiration=1s")
	f.start("argo-cd/cmd", append(env, "ARGOCD_BINARY_NAME=argocd-application-controller"), "--namespace=argocd", "--redis=127.0.0.1:"+redis,
		"--repo-server=127.0.0.1:"+server, "--repo-server-plaintext", "--metrics-port="+port(), "--app-resync=5", "--app-resync-jitter=0")
}

// application is the state of an Application.
type application struct {
	health, sync, revision string
	conditions             map[string]string                     // messages
	phase, text, initiator string                                // of the last operation
	options                []any                                 // of a synchronization
	resources              map[string]*unstructured.Unstructured // that exist
}

func (f *fleet) application(ctx context.Context) (application, error) {
	o, err := read(ctx, schema.GroupVersionKind{Group: "argoproj.io", Version: "v1alpha1", Kind: "Application"}, "argocd", "clusters")
	if err != nil {
		return application{}, err
	}
	a := application{conditions: map[string]string{}, resources: map[string]*unstructured.Unstructured{}}
	a.options, _, _ = unstructured.NestedSlice(o.Object, "spec", "syncPolicy", "syncOptions")
	for into, path := range map[*string]string{
		&a.health: "health status", &a.sync: "sync status", &a.revision: "sync revision", &a.phase: "operationState phase", &a.text: "operationState message",
		&a.initiator: "operationState operation initiatedBy username",
	} {
		*into, _, _ = unstructured.NestedString(o.Object, append([]string{"status"}, strings.Fields(path)...)...)
	}
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		c, _ := c.(map[string]any)
		a.conditions[fmt.Sprint(c["type"])] = fmt.Sprint(c["message"])
	}
	results, _, _ := unstructured.NestedSlice(o.Object, "status", "operationState", "syncResult", "resources")
	for _, r := range results {
		if r, _ := r.(map[string]any); r["status"] == "SyncFailed" {
			a.text += fmt.Sprintf("; %v %v: %v", r["kind"], r["name"], r["message"])
		}
	}
	resources, _, _ := unstructured.NestedSlice(o.Object, "status", "resources")
	for _, r := range resources {
		r, _ := r.(map[string]any)
		text := func(name string) string { s, _ := r[name].(string); return s }
		kind := schema.GroupVersionKind{Group: text("group"), Version: text("version"), Kind: text("kind")}
		live, err := read(ctx, kind, text("namespace"), text("name"))
		if apierrors.IsNotFound(err) {
			continue // not created yet, or refused
		} else if err != nil {
			return a, err
		}
		a.resources[kind.Kind+"/"+text("name")] = live
	}
	return a, nil
}

// reaches waits for a state of the Application.
func (f *fleet) reaches(what string, is func(a application) bool) application {
	f.t.Helper()
	var a application
	harness.Eventually(f.t, what, 5*time.Minute, func(ctx context.Context) (err error) {
		if a, err = f.application(ctx); err == nil && !is(a) {
			err = fmt.Errorf("found health %s, %s at %s, operation %s: %s, conditions %v", a.health, a.sync, a.revision, a.phase, a.text, a.conditions)
		}
		return err
	})
	return a
}

// healthy waits until a commit is applied and healthy. The Cluster must be available then.
func (f *fleet) healthy(hash string) {
	f.t.Helper()
	f.reaches("Healthy", func(a application) bool { return a.revision == hash && a.sync == "Synced" && a.health == "Healthy" })
	if message, yes := f.available(f.t.Context()); !yes {
		f.t.Fatalf("the Application is Healthy, but the Cluster is not available: %s", message)
	}
}

// syncWritesNothing lets Argo CD apply the same commit again until its objects stay the same from before to behind.
func (f *fleet) syncWritesNothing() {
	f.t.Helper()
	harness.Eventually(f.t, "synchronization without a change", 5*time.Minute, func(ctx context.Context) error {
		before, err := f.application(ctx)
		if err != nil {
			return err
		}
		request := time.Now().Format(time.RFC3339Nano)
		operation, err := json.Marshal(map[string]any{"operation": map[string]any{
			"initiatedBy": map[string]any{"username": request},
			"sync":        map[string]any{"revision": before.revision, "syncOptions": before.options},
		}})
		if err != nil {
			return err
		}
		f.kubectl("-n", "argocd", "patch", "application", "clusters", "--type=merge", "-p", string(operation))
		after := f.reaches("another synchronization", func(a application) bool { return a.initiator == request && a.phase == "Succeeded" })
		return f.unchanged("argocd-controller", 8, before.resources, after.resources)
	})
}

// even is the reason of a refusal.
const even = "replicas must be odd unless etcd is external: an even number of etcd members tolerates no more failures"

// refusesChange: the Application shows why Capstan refuses a change. Nothing of the commit is applied, but the next commit is.
func (f *fleet) refusesChange() {
	f.t.Helper()
	before, err := f.application(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	hash := f.commit(values(f.t, "1", "2"))
	after := f.reaches("a refused change", func(a application) bool {
		return a.revision == hash && a.sync == "Unknown" && strings.Contains(a.conditions["ComparisonError"], even)
	})
	f.t.Logf("health %s, operation %s, ComparisonError: %s", after.health, after.phase, after.conditions["ComparisonError"])
	if err := f.unchanged("argocd-controller", 8, before.resources, after.resources); err != nil {
		f.t.Log(err)
	}
	f.healthy(f.commit(values(f.t, "2", "1")))
}

// refusesNew: the Application shows why Capstan refuses a new object. Argo CD creates the other objects of the commit, and applies the
// next commit in place of a retry.
func (f *fleet) refusesNew() {
	f.t.Helper()
	const path = "clusters/new.yaml"
	files := map[string]string{path: strings.ReplaceAll(other, "other", "another")}
	for _, document := range strings.Split(values(f.t, "2", "2")[file], "---\n") {
		if strings.Contains(document, "\nkind: CapstanControlPlane\n") {
			files[path] += "---\n" + strings.ReplaceAll(document, "demo", "new")
		}
	}
	hash := f.commit(files)
	a := f.reaches("a refused object", func(a application) bool {
		return a.revision == hash && a.phase == "Running" && strings.Contains(a.text, even) && a.resources["ConfigMap/another"] != nil
	})
	f.t.Logf("sync %s, health %s, operation %s: %s", a.sync, a.health, a.phase, a.text)
	f.healthy(f.commit(map[string]string{path: ""}))
}

// values are those of the template's variables, with the numbers of workers and control plane machines.
func values(t *testing.T, workers, controlPlanes string) map[string]string {
	t.Helper()
	variables := map[string]string{
		"CLUSTER_NAME": "demo", "NAMESPACE": "default", "KUBERNETES_VERSION": harness.KubernetesVersion,
		"WORKER_MACHINE_COUNT": workers, "CONTROL_PLANE_MACHINE_COUNT": controlPlanes,
	}
	data, err := yamlprocessor.NewSimpleProcessor().Process([]byte(manifest(t, "cluster-template.yaml")), func(name string) (string, error) {
		if value, found := variables[name]; found {
			return value, nil
		}
		return "", fmt.Errorf("%s has no value", name)
	})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{file: string(data)}
}

// newApplication returns the Application of docs/gitops.md for a repository.
func (f *fleet) newApplication(url string) *unstructured.Unstructured {
	f.t.Helper()
	app := f.documented("kind: Application")
	if err := unstructured.SetNestedField(app.Object, url, "spec", "source", "repoURL"); err != nil {
		f.t.Fatal(err)
	}
	return app
}

// ignoresReplicas commits another number of workers and another object, after the Application got the settings of docs/gitops.md for an
// autoscaler. Argo CD must create the object and keep the number.
func (f *fleet) ignoresReplicas() {
	f.t.Helper()
	patch, err := f.documented("ignoreDifferences:").MarshalJSON()
	if err != nil {
		f.t.Fatal(err)
	}
	f.kubectl("-n", "argocd", "patch", "application", "clusters", "--type=merge", "-p", string(patch))
	files := values(f.t, "1", "1")
	files[file] += "---\n" + strings.ReplaceAll(other, "other", "another")
	hash := f.commit(files)
	a := f.reaches("another object", func(a application) bool {
		return a.revision == hash && a.sync == "Synced" && a.phase == "Succeeded" && a.resources["ConfigMap/another"] != nil
	})
	workers := a.resources["MachineDeployment/demo-md-0"]
	if replicas, _, _ := unstructured.NestedInt64(workers.Object, "spec", "replicas"); replicas != 2 {
		f.t.Fatalf("want 2 workers as before, found %d", replicas)
	}
}

// TestArgoCD: Argo CD applies a cluster from Git with the settings of docs/gitops.md. The Application is Healthy when the Cluster is
// available. Another synchronization writes nothing, and a commit scales the workers. A refused manifest is explained in the Application.
// With the settings for an autoscaler, a commit scales nothing. A removed file removes the cluster.
func TestArgoCD(t *testing.T) {
	f, url := newFleet(t)
	f.startArgoCD()
	f.schedulable(false)
	f.commit(map[string]string{"clusters/other.yaml": other})
	hash := f.commit(values(t, "1", "1"))
	f.create(f.newApplication(url))
	f.reaches("Progressing", func(a application) bool { return a.sync == "Synced" && a.health == "Progressing" })
	f.schedulable(true)
	f.healthy(hash)
	cluster := &harness.Cluster{Plane: plane, Namespace: clusterKey.Namespace, Name: clusterKey.Name}
	cluster.Connect(t)
	f.nodes(cluster, 2)
	f.syncWritesNothing()

	f.healthy(f.commit(values(t, "2", "1")))
	f.nodes(cluster, 3)
	f.refusesChange()
	f.refusesNew()
	f.nodes(cluster, 3)
	f.ignoresReplicas()
	f.nodes(cluster, 3)
	f.commit(map[string]string{file: ""})
	f.removed()
	f.reaches("the rest", func(a application) bool { return a.sync == "Synced" && a.health == "Healthy" && len(a.resources) == 1 })
}
