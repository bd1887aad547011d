package addresses

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// oneAddress is a client that returns one IPAddress.
type oneAddress struct {
	client.Reader
	address string
}

func (o oneAddress) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.(*capiipamv1.IPAddress).Spec.Address = o.address //nolint:forcetypeassert // nothing else is asked for.
	return nil
}

// IPAM-04, IPAM-07: claims have the watch label of their object, so that an IPAM provider with --watch-filter sees them.
func TestLabels(t *testing.T) {
	owner := &capiipamv1.IPAddressClaim{}
	if got := labels(owner, "demo"); !maps.Equal(got, map[string]string{clusterv1.ClusterNameLabel: "demo"}) {
		t.Errorf("without a filter: %v", got)
	}
	owner.Labels = map[string]string{clusterv1.WatchLabel: "blue", "team": "a"}
	if got := labels(owner, "demo"); !maps.Equal(got, map[string]string{clusterv1.ClusterNameLabel: "demo", clusterv1.WatchLabel: "blue"}) {
		t.Errorf("with one: %v", got)
	}
}

// IPAM-07, ALL-07: a claim follows the watch label of its owner, also if it is being deleted: the manager of the former label does not
// release it. Without a label of the owner, the claim keeps its own.
func TestClaimFollowsWatchLabel_IPAM07(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), clusterv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	pool := capiipamv1.IPPoolReference{APIGroup: "example.com", Kind: "Pool", Name: "p"}
	for name, follow := range map[string]func(context.Context, client.Client, client.Object) error{
		"EnsureClaim": func(ctx context.Context, c client.Client, owner client.Object) error {
			_, err := EnsureClaim(ctx, c, owner, "demo", pool, "a")
			return err
		},
		"Adopt": func(ctx context.Context, c client.Client, owner client.Object) error {
			return Adopt(ctx, c, c, owner, "demo", "a", "gone")
		},
		"ClaimsGone": func(ctx context.Context, c client.Client, owner client.Object) error {
			_, err := ClaimsGone(ctx, c, owner, "demo", "a", "gone")
			return err
		},
	} {
		for _, deleted := range []bool{false, true} {
			for filter, want := range map[string]string{"blue": "blue", "": "red"} {
				owner := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "owner", UID: "1"}}
				ref, err := referenceTo(owner, scheme)
				if err != nil {
					t.Fatal(err)
				}
				claim := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{
					Namespace: "ns", Name: "a", Finalizers: []string{"example.com/provider"}, OwnerReferences: []metav1.OwnerReference{ref},
					Labels: map[string]string{clusterv1.WatchLabel: "red"},
				}, Spec: capiipamv1.IPAddressClaimSpec{PoolRef: pool}}
				c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(claim).Build()
				if deleted {
					if err := c.Delete(t.Context(), claim); err != nil {
						t.Fatal(err)
					}
				}
				owner.Labels = map[string]string{clusterv1.WatchLabel: filter}
				if err := follow(t.Context(), c, owner); err != nil {
					t.Fatal(err)
				}
				if err := c.Get(t.Context(), client.ObjectKeyFromObject(claim), claim); err != nil || claim.Labels[clusterv1.WatchLabel] != want {
					t.Errorf("%s, deleted %t, label %q of the owner: %v, %v", name, deleted, filter, claim.Labels, err)
				}
			}
		}
	}
}

// IPAM-07: the claims that have a usable address.
func TestFetchAddress_IPAM07(t *testing.T) {
	claim := func(change func(*capiipamv1.IPAddressClaim)) *capiipamv1.IPAddressClaim {
		c := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Name: "m-0"}}
		change(c)
		return c
	}
	served := func(c *capiipamv1.IPAddressClaim) { c.Status.AddressRef.Name = "m-0" }
	tests := map[string]struct {
		claim   *capiipamv1.IPAddressClaim
		waiting string
	}{
		"new":    {claim(func(*capiipamv1.IPAddressClaim) {}), "has no address yet"},
		"served": {claim(served), ""},
		"refused": {claim(func(c *capiipamv1.IPAddressClaim) {
			c.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse, Reason: "PoolExhausted", Message: "full"}}
		}), "PoolExhausted: full"},
		// The IPAM provider is down, so it has not released the address.
		"being deleted": {claim(func(c *capiipamv1.IPAddressClaim) {
			served(c)
			c.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0)))
		}), "is being deleted"},
	}
	for name, tt := range tests {
		address, waiting, err := FetchAddress(context.Background(), oneAddress{address: "10.0.0.1"}, tt.claim)
		if err != nil || (address != nil) != (tt.waiting == "") || !strings.Contains(waiting, tt.waiting) {
			t.Errorf("%s: got %v, %q, %v", name, address, waiting, err)
		}
	}
}

// oneClaim is a client that returns one IPAddressClaim, or an error.
type oneClaim struct {
	client.Reader
	claim capiipamv1.IPAddressClaim
	err   error
}

func (o oneClaim) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	o.claim.DeepCopyInto(obj.(*capiipamv1.IPAddressClaim)) //nolint:forcetypeassert // nothing else is asked for.
	return o.err
}

// IPAM-07, ALL-13: the IPAddress of a claim is an event for the owner of the claim. A failed read is logged, because the event is lost.
func TestOfOwner_IPAM07(t *testing.T) {
	claim := func(address, kind string) capiipamv1.IPAddressClaim {
		return capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: kind, Name: "owner", Controller: ptr.To(true)}}},
			Status:     capiipamv1.IPAddressClaimStatus{AddressRef: capiipamv1.IPAddressReference{Name: address}},
		}
	}
	for name, tt := range map[string]struct {
		claim  capiipamv1.IPAddressClaim
		err    error
		want   int
		logged bool
	}{
		"names the IPAddress": {claim: claim("a", "CapstanMachine"), want: 1},
		"does not name it":    {claim: claim("", "CapstanMachine")},
		"of another kind":     {claim: claim("a", "CapstanCluster")},
		"without an owner":    {claim: capiipamv1.IPAddressClaim{Status: claim("a", "").Status}},
		"gone":                {err: apierrors.NewNotFound(schema.GroupResource{}, "a")},
		"unreadable":          {err: errors.New("broken cache"), logged: true},
	} {
		var logged string
		ctx := ctrl.LoggerInto(t.Context(), funcr.New(func(_, line string) { logged += line }, funcr.Options{}))
		got := OfOwner(oneClaim{claim: tt.claim, err: tt.err}, "CapstanMachine")(ctx, &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"}})
		if len(got) != tt.want || strings.Contains(logged, "broken cache") != tt.logged {
			t.Errorf("%s: got %v, logged %q", name, got, logged)
		}
		for _, r := range got {
			if r.Namespace != "ns" || r.Name != "owner" {
				t.Errorf("%s: got %v", name, r)
			}
		}
	}
}
