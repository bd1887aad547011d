//go:build e2e && gitops

package gitops

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// startFlux runs Flux's controllers for a repository. They end with the test.
func (f *fleet) startFlux(url string) {
	f.t.Helper()
	const definitions = "config/crd/bases"
	f.install("flux-system", filepath.Join(f.module("flux", "github.com/fluxcd/source-controller"), definitions),
		filepath.Join(f.module("flux", "github.com/fluxcd/kustomize-controller"), definitions))
	storage := ports.Address(f.t)
	env := []string{"RUNTIME_NAMESPACE=flux-system"}
	f.start("flux/source-controller", env, "--storage-path="+f.t.TempDir(), "--storage-addr="+storage, "--storage-adv-addr="+storage,
		"--metrics-addr=0", "--health-addr="+ports.Address(f.t))
	f.start("flux/kustomize-controller", env, "--metrics-addr=0", "--health-addr="+ports.Address(f.t))
	f.apply("repository.yaml", fmt.Sprintf(repository, url))
}

const repository = `apiVersion: source.toolkit.fluxcd.io/v1
kind: GitRepository
metadata: {name: fleet, namespace: flux-system}
spec: {interval: 2s, url: %s, ref: {branch: main}}
`

// status is the status of a Kustomization. Flux's own types are in another module.
type status struct {
	applied, handled string            // revision, and the last request
	conditions       map[string]string // as "True ReconciliationSucceeded: message"
	inventory        []string          // NAMESPACE_NAME_GROUP_KIND_VERSION
}

