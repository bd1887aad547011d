package addressclaim

import (
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
)

// An IPAddress whose reference to its claim the garbage collector has removed goes when it is old enough, also if a claim of another pool
// has its name. One that a user has created for a later claim stays.
func TestReapOrphan(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	ref := func(pool string) capiipamv1.IPPoolReference {
		return capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: pool}
	}
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "a"}
	claim := func(pool string) *capiipamv1.IPAddressClaim {
		c := &capiipamv1.IPAddressClaim{ObjectMeta: meta, Spec: capiipamv1.IPAddressClaimSpec{PoolRef: ref(pool)}}
		c.UID = "new"
		return c
	}
	for name, tt := range map[string]struct {
		age        time.Duration
		finalizers []string
		claim      *capiipamv1.IPAddressClaim
		gone       bool
		again      bool
	}{
		"old":                               {age: time.Hour, finalizers: []string{ipamv1.AddressFinalizer}, gone: true},
		"young":                             {finalizers: []string{ipamv1.AddressFinalizer}, again: true},
		"old, by hand":                      {age: time.Hour},
		"old, and a claim can adopt it":     {age: time.Hour, finalizers: []string{ipamv1.AddressFinalizer}, claim: claim("p")},
		"old, and a claim of another pool":  {age: time.Hour, finalizers: []string{ipamv1.AddressFinalizer}, claim: claim("q"), gone: true},
		"young, and a claim of other pools": {finalizers: []string{ipamv1.AddressFinalizer}, claim: claim("q"), again: true},
		"by hand, for a claim of a pool":    {age: time.Hour, claim: claim("q")},
	} {
		ip := &capiipamv1.IPAddress{ObjectMeta: meta, Spec: capiipamv1.IPAddressSpec{PoolRef: ref("p"), Address: "10.0.0.1"}}
		ip.Finalizers, ip.CreationTimestamp = tt.finalizers, metav1.NewTime(time.Now().Add(-tt.age))
		b := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&capiipamv1.IPAddressClaim{}).WithObjects(ip)
		if tt.claim != nil {
			b = b.WithObjects(tt.claim)
		}
		c := b.Build()
		r := &Reconciler{
			Client: c, Live: c, Ledger: ledger.NewRegistry(c, c, ledger.Options{}), OrphanAge: time.Minute,
			Serves: func(client.Object) bool { return true }, Watches: func(client.Object) bool { return true },
		}
		res, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(ip)})
		if err != nil || (res.RequeueAfter > 0) != tt.again {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(ip), ip); apierrors.IsNotFound(err) != tt.gone || client.IgnoreNotFound(err) != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A manager whose cache still has the previous claim of a name does not delete the IPAddress of the new one.
func TestOldCacheTakesNoAddress(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "a"}
	ref := capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: "p"}
	ip := &capiipamv1.IPAddress{ObjectMeta: meta, Spec: capiipamv1.IPAddressSpec{PoolRef: ref, Address: "10.0.0.1"}}
	ip.OwnerReferences = []metav1.OwnerReference{{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: "a", UID: "new", Controller: ptr.To(true)}}
	with := func(uid types.UID) client.Client {
		claim := &capiipamv1.IPAddressClaim{ObjectMeta: meta, Spec: capiipamv1.IPAddressClaimSpec{PoolRef: ref}}
		claim.UID = uid
		return fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(claim).WithObjects(ip.DeepCopy(), claim).Build()
	}
	c, live := with("old"), with("new")
	r := &Reconciler{
		Client: c, Live: live, Ledger: ledger.NewRegistry(c, live, ledger.Options{}),
		Serves: func(client.Object) bool { return true }, Watches: func(client.Object) bool { return true },
	}
	res, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(ip)})
	if err != nil || res.RequeueAfter == 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(ip), ip); err != nil {
		t.Error(err)
	}
}

// An address whose claim has lost its finalizer by force rests like a released one.
func TestOrphanRests(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "new"}
	ref := capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: "p"}
	for name, claims := range map[string][]client.Object{
		"the claim is gone":              nil,
		"the claim was created again":    {&capiipamv1.IPAddressClaim{ObjectMeta: meta, Spec: capiipamv1.IPAddressClaimSpec{PoolRef: ref}}},
		"the claim has another pool now": {&capiipamv1.IPAddressClaim{ObjectMeta: meta, Spec: capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: "q"}}}},
	} {
		pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
		pool.Spec.Subnets, pool.Spec.RestSeconds = []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}, ptr.To[int32](3600)
		ip := &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", Finalizers: []string{ipamv1.AddressFinalizer}}}
		ip.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
		ip.OwnerReferences = []metav1.OwnerReference{{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: "a", UID: "old", Controller: ptr.To(true)}}
		ip.Spec = capiipamv1.IPAddressSpec{PoolRef: ref, Address: "10.0.0.1", Prefix: ptr.To[int32](24)}
		c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&capiipamv1.IPAddressClaim{}, pool).
			WithObjects(pool, ip).WithObjects(claims...).Build()
		r := &Reconciler{
			Client: c, Live: c, Ledger: ledger.NewRegistry(c, c, ledger.Options{}), OrphanAge: time.Minute,
			Serves: func(client.Object) bool { return true }, Watches: func(client.Object) bool { return true },
		}
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(ip)}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(ip), ip); !apierrors.IsNotFound(err) {
			t.Errorf("%s: the IPAddress is left: %v", name, err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(pool), pool); err != nil {
			t.Fatal(err)
		}
		if record := pool.Status.Allocator; record == nil || len(record.Resting) != 1 {
			t.Errorf("%s: the record of the pool is %+v, want one resting address", name, record)
		}
	}
}
