package pool

import (
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/testenv"
)

// ALL-08, CTL-13: a pool that was paused after a release copies its resting addresses, so that it does not hold back a move. The
// copy does not wait for a sixteenth of the resting period, which is 90 minutes here.
func TestPausedPoolHoldsBackNoMove_CTL13(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, capiipamv1.AddToScheme, ipamv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		block, left string // the annotation before and after
		saved       time.Time
		copied      bool
	}{
		"after a release":           {block: ipamv1.RestingBlocksMove, copied: true},
		"just after an older copy":  {block: ipamv1.RestingBlocksMove, left: ipamv1.RestingBlocksMove, saved: time.Now().Add(time.Minute)}, // so that the wait cannot end during the test
		"a component blocks a move": {block: "theirs", left: "theirs", copied: true},
	} {
		pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p"}}
		pool.Spec.Subnets, pool.Spec.RestSeconds = []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}, ptr.To[int32](86400)
		c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(pool).WithObjects(pool).Build()
		r := &Reconciler{Kind: ipamv1.CapstanIPPoolKind, Client: c, Live: c, Ledger: ledger.NewRegistry(c, c, ledger.Options{}), Watches: func(client.Object) bool { return true }}
		if err := r.Ledger.Pool(ledger.KeyOfPool(pool)).Rest(t.Context(), capiipamv1.IPAddressSpec{Address: "10.0.0.1", Prefix: ptr.To[int32](24)}); err != nil {
			t.Fatal(err)
		}
		if err := testenv.Change(t.Context(), c, pool, func(p *ipamv1.CapstanIPPool) {
			p.Annotations[clusterv1.PausedAnnotation] = ""
			p.Annotations[clusterctlv1.BlockMoveAnnotation] = tt.block
		}); err != nil {
			t.Fatal(err)
		}
		r.saves = map[types.UID]time.Time{pool.UID: tt.saved}
		res, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(pool)})
		if err != nil || (res.RequeueAfter > 0) == tt.copied || res.RequeueAfter > 2*time.Minute {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
		stored := &ipamv1.CapstanIPPool{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(pool), stored); err != nil {
			t.Fatal(err)
		}
		if _, copied := stored.Annotations[ipamv1.RestingAnnotation]; copied != tt.copied || stored.Annotations[clusterctlv1.BlockMoveAnnotation] != tt.left {
			t.Errorf("%s: annotations %v", name, stored.Annotations)
		}
		if !apimeta.IsStatusConditionTrue(stored.Status.Conditions, clusterv1.PausedCondition) {
			t.Errorf("%s: conditions %v", name, stored.Status.Conditions)
		}
	}
}

// IPAM-06: a manager of one namespace does not see the Clusters of others, so the addresses of a moved global pool may arrive for
// LongestArrival.
func TestArrivalInOneNamespace_IPAM06(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, capiipamv1.AddToScheme, ipamv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		namespace string // of the manager
		global    bool
		age       time.Duration
		waits     bool
	}{
		"global pool":                            {global: true, age: ledger.LongestArrival / 2},
		"global pool, one namespace":             {namespace: "ns", global: true, age: ledger.LongestArrival / 2, waits: true},
		"global pool, one namespace, later":      {namespace: "ns", global: true, age: ledger.LongestArrival + time.Minute},
		"pool of the namespace of one namespace": {namespace: "ns", age: ledger.LongestArrival / 2},
	} {
		var pool ipamv1.Pool = &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}}
		if tt.global {
			pool = &ipamv1.GlobalCapstanIPPool{}
		}
		pool.SetName("p")
		pool.SetUID("here")
		pool.SetAnnotations(map[string]string{ipamv1.OriginUIDAnnotation: "there"})
		pool.SetCreationTimestamp(metav1.NewTime(time.Now().Add(-tt.age)))
		c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pool).Build()
		r := &Reconciler{Client: c, Live: c, Ledger: ledger.NewRegistry(c, c, ledger.Options{}), MoveSettle: time.Second, Namespace: tt.namespace}
		left, err := r.arrival(t.Context(), pool, r.Ledger.Pool(ledger.KeyOfPool(pool)))
		if err != nil || (left > 0) != tt.waits {
			t.Errorf("%s: waits for %v, %v", name, left, err)
		}
	}
}
