package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// minSize is the annotation of a group that the autoscaler may scale to zero.
const minSize = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"

// autoscaler sends the requests of Cluster Autoscaler in the namespace default, with the Role of docs/integrations.md.
type autoscaler struct {
	*environment
	dynamic.Interface
}

func (w *environment) autoscaler() autoscaler {
	w.t.Helper()
	const user = "cluster-autoscaler"
	all := examples(w.t)
	at := slices.IndexFunc(all, func(e example) bool { return e.GetKind() == "Role" && e.GetName() == user })
	w.Expect(at).NotTo(Equal(-1))
	w.create(all[at].Unstructured)
	w.create(&rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	})
	config := rest.CopyConfig(w.env.Config)
	config.Impersonate.UserName = user
	c, err := dynamic.NewForConfig(config)
	w.Expect(err).NotTo(HaveOccurred())
	return autoscaler{w, c}
}

func (a autoscaler) in(namespace, group, resource string) dynamic.ResourceInterface {
	version, err := a.env.Client.RESTMapper().ResourceFor(schema.GroupVersionResource{Group: group, Resource: resource})
	a.Expect(err).NotTo(HaveOccurred())
	return a.Resource(version).Namespace(namespace)
}

func (a autoscaler) core(resource string) dynamic.ResourceInterface {
	return a.in(metav1.NamespaceDefault, clusterv1.GroupVersion.Group, resource)
}

// watches lists and watches the objects of a kind, as an informer does.
func (a autoscaler) watches(g Gomega, objects dynamic.ResourceInterface) []unstructured.Unstructured {
	list, err := objects.List(a.t.Context(), metav1.ListOptions{})
	g.Expect(err).NotTo(HaveOccurred())
	w, err := objects.Watch(a.t.Context(), metav1.ListOptions{ResourceVersion: list.GetResourceVersion()})
	g.Expect(err).NotTo(HaveOccurred())
	w.Stop()
	return list.Items
}

// sees checks the properties of a machine that the autoscaler expects from a group without machines. It requires that all values are
// strings, and that the resource of a kind is its name in lower case with an s.
func (a autoscaler) sees(resource, name string) func(g Gomega) {
	return func(g Gomega) {
		a.watches(g, a.core("machines"))
		a.watches(g, a.core("machinesets"))
		a.watches(g, a.core(resource))
		group, err := a.core(resource).Get(a.t.Context(), name, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(group.GetAnnotations()).To(HaveKeyWithValue(minSize, "0"))
		ref, _, err := unstructured.NestedStringMap(group.Object, "spec", "template", "spec", "infrastructureRef")
		g.Expect(err).NotTo(HaveOccurred())
		described := a.in(metav1.NamespaceDefault, ref["apiGroup"], strings.ToLower(ref["kind"])+"s")
		a.watches(g, described)
		o, err := described.Get(a.t.Context(), ref["name"], metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		capacity, _, err := unstructured.NestedStringMap(o.Object, "status", "capacity")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(capacity).To(And(HaveKeyWithValue("cpu", "2"), HaveKeyWithValue("memory", "1Gi"), HaveKey("ephemeral-storage")))
		info, _, err := unstructured.NestedStringMap(o.Object, "status", "nodeInfo")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(info).To(And(HaveKeyWithValue("architecture", "amd64"), HaveKeyWithValue("operatingSystem", "linux")))
	}
}

// scale changes the size of a group.
func (a autoscaler) scale(resource, name string, replicas int64) {
	a.t.Helper()
	_, err := a.core(resource).Patch(a.t.Context(), name, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{}, "scale")
	a.Expect(err).NotTo(HaveOccurred())
	scale, err := a.core(resource).Get(a.t.Context(), name, metav1.GetOptions{}, "scale")
	a.Expect(err).NotTo(HaveOccurred())
	found, _, err := unstructured.NestedInt64(scale.Object, "spec", "replicas")
	a.Expect(err).NotTo(HaveOccurred())
	a.Expect(found).To(Equal(replicas))
}

// TestClusterAutoscaler: with the Role of the documentation, the requests of Cluster Autoscaler to scale MachineDeployments and
// MachinePools from zero, up and down succeed, and no others.
func TestClusterAutoscaler(t *testing.T) {
	w := sharedEnvironment(t)
	w.run()
	w.create(&infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "host"}, Spec: infrav1.CapstanHostSpec{Address: fakehost.New(t).Address()}})
	a := w.autoscaler()
	for _, group := range []struct{ file, cluster, resource, name string }{
		{"cluster-template.yaml", "demo", "machinedeployments", "demo-md-0"},
		{"cluster-template-machinepool.yaml", "pool", "machinepools", "pool-mp-0"},
	} {
		objects := w.cluster(group.file, metav1.NamespaceDefault, group.cluster)
		for _, o := range objects {
			if o.GetName() == group.name && o.GroupVersionKind().Group == clusterv1.GroupVersion.Group {
				o.SetAnnotations(map[string]string{minSize: "0"})
			}
			w.create(o)
		}
		w.own(objects)
		w.Eventually(a.sees(group.resource, group.name)).Should(Succeed())
		a.scale(group.resource, group.name, 0)
		a.scale(group.resource, group.name, 3)
	}
	a.marksMachine()
	a.refusals()
}

// marksMachine marks a Machine for the deletion and takes the mark back.
func (a autoscaler) marksMachine() {
	a.t.Helper()
	a.create(&clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "m"}, Spec: clusterv1.MachineSpec{
		ClusterName: "demo", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("m")},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: "m"},
	}})
	for _, annotations := range []map[string]string{{clusterv1.DeleteMachineAnnotation: "now"}, nil} {
		machine, err := a.core("machines").Get(a.t.Context(), "m", metav1.GetOptions{})
		a.Expect(err).NotTo(HaveOccurred())
		machine.SetAnnotations(annotations)
		_, err = a.core("machines").Update(a.t.Context(), machine, metav1.UpdateOptions{})
		a.Expect(err).NotTo(HaveOccurred())
	}
}

// refusals: the autoscaler deletes no Machine, reads no Secret, changes no template and sees no other namespace.
func (a autoscaler) refusals() {
	a.t.Helper()
	ctx := a.t.Context()
	templates := a.in(metav1.NamespaceDefault, infrav1.GroupVersion.Group, "capstanmachinetemplates")
	_, secret := a.in(metav1.NamespaceDefault, "", "secrets").List(ctx, metav1.ListOptions{})
	_, change := templates.Patch(ctx, "demo-md-0", types.MergePatchType, []byte(`{"spec":{}}`), metav1.PatchOptions{})
	_, other := a.in(metav1.NamespaceSystem, clusterv1.GroupVersion.Group, "machines").List(ctx, metav1.ListOptions{})
	for what, err := range map[string]error{
		"deletes a Machine": a.core("machines").Delete(ctx, "m", metav1.DeleteOptions{}), "reads Secrets": secret,
		"changes a template": change, "sees another namespace": other,
	} {
		a.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "it %s: %v", what, err)
	}
}
