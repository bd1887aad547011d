package capstanhost

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Ids are public. Objects of another namespace with the ids of a machine and of its cluster do not hide the machine: the owner of the
// host could neither find nor remove it, and a machine without an object prevents a reboot.
func TestCopiesHideNoMachine_ALL18(t *testing.T) {
	machine := func(namespace, id string) *hostpb.Machine {
		return &hostpb.Machine{
			Spec:   &hostpb.MachineSpec{Id: id, Namespace: namespace, Network: &hostpb.Network{Id: "n-" + id, Namespace: namespace}},
			Status: &hostpb.MachineStatus{ManagementCluster: "self"},
		}
	}
	object := func(namespace, id string) infrav1.CapstanMachine {
		return infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}, Spec: infrav1.CapstanMachineSpec{ID: id}}
	}
	machines := []*hostpb.Machine{machine("a", "copied"), machine("a", "known"), machine("a", "paused"), machine("a", "gone")}
	out := withoutObject(machines, []infrav1.CapstanMachine{object("thief", "copied"), object("a", "known")})
	out = ours(out, map[scopedID]bool{{"thief", "n-gone"}: false, {"a", "n-paused"}: false}, "self")
	var ids []string
	for _, m := range out {
		ids = append(ids, m.GetSpec().GetId())
	}
	if got := strings.Join(ids, " "); got != "copied gone" {
		t.Errorf("%q, want the copied machine and that of the copied cluster", got)
	}
}

// A host that reports many machines costs a bounded number of requests: one for each name, and maxLookups for all.
func TestLookupsAreBounded(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	b := fake.NewClientBuilder().WithScheme(scheme)
	for name, id := range map[string]string{"own": "id-1", "without-id": ""} {
		b.WithObjects(&infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: infrav1.CapstanMachineSpec{ID: id}})
	}
	for n := range 2 * maxLookups {
		b.WithObjects(&infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: fmt.Sprint(n)}})
	}
	c := b.Build()
	for name, tc := range map[string]struct {
		names            func(n int) (namespace, name string)
		unknown, lookups int
	}{
		"names without an object":          {func(n int) (string, string) { return "a", fmt.Sprint(n) }, infrav1.MaxUnknownMachines, infrav1.MaxUnknownMachines},
		"one name without an object":       {func(int) (string, string) { return "a", "gone" }, infrav1.MaxUnknownMachines, 1},
		"an object with an id":             {func(int) (string, string) { return "a", "own" }, infrav1.MaxUnknownMachines, 1},
		"an object that can have any id":   {func(int) (string, string) { return "a", "without-id" }, 0, 1},
		"many objects that can have an id": {func(n int) (string, string) { return "b", fmt.Sprint(n) }, 0, maxLookups},
	} {
		t.Run(name, func(t *testing.T) {
			var machines []*hostpb.Machine
			for n := range 2 * maxLookups {
				namespace, name := tc.names(n)
				machines = append(machines, &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: fmt.Sprint("id-", n), Namespace: namespace, Name: name}})
			}
			lookups := 0
			r := &Reconciler{}
			r.LiveClient = interceptor.NewClient(c, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				lookups++
				return c.Get(ctx, key, o, opts...)
			}})
			unknown, err := r.gone(t.Context(), machines)
			if err != nil || len(unknown) != tc.unknown || lookups != tc.lookups {
				t.Errorf("%d machines after %d requests, %v; want %d after %d", len(unknown), lookups, err, tc.unknown, tc.lookups)
			}
			if slices.ContainsFunc(unknown, func(m *hostpb.Machine) bool { return m.GetSpec().GetName() == "own" && m.GetSpec().GetId() == "id-1" }) {
				t.Error("the machine of the object is unknown")
			}
		})
	}
}

// The status lists only machines whose names the API accepts, and of their other properties only what it accepts: one machine must not refuse
// the whole status.
func TestNamesOfUnknownMachines(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, bad := range [][3]string{
		{"", "a", "m"}, {long, "a", "m"}, {"id", "", "m"}, {"id", long, "m"}, {"id", "a/b", "m"}, {"id", "a", ""}, {"id", "a", long}, {"id", "a", "../m"},
	} {
		if storable(&hostpb.Machine{Spec: &hostpb.MachineSpec{Id: bad[0], Namespace: bad[1], Name: bad[2]}}) {
			t.Errorf("%.20q can be stored", bad)
		}
	}
	m := &hostpb.Machine{Spec: &hostpb.MachineSpec{
		Id: "id", Namespace: "a", Name: "m.example", Cluster: long, Addresses: []*hostpb.Address{{}, {Address: long}, {Address: "10.200.0.2"}, {Address: "fe80::1%eth0"}},
	}}
	out := unknownMachines(nil, []*hostpb.Machine{m}, time.Now())
	if !storable(m) || len(out) != 1 || out[0].Cluster != long[:253] || !slices.Equal(out[0].Addresses, []string{"10.200.0.2"}) {
		t.Errorf("found %+v", out)
	}
}
