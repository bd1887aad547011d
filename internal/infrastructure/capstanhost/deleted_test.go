package capstanhost

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// A host that is being deleted stays connected until its machines are removed. An error of its connection, for example while the API
// server does not answer, leads to another attempt.
func TestConnectionOfADeletedHost(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(infrav1.AddToScheme(scheme), corev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	now := metav1.Now()
	host := &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: "host", DeletionTimestamp: &now, Finalizers: []string{infrav1.HostFinalizer}},
		Spec:       infrav1.CapstanHostSpec{Address: "192.0.2.1:7443", CredentialsRef: infrav1.SecretReference{Namespace: "ns", Name: "credentials"}},
	}
	machine := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}, Spec: infrav1.CapstanMachineSpec{HostName: "host"}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(host, machine).WithStatusSubresource(host).
		WithIndex(machine, MachineHostIndex, func(o client.Object) []string { return []string{o.(*infrav1.CapstanMachine).Spec.HostName} }).
		WithIndex(&infrav1.CapstanCluster{}, ClusterHostIndex, func(o client.Object) []string { return hostselection.BalancerHosts(o.(*infrav1.CapstanCluster)) }).
		Build()
	silent := errors.New("the API server does not answer")
	secrets := interceptor.NewClient(c, interceptor.Funcs{Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
		return silent
	}})
	r := &Reconciler{
		Options: reconciling.Options{LiveClient: reconciling.Live(c)}, Client: c, Pool: connections.NewPool(t.Context(), secrets),
		recorder: events.NewFakeRecorder(10), frame: reconciling.Frame{Client: c, Live: c, Finalizer: infrav1.HostFinalizer, Summary: []string{infrav1.HostConnectedCondition}},
	}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(host)}); !errors.Is(err, silent) {
		t.Errorf("expected the error of the connection, found %v", err)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(host), host); err != nil {
		t.Errorf("the host has a machine and is gone: %v", err)
	}
}
