package infrastructure_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	clientv3 "go.etcd.io/etcd/client/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestStorageMigration (ALL-14): if the CRDs change their storage version, the manager stores the objects of a running
// cluster in that version, back and forward. No machine, no object and no address changes. When a version is no longer
// served, it also leaves the managed fields.
func TestStorageMigration(t *testing.T) {
	b := newBox(t).provisioned()
	_, machine := b.addMachine(nil, nil)
	b.running(machine)
	key := metav1.ObjectMeta{Namespace: b.namespace, Name: unique("old")}
	template := &infrav1beta1.CapstanMachineTemplate{ObjectMeta: key}
	template.Spec.Template.Spec.Image = "host"
	b.create(template)
	clusterTemplate := &infrav1.CapstanClusterTemplate{ObjectMeta: key}
	clusterTemplate.Spec.Template.ObjectMeta.Labels = map[string]string{"from": "template"}
	b.create(clusterTemplate)

	specs := func() (machines, clusters any) {
		b.get(machine)
		b.get(b.capstan)
		return []any{machine.UID, machine.Generation, machine.Spec, machine.Status.Addresses, machine.Finalizers, machine.OwnerReferences},
			[]any{b.capstan.UID, b.capstan.Generation, b.capstan.Spec, b.capstan.Status, b.capstan.Finalizers, b.capstan.OwnerReferences}
	}
	b.unchanged(machine, b.capstan)
	machineBefore, clusterBefore := specs()
	onHost, _ := b.fake.Machine(machine.Spec.ID)
	ensured, deleted := b.fake.Calls("EnsureMachine"), b.fake.Calls("DeleteMachine")

	objects := map[string]client.Object{
		"capstanmachines": machine, "capstanclusters": b.capstan, "capstanmachinetemplates": template, "capstanclustertemplates": clusterTemplate,
	}
	b.storeIn(objects, "v1beta1")
	machineAfter, clusterAfter := specs()
	b.Expect(machineAfter).To(Equal(machineBefore))
	b.Expect(clusterAfter).To(Equal(clusterBefore))

	current := &infrav1.CapstanMachineTemplate{ObjectMeta: key}
	b.get(current)
	b.Expect(managedVersions(current)).To(ContainElement("v1beta1"))
	t.Cleanup(func() { b.change("capstanmachinetemplates", func(v *crdVersion) { v.Served = true }) })
	b.change("capstanmachinetemplates", func(v *crdVersion) { v.Served = v.Name != "v1beta1" })
	b.storeIn(objects, "v1beta2")
	machineAfter, clusterAfter = specs()
	b.Expect(machineAfter).To(Equal(machineBefore))
	b.Expect(clusterAfter).To(Equal(clusterBefore))
	b.Eventually(func() []string {
		b.get(current)
		return managedVersions(current)
	}).Should(And(Not(BeEmpty()), HaveEach("v1beta2")))

	now, _ := b.fake.Machine(machine.Spec.ID)
	b.Expect(now.GetSpec().String()).To(Equal(onHost.GetSpec().String()))
	b.Expect(now.GetStatus().String()).To(Equal(onHost.GetStatus().String()))
	b.Expect(b.fake.Calls("EnsureMachine")).To(Equal(ensured))
	b.Expect(b.fake.Calls("DeleteMachine")).To(Equal(deleted))
}

type crdVersion = apiextensionsv1.CustomResourceDefinitionVersion

// storeIn changes the storage version of the CRDs of these objects, waits until no object is stored in another version, and
// compares with etcd.
func (b *box) storeIn(objects map[string]client.Object, version string) {
	b.t.Helper()
	for plural := range objects {
		b.change(plural, func(v *crdVersion) { v.Storage = v.Name == version })
	}
	for plural, object := range objects {
		crd := crdOf(plural)
		b.Eventually(func() []string {
			b.get(crd)
			return crd.Status.StoredVersions
		}).Should(Equal([]string{version}), plural)
		b.Expect(b.storedIn(plural, object.GetName())).To(Equal(infrav1.GroupVersion.Group+"/"+version), "%s in etcd", plural)
	}
}

func crdOf(plural string) *apiextensionsv1.CustomResourceDefinition {
	return &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: plural + "." + infrav1.GroupVersion.Group}}
}

// change changes the versions of a CRD.
func (b *box) change(plural string, change func(*crdVersion)) {
	b.t.Helper()
	update(b, crdOf(plural), func(crd *apiextensionsv1.CustomResourceDefinition) {
		for i := range crd.Spec.Versions {
			change(&crd.Spec.Versions[i])
		}
	})
}

// storedIn returns the apiVersion of an object in etcd.
func (b *box) storedIn(plural, name string) string {
	b.t.Helper()
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{env.Etcd()}})
	b.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = etcd.Close() }()
	key := fmt.Sprintf("/registry/%s/%s/%s/%s", infrav1.GroupVersion.Group, plural, b.namespace, name)
	found, err := etcd.Get(ctx, key)
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(found.Kvs).To(HaveLen(1), key)
	object := &metav1.TypeMeta{}
	b.Expect(json.Unmarshal(found.Kvs[0].Value, object)).To(Succeed())
	return object.APIVersion
}

// managedVersions returns the versions in the managed fields of an object.
func managedVersions(obj client.Object) (versions []string) {
	for _, entry := range obj.GetManagedFields() {
		gv, err := schema.ParseGroupVersion(entry.APIVersion)
		if err == nil && !slices.Contains(versions, gv.Version) {
			versions = append(versions, gv.Version)
		}
	}
	return versions
}
