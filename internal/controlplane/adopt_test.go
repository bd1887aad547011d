package controlplane

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// secretsOfCapstan lists the Secrets that Capstan creates for a cluster. The control plane owns them.
var secretsOfCapstan = []string{"demo-ca", "demo-etcd", "demo-proxy", "demo-sa", "demo-encryption", "demo-kubeconfig"}

// owned returns the objects whose controller is the control plane.
func owned(t *testing.T, cluster *testcluster.Cluster) []client.Object {
	t.Helper()
	var out []client.Object
	for _, m := range machinesOf(t, cluster) {
		out = append(out, &m)
	}
	for _, name := range secretsOfCapstan {
		out = append(out, cluster.Secret(name))
	}
	return out
}

// changeOwners changes the owner references of all objects of a control plane while it is paused. Backup tools do this
// when they restore a namespace.
func changeOwners(w *simulation, change func(client.Object)) {
	w.t.Helper()
	pause := func(paused bool) {
		w.cluster.Change(w.cluster.Cluster, func() { w.cluster.Spec.Paused = &paused })
		cp := &controlplanev1.CapstanControlPlane{ObjectMeta: w.cluster.Meta("demo")}
		w.cluster.Becomes(w.t, cp, "paused or not", func() bool {
			return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "") == paused
		})
	}
	pause(true)
	for _, obj := range owned(w.t, w.cluster) {
		w.cluster.Change(obj, func() { change(obj) })
	}
	pause(false)
}

func withoutOwners(obj client.Object) { obj.SetOwnerReferences(nil) }

func ownersAre(t *testing.T, w *simulation, cp *controlplanev1.CapstanControlPlane) func() bool {
	t.Helper()
	return func() bool {
		for _, obj := range owned(t, w.cluster) {
			refs := obj.GetOwnerReferences()
			if len(refs) != 1 || !util.HasExactOwnerRef(refs, controllerRef(cp)) {
				return false
			}
		}
		return true
	}
}

// TestAdoption: objects with the labels of a control plane get a removed owner reference back. No Machine is
// created or deleted, and no member leaves etcd.
// Row ALL-11.
func TestAdoption(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	names := strings.Join(namesOfMachines(t, w), " ")
	w.most, w.fewest = 0, 1000
	for _, c := range []struct {
		what   string
		change func(client.Object)
	}{
		{"no references", withoutOwners},
		{"an old version", func(obj client.Object) {
			refs := obj.GetOwnerReferences()
			refs[0].APIVersion = "controlplane.capstan.dev/v1alpha1"
			obj.SetOwnerReferences(refs)
		}},
		{"the UID of before", func(obj client.Object) {
			refs := obj.GetOwnerReferences()
			refs[0].UID = types.UID("11111111-2222-3333-4444-555555555555")
			obj.SetOwnerReferences(refs)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			w.t = t
			changeOwners(w, c.change)
			w.until("the owner references are restored", ownersAre(t, w, cp))
			w.still("three members vote", func() bool { return w.settled(cp, 3)() })
			if testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, "") {
				t.Error("the control plane is not Available")
			}
		})
	}
	w.t = t
	if after := strings.Join(namesOfMachines(t, w), " "); after != names || w.most != 3 || w.fewest != 3 || len(w.made) != 3 {
		t.Errorf("got Machines %s, want %s; at most %d Machines, at least %d voting members, %d created", after, names, w.most, w.fewest, len(w.made))
	}
}

// TestDeleteWithoutOwners: a control plane is deleted before it adopts Machines without owner references. Its deletion removes
// these Machines. Secrets with keys get their owner, so that the garbage collector removes them.
// Row ALL-11.
func TestDeleteWithoutOwners(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	w.cluster.Change(cp, func() { cp.Annotations[clusterv1.PausedAnnotation] = "" })
	w.cluster.Becomes(t, cp, "paused", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "") })
	for _, obj := range owned(t, w.cluster) {
		w.cluster.Change(obj, func() { withoutOwners(obj) })
	}
	if err := env.Client.Delete(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	w.restoring = true // A deleted cluster needs no quorum.
	w.cluster.Change(cp, func() { delete(cp.Annotations, clusterv1.PausedAnnotation) })
	w.until("all objects are removed", func() bool { return len(machinesOf(t, w.cluster)) == 0 && w.cluster.Get(cp) != nil })
	for _, name := range secretsOfCapstan {
		if s := w.cluster.Secret(name); s == nil || !metav1.IsControlledBy(s, cp) {
			t.Errorf("the Secret %s has no owner and would never be removed: %v", name, s.OwnerReferences)
		}
	}
}

// TestLostSecretLabels (CP-13, CP-15): Cluster API reads only Secrets with the label of their cluster. The control plane writes a lost or
// wrong label of its Secrets again.
func TestLostSecretLabels(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	for _, labels := range []map[string]string{nil, {clusterv1.ClusterNameLabel: "other"}} {
		for _, name := range secretsOfCapstan {
			s := &corev1.Secret{ObjectMeta: cluster.Meta(name)}
			cluster.Change(s, func() { s.Labels = labels })
		}
		for _, name := range secretsOfCapstan {
			expect.True(t, "the label of "+name, func() bool {
				return cluster.Secret(name).Labels[clusterv1.ClusterNameLabel] == cluster.Name
			})
		}
	}
}