// look reads the Kustomization.
func (f *fleet) look(ctx context.Context) (status, error) {
	kind := schema.GroupVersionKind{Group: "kustomize.toolkit.fluxcd.io", Version: "v1", Kind: "Kustomization"}
	o, err := read(ctx, kind, f.kustomization.Namespace, f.kustomization.Name)
	if err != nil {
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
		if objects[entry], err = read(ctx, schema.GroupVersionKind{Group: part[2], Version: part[4], Kind: part[3]}, part[0], part[1]); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// TestFlux: Flux applies clusters from Git with the Kustomization of docs/gitops.md.
func TestFlux(t *testing.T) {
	f, url := newFleet(t)
	f.startFlux(url)
	cluster := &harness.Cluster{Plane: plane, Namespace: clusterKey.Namespace, Name: clusterKey.Name}
	f.ofTemplate(cluster)
	f.ofClass(cluster)
}

// ofTemplate: the Kustomization is Ready when the Cluster is available. Another reconciliation writes nothing, a commit scales the
// workers, a refused manifest is explained in the Kustomization's condition, and a removed file removes the cluster.
func (f *fleet) ofTemplate(cluster *harness.Cluster) {
	f.t.Helper()
	demo := func(workers, controlPlanes string) map[string]string {
		return map[string]string{file: manifest(f.t, "cluster-template.yaml", "${WORKER_MACHINE_COUNT:=2}", workers, "${CONTROL_PLANE_MACHINE_COUNT:=1}", controlPlanes)}
	}
	f.schedulable(false)
	f.commit(map[string]string{"clusters/other.yaml": other})
	revision := f.commit(demo("1", "1"))
	kustomization := f.documented("kind: Kustomization")
	f.kustomization = client.ObjectKeyFromObject(kustomization)
	f.create(kustomization)
	f.waitsForCluster()
	f.schedulable(true)
	f.ready(revision)
	cluster.Connect(f.t)
	f.nodes(cluster, 2)
	f.writesNothing(8)

	revision = f.commit(demo("2", "1"))
	f.ready(revision)
	f.nodes(cluster, 3)
	f.kubectl("patch", "kustomization", f.kustomization.Name, "-n", f.kustomization.Namespace, "--type=merge", "-p", `{"spec": {"wait": true}}`)
	f.ready(revision) // each kind has a status that Flux understands
	f.writesNothing(8)

	f.commit(demo("2", "2"))
	f.condition("Ready", "False ReconciliationFailed", "replicas must be odd unless etcd is external: an even number of etcd members tolerates no more failures")
	f.nodes(cluster, 3)
	f.ready(f.commit(demo("2", "1")))
	f.ready(f.commit(map[string]string{file: ""}))
	f.removed()
}

const kustomizationOfClasses = `apiVersion: kustomize.toolkit.fluxcd.io/v1
kind: Kustomization
metadata: {name: classes, namespace: flux-system}
spec:
  interval: 10m
  path: ./classes
  targetNamespace: classes
  prune: true
  wait: true
  sourceRef: {kind: GitRepository, name: fleet}
`

// ofClass: the same for a Cluster of a ClusterClass, which is in a namespace and a Kustomization of its own. Defaults of the class's
// variables are no difference for Flux.
func (f *fleet) ofClass(cluster *harness.Cluster) {
	f.t.Helper()
	demo := func(workers string) map[string]string {
		return map[string]string{file: manifest(f.t, "cluster-template-topology.yaml", "${WORKER_MACHINE_COUNT:=2}", workers, "${CLUSTER_CLASS_NAMESPACE:=${NAMESPACE}}", "classes")}
	}
	f.kubectl("create", "namespace", "classes")
	f.commit(map[string]string{"classes/capstan.yaml": manifest(f.t, "clusterclass-capstan.yaml")})
	f.apply("classes.yaml", kustomizationOfClasses)
	f.kubectl("-n", "flux-system", "wait", "--for=condition=Ready", "--timeout=2m", "kustomization/classes")
	f.ready(f.commit(demo("1")))
	cluster.Connect(f.t)
	f.nodes(cluster, 2)
	f.writesNothing(2)
	f.ready(f.commit(demo("2")))
	f.nodes(cluster, 3)
	f.writesNothing(2)
	f.ready(f.commit(map[string]string{file: ""}))
	f.removed()
}

// condition waits until a condition of the Kustomization begins with a text and contains others.
func (f *fleet) condition(name, begin string, contains ...string) {
	f.t.Helper()
	harness.Eventually(f.t, "condition "+name, 5*time.Minute, func(ctx context.Context) error {
		s, err := f.look(ctx)
		if err != nil {
			return err
		}
		found := s.conditions[name]
		for _, text := range contains {
			if !strings.HasPrefix(found, begin) || !strings.Contains(found, text) {
				return fmt.Errorf("want %s, and %q; found %v", begin, text, s.conditions)
			}
		}
		f.t.Logf("%s: %s", name, found)
		return nil
	})
}

// waitsForCluster waits until all objects are applied, the Cluster is not available, and Flux checks its health.
func (f *fleet) waitsForCluster() {
	f.t.Helper()
	f.condition("Reconciling", "True Progressing", "Running health checks")
	harness.Eventually(f.t, "the Cluster without machines", time.Minute, func(ctx context.Context) error {
		if message, yes := f.available(ctx); yes || message == "" {
			return fmt.Errorf("available: %v, message %q", yes, message)
		}
		return nil
	})
}

// ready waits until the Kustomization is Ready with a commit. The Cluster must be available then, unless it is removed.
func (f *fleet) ready(hash string) {
	f.t.Helper()
	revision := "main@sha1:" + hash
	harness.Eventually(f.t, "the Kustomization", 10*time.Minute, func(ctx context.Context) error {
		s, err := f.look(ctx)
		if err == nil && (s.applied != revision || !strings.HasPrefix(s.conditions["Ready"], "True ")) {
			err = fmt.Errorf("want %s, found %s: %v", revision, s.applied, s.conditions)
		}
		if err != nil || len(s.inventory) == 1 {
			return err
		}
		if message, yes := f.available(ctx); !yes {
			f.t.Fatalf("the Kustomization is Ready, but the Cluster is not available: %s", message)
		}
		return nil
	})
}

// writesNothing lets Flux reconcile without a new commit until its objects stay the same from before to behind.
func (f *fleet) writesNothing(objects int) {
	f.t.Helper()
	harness.Eventually(f.t, "reconciliation without a change", 5*time.Minute, func(ctx context.Context) error {
		before, err := f.objects(ctx)
		if err != nil {
			return err
		}
		f.reconcile()
		after, err := f.objects(ctx)
		if err != nil {
			return err
		}
		return f.unchanged("kustomize-controller", objects, before, after)
	})
}

// reconcile asks Flux for a reconciliation, and waits until it has ended well.
func (f *fleet) reconcile() {
	f.t.Helper()
	request := time.Now().Format(time.RFC3339Nano)
	f.kubectl("annotate", "--overwrite", "kustomization", f.kustomization.Name, "-n", f.kustomization.Namespace, "reconcile.fluxcd.io/requestedAt="+request)
	harness.Eventually(f.t, "reconciliation", 5*time.Minute, func(ctx context.Context) error {
		s, err := f.look(ctx)
		if err == nil && (s.handled != request || !strings.HasPrefix(s.conditions["Ready"], "True ")) {
			err = fmt.Errorf("want %s, found %+v", request, s)
		}
		return err
	})
}
