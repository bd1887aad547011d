package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// TestOnePatch_BC04: without an owner, its Machine or its Cluster, a reconcile writes nothing. With them, it creates the data and then writes
// the whole status with one patch, so that nobody reads one of the fields without the others. The next reconcile writes nothing.
func TestOnePatch_BC04(t *testing.T) {
	config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "worker", UID: "2"}}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}
	cluster.Spec.ControlPlaneEndpoint = endpoint
	cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "worker"}, Spec: clusterv1.MachineSpec{ClusterName: "demo", Version: "v1.36.3"}}
	authorities := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := authorities.Generate(); err != nil {
		t.Fatal(err)
	}
	ca := authorities.GetByPurpose(secret.ClusterCA).AsSecret(client.ObjectKeyFromObject(cluster), metav1.OwnerReference{Name: "demo", UID: "1"})
	r, c, writes := writing(t, config, ca)
	for _, step := range []struct {
		name   string
		before func() error
		want   []string
	}{
		{"no owner", nil, nil},
		{"no MachinePool", func() error {
			config.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "MachinePool", Name: "gone", UID: "4"}}
			return c.Update(t.Context(), config)
		}, nil},
		{"no Machine", func() error {
			config.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: "worker", UID: "3"}}
			return c.Update(t.Context(), config)
		}, nil},
		{"no Cluster", func() error { return c.Create(t.Context(), machine) }, nil},
		{"all of them", func() error { return c.Create(t.Context(), cluster) }, []string{"create Secret worker", "patch status worker"}},
		{"once more", nil, nil},
	} {
		if step.before != nil {
			if err := step.before(); err != nil {
				t.Fatal(err)
			}
		}
		*writes = nil
		_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(config)})
		if err != nil || !slices.Equal(*writes, step.want) {
			t.Errorf("%s: wrote %q, %v, want %q", step.name, *writes, err, step.want)
		}
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(config), config); err != nil {
		t.Fatal(err)
	}
	if !ptr.Deref(config.Status.Initialization.DataSecretCreated, false) || config.Status.DataSecretName != "worker" || len(config.Status.Conditions) == 0 {
		t.Errorf("status %+v", config.Status)
	}
}

// writing returns a reconciler, the client for the test, and a record of what the reconciler writes.
func writing(t *testing.T, objects ...client.Object) (*Reconciler, client.Client, *[]string) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme, Provider.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	stored := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&bootstrapv1.CapstanConfig{}).WithObjects(objects...).Build()
	writes := &[]string{}
	note := func(what string, obj client.Object) {
		*writes = append(*writes, fmt.Sprintf("%s %s", what, obj.GetName()))
	}
	counted := interceptor.NewClient(stored, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			note("create Secret", obj.(*corev1.Secret))
			return c.Create(ctx, obj, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			note("patch", obj)
			return c.Patch(ctx, obj, patch, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			note("patch "+sub, obj)
			return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
		},
	})
	return &Reconciler{Options: reconciling.Options{SecretCachingClient: counted, LiveClient: counted}, Client: counted}, stored, writes
}