// TestLabelWithoutOwner (CP-13): if the API server refuses the owner reference, as on OpenShift, the Secret still gets its label.
func TestLabelWithoutOwner(t *testing.T) {
	given := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-ca"}, Type: clusterv1.ClusterSecretType}
	c := fake.NewClientBuilder().WithObjects(given).WithInterceptorFuncs(interceptor.Funcs{
		Patch: func(ctx context.Context, w client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if len(obj.GetOwnerReferences()) > 0 {
				return apierrors.NewForbidden(corev1.Resource("secrets"), obj.GetName(), errors.New("cannot set an ownerRef on a resource you can't delete"))
			}
			return w.Patch(ctx, obj, patch, opts...)
		},
	}).Build()
	r := &secrets{&clients{Client: c, SecretClient: c}}
	s := &scope{ControlPlane: &model.ControlPlane{
		Object: &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo", UID: "demo"}}, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}},
	}}
	for range 2 {
		found, err := r.getSecret(t.Context(), client.ObjectKeyFromObject(given))
		if err != nil {
			t.Fatal(err)
		}
		if err := r.ownSecret(t.Context(), s, found); err != nil {
			t.Error(err)
		}
	}
	if found, err := r.getSecret(t.Context(), client.ObjectKeyFromObject(given)); err != nil || !isLabelled(s, found) || len(found.OwnerReferences) > 0 {
		t.Errorf("%v, %v", found.ObjectMeta, err)
	}
}

// TestMemberKeepsItsMachine: the member of an existing Machine does not leave etcd, also when the Machine has another
// controller or other labels. The conditions name the Machine and recommend no destructive step.
func TestMemberKeepsItsMachine(t *testing.T) {
	other := metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "other", UID: "other", Controller: ptr.To(true)}
	for name, c := range map[string]struct {
		change func(m *clusterv1.Machine)
		says   string
	}{
		"another controller": {func(m *clusterv1.Machine) { m.OwnerReferences = []metav1.OwnerReference{other} }, "controlled by the ReplicaSet other"},
		"no labels": {func(m *clusterv1.Machine) {
			m.OwnerReferences, m.Labels = nil, nil
		}, "may run on Machine"},
	} {
		t.Run(name, func(t *testing.T) {
			w, cp, _ := connected(t, nil)
			scaleTo(w, cp, 3)
			w.until("three", w.settled(cp, 3))
			m := &clusterv1.Machine{ObjectMeta: w.cluster.Meta(namesOfMachines(t, w)[0])}
			w.cluster.Change(m, func() { c.change(m) })
			says := func() bool {
				if w.cluster.Get(cp) != nil {
					return false
				}
				for _, condition := range cp.Status.Conditions {
					if strings.Contains(condition.Message, "spec.restore") {
						t.Errorf("%s recommends a restore: %s", condition.Type, condition.Message)
					}
				}
				return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, c.says) || testcluster.Has(cp, clusterv1.MachinesUpToDateCondition, metav1.ConditionFalse, c.says)
			}
			w.until("a condition names the Machine", says)
			w.still("no Machine is created, and no member leaves", func() bool { return w.voting() == 3 && len(w.made) == 3 && says() })
		})
	}
}

// TestAllUnlabelled: Machines without labels count as existing.
func TestAllUnlabelled(t *testing.T) {
	cluster, cp, _ := started(t, nil)
	machine := machinesOf(t, cluster)[0]
	cluster.Change(&machine, func() { machine.Labels = nil })
	cluster.Becomes(t, cp, "a condition contains the remedy", func() bool {
		return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, "lacks its labels") && !testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, "restore")
	})
	cluster.Change(&machine, func() {
		machine.Labels = ownLabels(&scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: cluster.Cluster}})
	})
	cluster.Becomes(t, cp, "the control plane continues", func() bool { return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionTrue, "") })
}

// TestSecretsOfUsers (CP-14, CP-15): a Secret whose type is not Cluster API's belongs to a user and gets no owner. No existing Secret is
// overwritten.
func TestSecretsOfUsers(t *testing.T) {
	ca, cluster := newCA(t), testcluster.New(t, env, nil)
	given := &corev1.Secret{ObjectMeta: cluster.Meta("demo-ca"), Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}}
	restored := &corev1.Secret{ObjectMeta: cluster.Meta("demo-etcd"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}}
	other := restored.DeepCopy()
	other.Name = "demo-proxy"
	other.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "other", UID: "other", Controller: ptr.To(true)}}
	accounts := bootstrap.Certificates(bootstrapv1.ClusterConfiguration{}).GetByPurpose(secret.ServiceAccount)
	if err := accounts.Generate(); err != nil {
		t.Fatal(err)
	}
	keys := &corev1.Secret{ObjectMeta: cluster.Meta("demo-sa"), Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"tls.crt": accounts.KeyPair.Cert, "tls.key": accounts.KeyPair.Key}}
	existing := []*corev1.Secret{given, restored, other, keys}
	for _, s := range existing {
		cluster.Create(s.DeepCopy())
	}
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	for _, before := range existing {
		s := cluster.Secret(before.Name)
		if !maps.EqualFunc(s.Data, before.Data, bytes.Equal) || s.Type != before.Type {
			t.Errorf("%s was overwritten", s.Name)
		}
		if before.Type != clusterv1.ClusterSecretType && len(s.OwnerReferences) != 0 {
			t.Errorf("%s of the user has an owner: %v", s.Name, s.OwnerReferences)
		}
	}
	if s := cluster.Secret("demo-etcd"); !metav1.IsControlledBy(s, cp) {
		t.Errorf("the restored authority has no owner: %v", s.OwnerReferences)
	}
	if s := cluster.Secret("demo-proxy"); len(s.OwnerReferences) != 1 || s.OwnerReferences[0].Name != "other" {
		t.Errorf("the Secret of another owner was adopted: %v", s.OwnerReferences)
	}
}
