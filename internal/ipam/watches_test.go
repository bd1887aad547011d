package ipam

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/testevents"
)

// A starting manager serves new and deleted claims before claims that are served already. They do not wait for later
// events.
func TestUnservedFirst(t *testing.T) {
	q := priorityqueue.New[reconcile.Request]("test")
	defer q.ShutDown()
	claim := func(name string, served, going bool) *capiipamv1.IPAddressClaim {
		c := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if served {
			c.Status.AddressRef.Name = name
		}
		if going {
			c.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0)))
		}
		return c
	}
	unservedFirst().Create(context.Background(), event.CreateEvent{Object: claim("created later", false, false)}, q)
	if n := q.Len(); n != 0 {
		t.Errorf("%d claims that were created later are listed twice", n)
	}
	usual := &handler.EnqueueRequestForObject{}
	for _, c := range []*capiipamv1.IPAddressClaim{claim("served", true, false), claim("waiting", false, false), claim("going", true, true)} {
		found := event.CreateEvent{Object: c, IsInInitialList: true}
		usual.Create(context.Background(), found, q)
		unservedFirst().Create(context.Background(), found, q)
	}
	var got []string
	for range 3 {
		item, priority, _ := q.GetWithPriority()
		if low := priority < 0; low != (item.Name == "served") {
			t.Errorf("%s has priority %d", item.Name, priority)
		}
		got = append(got, item.Name)
		q.Done(item)
	}
	if !slices.Equal(got, []string{"waiting", "going", "served"}) {
		t.Errorf("the order is %v", got)
	}
}

// TestFailedReads_ALL13: an event whose read fails is lost, so the log shows it. Row IPAM-03.
func TestFailedReads_ALL13(t *testing.T) {
	ofObject := func(mapper func(*claimEvents, context.Context, client.Object) []reconcile.Request, o client.Object) testevents.Mapper {
		return func(ctx context.Context, c client.Client) []reconcile.Request {
			return mapper(&claimEvents{client: c}, ctx, o)
		}
	}
	testevents.LogFailedReads(t, map[string]testevents.Mapper{
		"a pool":      ofObject((*claimEvents).ofPool, &ipamv1.CapstanIPPool{}),
		"a Cluster":   ofObject((*claimEvents).ofCluster, &clusterv1.Cluster{}),
		"a Namespace": ofObject((*claimEvents).ofNamespace, &corev1.Namespace{}),
		"another pool": func(ctx context.Context, c client.Client) []reconcile.Request {
			return poolsBeside(ctx, c, ipamv1.CapstanIPPoolKind, &ipamv1.CapstanIPPool{})
		},
	})
}

// ALL-07: a waiting claim that gets the watch label of another manager does not hold back later claims of its former manager.
func TestClaimOfAnotherManagerLeavesTheQueue_ALL07(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
	pool.Spec.Subnets = []ipamv1.Subnet{{CIDR: "10.0.0.0/24", Ranges: []ipamv1.AddressRange{"10.0.0.1"}}}
	pool.Status.Conditions = []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: metav1.ConditionTrue}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(pool).WithObjects(pool).Build()
	registry := ledger.NewRegistry(c, c, ledger.Options{})
	s := &setup{registry: registry, opts: Options{Options: reconciling.Options{WatchFilter: "red"}}}
	claim := func(name, label string) *capiipamv1.IPAddressClaim {
		return &capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{clusterv1.WatchLabel: label}},
			Spec: capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{
				APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: "p",
			}},
		}
	}
	s.claimSeen(claim("a", "red"))
	s.claimSeen(claim("b", "red"))
	for i, label := range []string{"red", "blue"} {
		want := []ledger.Outcome{ledger.Exhausted, ledger.Granted}[i]
		s.claimSeen(claim("a", label))
		got, err := registry.Pool(ledger.KeyOfPool(pool)).Allocate(t.Context(), ledger.Request{Ticket: ledger.TicketOf(claim("b", "red"))})
		if err != nil || got.Outcome != want {
			t.Errorf("the earlier claim has the label %s: got %+v, %v", label, got, err)
		}
	}
}
