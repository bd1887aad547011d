package ipam

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
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
