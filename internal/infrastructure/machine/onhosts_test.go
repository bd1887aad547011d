package machine

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// A machine without an object keeps its address, but only on a host that admits the namespace: root on the host of others cannot use up the
// addresses of a cluster.
func TestAddressesOnHosts_ALL18(t *testing.T) {
	r, cluster, machine := newPlacer(t, 2)
	cluster.Spec.ID = "n"
	const first = "10.0.0.2"
	choose := func() string {
		t.Helper()
		r.reserved = reservations{}
		addresses, err := r.chooseAddress(t.Context(), machine("new", "1Gi"), cluster)
		if err != nil {
			t.Fatal(err)
		}
		return addresses[0].Address
	}
	if got := choose(); got != first {
		t.Fatalf("chose %s, want %s", got, first)
	}
	_, err := r.Pool.Get("host-000").EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
		Id: "lost", Namespace: "ns", Name: "lost", MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: "v1.36.3",
		Network:   &hostpb.Network{Id: "n", Namespace: "ns", Name: "c", Cidr: cluster.Spec.Network.MachineCIDR},
		Addresses: []*hostpb.Address{{Address: first, Prefix: 16}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if got := choose(); got == first {
		t.Error("chose the address of a machine on a host")
	}
	host := &infrav1.CapstanHost{}
	if err := r.Client.Get(t.Context(), client.ObjectKey{Name: "host-000"}, host); err != nil {
		t.Fatal(err)
	}
	host.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: []string{"others"}}
	if err := r.Client.Update(t.Context(), host); err != nil {
		t.Fatal(err)
	}
	if got := choose(); got != first {
		t.Errorf("chose %s, want %s: the host does not admit the namespace", got, first)
	}
}
