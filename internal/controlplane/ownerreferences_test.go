package controlplane

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

// TestOwnerReferencesEnforcement (ALL-05): the role is sufficient for all owner references on an API server that enforces rights on owners,
// as OpenShift does. The provider may not delete Secrets, so the authority of a user stays without an owner there.
func TestOwnerReferencesEnforcement(t *testing.T) {
	strict, err := testenv.Start(testenv.Options{
		AddToScheme:      []func(*runtime.Scheme) error{Provider.AddToScheme, infrav1.AddToScheme},
		AdmissionPlugins: []string{"OwnerReferencesPermissionEnforcement"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = strict.Stop() })
	expect.NoError(t, testmanager.Bind(strict.Client, Provider.Name, "role.yaml"))
	c, err := client.New(testmanager.As(strict.Config), client.Options{Scheme: strict.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	c = reconciling.Live(c)
	cluster := testcluster.New(t, strict, nil)
	given := &corev1.Secret{ObjectMeta: cluster.Meta(secret.Name("demo", secret.ClusterCA)), Type: clusterv1.ClusterSecretType}
	ca := newCA(t)
	given.Data = map[string][]byte{secret.TLSCrtDataName: ca.Cert, secret.TLSKeyDataName: ca.Key}
	cluster.Create(given)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	r := newReconciler(c, nil, reconciling.Options{LiveClient: c, SecretCachingClient: c})
	until := func(what string, holds func() bool) {
		t.Helper()
		expect.True(t, what, func() bool {
			if _, err := r.Reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cp)}); err != nil {
				t.Fatal(err)
			}
			return holds()
		})
	}
	machine := &clusterv1.Machine{}
	until("the Machine exists", func() bool {
		list := &clusterv1.MachineList{}
		if err := strict.Client.List(t.Context(), list, client.InNamespace(cluster.Namespace)); err != nil || len(list.Items) == 0 {
			return false
		}
		machine = &list.Items[0]
		return true
	})
	for _, part := range []client.Object{&bootstrapv1.CapstanConfig{}, &infrav1.CapstanMachine{}} {
		part.SetNamespace(machine.Namespace)
		part.SetName(machine.Name)
		if err := cluster.Get(part); err != nil || !metav1.IsControlledBy(part, machine) {
			t.Errorf("%T: %v, owners %v", part, err, part.GetOwnerReferences())
		}
	}
	template := &infrav1.CapstanMachineTemplate{ObjectMeta: cluster.Meta("demo")}
	if err := cluster.Get(template); err != nil || len(template.OwnerReferences) != 1 {
		t.Errorf("the template: %v, owners %v", err, template.OwnerReferences)
	}
	if err := cluster.Get(given); err != nil || len(given.OwnerReferences) != 0 {
		t.Errorf("the given Secret: %v, owners %v", err, given.OwnerReferences)
	}
	if kubeconfig := cluster.Secret("demo-kubeconfig"); kubeconfig == nil || !metav1.IsControlledBy(kubeconfig, cp) {
		t.Error("the kubeconfig has no owner")
	}
	cluster.Change(machine, func() { machine.OwnerReferences = nil })
	until("the Machine is adopted", func() bool { return cluster.Get(machine) == nil && metav1.IsControlledBy(machine, cp) })
}
