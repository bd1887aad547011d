package main

import (
	"fmt"
	"io/fs"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/cmd/clusterctl/client/yamlprocessor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/templates"
)

// cluster returns the objects of a cluster template.
func (w *environment) cluster(file, namespace, name string) []*unstructured.Unstructured {
	w.t.Helper()
	values := map[string]string{
		"CLUSTER_NAME": name, "NAMESPACE": namespace, "KUBERNETES_VERSION": "v1.36.3", "CONTROL_PLANE_MACHINE_COUNT": "1", "WORKER_MACHINE_COUNT": "1",
		"CAPSTAN_MACHINE_CIDR": "10.201.0.0/21", "CAPSTAN_MACHINE_IPV6_CIDR": "fd00:201::/64",
	}
	data, err := templates.FS.ReadFile(file)
	w.Expect(err).NotTo(HaveOccurred())
	data, err = yamlprocessor.NewSimpleProcessor().Process(data, func(name string) (string, error) {
		if value, found := values[name]; found {
			return value, nil
		}
		return "", fmt.Errorf("%s has no value", name)
	})
	w.Expect(err).NotTo(HaveOccurred(), file)
	objects, err := manifest.Parse(data)
	w.Expect(err).NotTo(HaveOccurred(), file)
	return objects
}

// own does what core does: the objects that a Cluster and a MachinePool reference belong to them. The Cluster is the first object.
func (w *environment) own(objects []*unstructured.Unstructured) {
	w.t.Helper()
	owners := map[string]*unstructured.Unstructured{}
	for _, o := range objects {
		switch o.GetKind() {
		case "Cluster":
			owners["CapstanCluster"], owners["CapstanControlPlane"] = o, o
		case "MachinePool":
			owners["CapstanMachinePool"], owners["CapstanConfig"] = o, o
		}
	}
	for _, o := range objects {
		owner := owners[o.GetKind()]
		if owner == nil {
			continue
		}
		owner = owner.DeepCopy()
		w.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(owner), owner)).To(Succeed())
		w.patch(o.DeepCopy(), `{"metadata":{"labels":{%q:%q},"ownerReferences":[{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q,"controller":true}]}}`,
			clusterv1.ClusterNameLabel, objects[0].GetName(), owner.GetAPIVersion(), owner.GetKind(), owner.GetName(), owner.GetUID())
	}
}

// apply applies a manifest as Flux and Argo CD do, and returns the object.
func (w *environment) apply(o *unstructured.Unstructured, options ...client.ApplyOption) (*unstructured.Unstructured, error) {
	applied := o.DeepCopy()
	return applied, w.env.Client.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(applied), append(options, client.FieldOwner("gitops"))...)
}

// owned returns the fields that the second field manager owns.
func owned(o *unstructured.Unstructured) string {
	for _, entry := range o.GetManagedFields() {
		if entry.Manager == "gitops" && entry.Operation == metav1.ManagedFieldsOperationApply {
			return string(entry.FieldsV1.Raw)
		}
	}
	return ""
}

// written returns what a tool compares: all but the status and the fields that each write changes.
func written(o *unstructured.Unstructured) map[string]any {
	copied := o.DeepCopy()
	delete(copied.Object, "status")
	copied.SetManagedFields(nil)
	copied.SetResourceVersion("")
	return copied.Object
}

// TestGitOps: beside running controllers, the manifests of each cluster template are applied again and again by a second field
// manager. Nothing conflicts, an application in dry run shows no difference, the generation stays, and no controller takes a
// field of the manifest away.
func TestGitOps(t *testing.T) {
	w := sharedEnvironment(t, allWebhooks...)
	w.run(w.env.WebhookFlags()...)
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "host-of-gitops"}, Spec: infrav1.CapstanHostSpec{Address: fakehost.New(t).Address()}}
	w.create(host)
	// The next tests of this API server have no host.
	defer func() { w.Expect(w.env.Client.Delete(t.Context(), host)).To(Succeed()) }()
	files, err := fs.Glob(templates.FS, "cluster-template*.yaml")
	w.Expect(err).NotTo(HaveOccurred())
	w.Expect(len(files)).To(BeNumerically(">=", 7))
	for _, file := range files {
		objects := w.cluster(file, w.env.Namespace(t), "demo")
		first := map[*unstructured.Unstructured]string{}
		for _, o := range objects {
			// The manager does not serve webhooks from the beginning.
			w.Eventually(func() error {
				applied, err := w.apply(o)
				first[o] = owned(applied)
				return err
			}).Should(Succeed(), "%s: %s", file, o.GetKind())
		}
		w.own(objects)
		for _, o := range objects {
			if reconciles(o) {
				w.Eventually(func() bool { return w.look(o).reconciled() }).Should(BeTrue(), "%s: %s", file, o.GetKind())
			}
			for _, options := range [][]client.ApplyOption{nil, {client.ForceOwnership}} {
				w.Eventually(func(g Gomega) { w.appliedAgain(g, o, first[o], options) }).Should(Succeed(), "%s: %s", file, o.GetKind())
			}
		}
	}
}

// reconciles reports whether a provider of Capstan reconciles objects of this kind: it does not reconcile most templates.
func reconciles(o *unstructured.Unstructured) bool {
	switch o.GetKind() {
	case "CapstanCluster", "CapstanControlPlane", "CapstanMachinePool", "CapstanConfig":
		return true
	}
	return false
}

// appliedAgain applies a manifest again. A controller can change the object in between, but not forever.
func (w *environment) appliedAgain(g Gomega, o *unstructured.Unstructured, first string, options []client.ApplyOption) {
	live := o.DeepCopy()
	g.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(o), live)).To(Succeed())
	g.Expect(equality.Semantic.DeepDerivative(o.Object, live.Object)).To(BeTrue(), "the manifest is %v, the object %v", o, live)
	compared, err := w.apply(o, append(options, client.DryRunAll)...)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(written(compared)).To(Equal(written(live)))
	again, err := w.apply(o, options...)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(again.GetGeneration()).To(Equal(live.GetGeneration()))
	g.Expect(owned(again)).To(Equal(first))
}
