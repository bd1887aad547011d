package ledger

import (
	"context"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// stored is a ledger of a pool that the client has.
func stored(t *testing.T, spec ipamv1.CapstanIPPoolSpec) *Pool {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{ipamv1.AddToScheme, capiipamv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	doc := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "pool", Generation: 1}, Spec: spec}
	doc.Status.Conditions = []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: metav1.ConditionTrue, ObservedGeneration: 1}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(doc).WithStatusSubresource(doc).Build()
	return NewRegistry(c, c, Options{}).Pool(KeyOfPool(doc))
}

func requestOf(name string) Request {
	return Request{Ticket: Ticket{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, UID: types.UID(name)}}
}

// A pool that makes something panic ends neither the process nor the pool: who has asked is told, and the next one
// is served, with none of what was given before.
func TestPanicIsOneBatchsError(t *testing.T) {
	p := stored(t, ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/29"}}})
	first, err := p.Allocate(t.Context(), requestOf("first"))
	if err != nil || first.Outcome != Granted {
		t.Fatalf("got %+v, %v", first, err)
	}
	err = p.Update(t.Context(), func(ipamv1.Pool, View) bool { panic("a bug") })
	for _, want := range []string{"CapstanIPPool/ns/p", "a bug", "report it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, wanted %q in it", err, want)
		}
	}
	second, err := p.Allocate(t.Context(), requestOf("second"))
	if err != nil || second.Outcome != Granted || second.Address == first.Address {
		t.Errorf("got %+v after %+v, %v", second, first, err)
	}
	doc := NewObject(p.key.Kind)
	if err := p.reg.live.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: "p"}, doc); err != nil {
		t.Fatal(err)
	}
	var pending []string
	for _, e := range doc.PoolStatus().Allocator.Pending {
		pending = append(pending, e.Address)
	}
	slices.Sort(pending)
	if want := []string{first.Address, second.Address}; !slices.Equal(pending, want) {
		t.Errorf("on record are %q, wanted %q", pending, want)
	}
}

// A pool of nearly all of IPv6 serves its claims in each order.
func TestHugePool(t *testing.T) {
	for _, order := range []ipamv1.AllocationOrder{ipamv1.LowestOrder, ipamv1.RoundRobinOrder, ipamv1.RandomOrder} {
		p := stored(t, ipamv1.CapstanIPPoolSpec{Order: order, Subnets: []ipamv1.Subnet{{CIDR: "::/1"}, {CIDR: "8000::/1"}}})
		for _, name := range []string{"a", "b", "c"} {
			if res, err := p.Allocate(t.Context(), requestOf(name)); err != nil || res.Outcome != Granted {
				t.Errorf("%s: got %+v, %v", order, res, err)
			}
		}
		if v := p.View().Counts(); v.Total != "340282366920938463463374607431768211454" || v.Free != "340282366920938463463374607431768211451" || v.Used != 3 {
			t.Errorf("%s: counts %+v", order, v)
		}
	}
}
