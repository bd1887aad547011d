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

// newStoredPool returns the ledger of a pool that exists in a fake API server.
func newStoredPool(t *testing.T, spec ipamv1.CapstanIPPoolSpec) *Pool {
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

// A panic while a request is processed becomes the error of this request. The pool serves later requests, and it does not
// allocate an address twice.
func TestPanicFailsOneRequest(t *testing.T) {
	p := newStoredPool(t, ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/29"}}})
	first, err := p.Allocate(t.Context(), requestOf("first"))
	if err != nil || first.Outcome != Granted {
		t.Fatalf("got %+v, %v", first, err)
	}
	err = p.Update(t.Context(), func(ipamv1.Pool, View) bool { panic("a bug") })
	for _, want := range []string{"CapstanIPPool/ns/p", "a bug", "report it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got the error %v, want %q in it", err, want)
		}
	}
	second, err := p.Allocate(t.Context(), requestOf("second"))
	if err != nil || second.Outcome != Granted || second.Address == first.Address {
		t.Errorf("got %+v after %+v, %v", second, first, err)
	}
	doc := NewObject(p.state.key.Kind)
	if err := p.writer.live.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: "p"}, doc); err != nil {
		t.Fatal(err)
	}
	var pending []string
	for _, e := range doc.PoolStatus().Allocator.Pending {
		pending = append(pending, e.Address)
	}
	slices.Sort(pending)
	if want := []string{first.Address, second.Address}; !slices.Equal(pending, want) {
		t.Errorf("the record contains %q, want %q", pending, want)
	}
}

// A pool of nearly all IPv6 addresses serves claims in each allocation order.
func TestHugePool(t *testing.T) {
	for _, order := range []ipamv1.AllocationOrder{ipamv1.LowestOrder, ipamv1.RoundRobinOrder, ipamv1.RandomOrder} {
		p := newStoredPool(t, ipamv1.CapstanIPPoolSpec{Order: order, Subnets: []ipamv1.Subnet{{CIDR: "::/1"}, {CIDR: "8000::/1"}}})
		for _, name := range []string{"a", "b", "c"} {
			if res, err := p.Allocate(t.Context(), requestOf(name)); err != nil || res.Outcome != Granted {
				t.Errorf("%s: got %+v, %v", order, res, err)
			}
		}
		if v := p.View().Counts(); v.Total != "340282366920938463463374607431768211454" || v.Free != "340282366920938463463374607431768211451" || v.Used != 3 {
			t.Errorf("%s: got the counts %+v", order, v)
		}
	}
}
