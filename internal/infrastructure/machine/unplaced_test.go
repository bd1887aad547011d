package machine

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/reconciling"
)

// newPlacer returns a reconciler with connected hosts of 64 GiB, and a function that returns the objects of a new machine.
func newPlacer(t testing.TB, hosts int, setup ...func(*fakehost.Host)) (*Reconciler, *infrav1.CapstanCluster, func(name, memory string) *scope) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	b := fake.NewClientBuilder().WithScheme(scheme).WithIndex(&infrav1.CapstanMachine{}, addressIndex, addressesOf)
	r := &Reconciler{Pool: connections.NewPool(t.Context(), nil), controller: capicontroller.NewFakeController(), volumeTurns: reconciling.NewTurns(4, 1)}
	for i := range hosts {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("host-%03d", i)}}
		h.Spec.Address = fakehost.New(t, setup...).Address()
		b.WithObjects(h)
		conn, err := r.Pool.Connect(t.Context(), h)
		if err == nil {
			err = wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return conn.ConnectionError() == nil, nil })
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cluster := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	cluster.Spec.Network.MachineCIDR = "10.0.0.0/16"
	labels := map[string]string{clusterv1.ClusterNameLabel: "c"}
	r.Client = reconciling.Live(b.Build())
	r.LiveClient = r.Client
	return r, cluster, func(name, memory string) *scope {
		return &scope{
			cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}},
			machine: &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels}},
			capstan: &infrav1.CapstanMachine{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels},
				Spec:       infrav1.CapstanMachineSpec{CPUs: 1, Memory: ptr.To(resource.MustParse(memory))},
			},
		}
	}
}

// TestUnplaced: free room of a host is an event for the machines that were refused, not for those whose host is chosen.
func TestUnplaced(t *testing.T) {
	r, cluster, machine := newPlacer(t, 1)
	first, large := machine("first", "40Gi"), machine("large", "30Gi")
	choose := func(s *scope, waiting ...string) {
		t.Helper()
		err := r.choose(t.Context(), s, cluster, nil)
		if refused := len(waiting) > 0; (err != nil) != refused {
			t.Errorf("got %v, want a refusal: %t", err, refused)
		}
		var names []string
		for _, request := range r.waitingForHosts() {
			names = append(names, request.Name)
		}
		if !slices.Equal(names, waiting) {
			t.Errorf("room is an event for %v, want %v", names, waiting)
		}
	}
	choose(first)
	choose(large, "large")
	r.Pool.Get("host-000").Release(first.capstan.Spec.ID)
	choose(large)
}
