//go:build e2e && flux

package flux

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
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

// TestFlux: Flux applies clusters from Git with the Kustomization of docs/gitops.md.
func TestFlux(t *testing.T) {
	f := newFleet(t)
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
	f.documented()
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

// ready waits until the Kustomization is Ready with a revision. The Cluster must be available then, unless it is removed.
func (f *fleet) ready(revision string) {
	f.t.Helper()
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

func (f *fleet) nodes(cluster *harness.Cluster, n int) {
	f.t.Helper()
	harness.Eventually(f.t, "nodes", 5*time.Minute, func(ctx context.Context) error { return cluster.NodesReady(ctx, n) })
}

// writesNothing lets Flux reconcile without a new commit until its objects stay the same from before to behind. The generation and the
// fields that Flux owns must stay the same each time; controllers may write the status.
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
		if len(before) != objects || len(after) != objects {
			f.t.Fatalf("want %d objects in the inventory, found %d, then %d", objects, len(before), len(after))
		}
		var changed error
		for id, o := range after {
			if o.GetGeneration() != before[id].GetGeneration() || ofFlux(o) != ofFlux(before[id]) {
				f.t.Fatalf("Flux changed %s from generation %d to %d, and its fields from %s to %s",
					id, before[id].GetGeneration(), o.GetGeneration(), ofFlux(before[id]), ofFlux(o))
			}
			if o.GetResourceVersion() != before[id].GetResourceVersion() {
				changed = fmt.Errorf("%s has changed", id)
			}
		}
		return changed
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

// ofFlux returns the fields that Flux owns, and the time when it changed them last.
func ofFlux(o *unstructured.Unstructured) string {
	for _, entry := range o.GetManagedFields() {
		if entry.Manager == "kustomize-controller" && entry.Subresource == "" {
			return entry.Time.String() + string(entry.FieldsV1.Raw)
		}
	}
	return "nothing"
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
