package addressclaim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
)

// Only a refusal by the API server shows that it will not execute a request later.
func TestRefused(t *testing.T) {
	kind := schema.GroupResource{Resource: "ipaddresses"}
	tests := map[string]struct {
		err  error
		want bool
	}{
		"exists":            {apierrors.NewAlreadyExists(kind, "a"), true},
		"forbidden":         {fmt.Errorf("wrapped: %w", apierrors.NewForbidden(kind, "a", nil)), true},
		"too many requests": {apierrors.NewTooManyRequests("", 1), true},
		"timeout":           {apierrors.NewTimeoutError("", 1), false},
		"etcd is away":      {apierrors.NewServerTimeout(kind, "create", 1), false},
		"internal error":    {apierrors.NewInternalError(errors.New("x")), false},
		"cancelled":         {fmt.Errorf("post: %w", context.DeadlineExceeded), false},
		"connection":        {errors.New("connection reset by peer"), false},
	}
	for name, tt := range tests {
		if got := refused(tt.err); got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}

// If the API server refuses the IPAddress, for example because of a quota, the claim shows the answer, and its address is free for the
// next claim. The claim gets an address when the API server accepts its IPAddress.
func TestRefusedAddressIsFree(t *testing.T) {
	refusal := apierrors.NewForbidden(schema.GroupResource{Resource: "ipaddresses"}, "a", errors.New("exceeded quota: small"))
	r, reconcile := refusing(t, &refusal)
	a, err := reconcile("a")
	ready := apimeta.FindStatusCondition(a.Status.Conditions, capiipamv1.IPAddressClaimReadyCondition)
	if !apierrors.IsForbidden(err) || ready == nil || ready.Reason != capiipamv1.IPAddressClaimReadyAllocationFailedReason ||
		!strings.Contains(ready.Message, "exceeded quota: small") {
		t.Errorf("refused: %v, and the condition is %+v", err, ready)
	}
	b, err := reconcile("b")
	if err != nil || b.Status.AddressRef.Name != "b" {
		t.Errorf("the next claim: %v, %+v", err, b.Status)
	}
	refusal = nil
	ip := &capiipamv1.IPAddress{}
	if err := r.Client.Get(t.Context(), client.ObjectKeyFromObject(b), ip); err != nil {
		t.Fatal(err)
	}
	r.Ledger.AddressGone(ip)
	if a, err = reconcile("a"); err != nil || a.Status.AddressRef.Name != "a" {
		t.Errorf("after the quota has grown: %v, %+v", err, a.Status)
	}
}

// An overloaded API server does not refuse the IPAddress: the claim keeps the chosen address until the next attempt, and shows no failure.
func TestOverloadKeepsAddress(t *testing.T) {
	overload := apierrors.NewTooManyRequests("overloaded", 1)
	_, reconcile := refusing(t, &overload)
	a, err := reconcile("a")
	ready := apimeta.FindStatusCondition(a.Status.Conditions, capiipamv1.IPAddressClaimReadyCondition)
	if !apierrors.IsTooManyRequests(err) || ready != nil && ready.Reason == capiipamv1.IPAddressClaimReadyAllocationFailedReason {
		t.Errorf("overloaded: %v, and the condition is %+v", err, ready)
	}
	if b, err := reconcile("b"); err != nil || b.Status.AddressRef.Name != "" {
		t.Errorf("the next claim: %v, %+v, want no address", err, b.Status)
	}
	overload = nil
	if a, err = reconcile("a"); err != nil || a.Status.AddressRef.Name != "a" {
		t.Errorf("after the overload: %v, %+v", err, a.Status)
	}
}

// refusing returns a reconciler and its reconciliation of one claim. The pool has one address. The API server answers the creation of
// the IPAddress of claim a with *answer, if it is not nil.
func refusing(t *testing.T, answer **apierrors.StatusError) (*Reconciler, func(string) (*capiipamv1.IPAddressClaim, error)) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", Finalizers: []string{ipamv1.PoolFinalizer}}}
	pool.Spec.Subnets = []ipamv1.Subnet{{CIDR: "10.0.0.0/24", Ranges: []ipamv1.AddressRange{"10.0.0.1"}}}
	pool.Status.Conditions = []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: metav1.ConditionTrue}}
	claim := func(name string) *capiipamv1.IPAddressClaim {
		return &capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
			Spec: capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{
				APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: "p",
			}},
		}
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&capiipamv1.IPAddressClaim{}, pool).
		WithObjects(pool, claim("a"), claim("b")).
		WithInterceptorFuncs(interceptor.Funcs{Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if *answer != nil && o.GetName() == "a" {
				return *answer
			}
			return c.Create(ctx, o, opts...)
		}}).Build()
	r := &Reconciler{
		Client: c, Live: c, Ledger: ledger.NewRegistry(c, c, ledger.Options{}),
		Serves: func(client.Object) bool { return true }, Watches: func(client.Object) bool { return true },
	}
	return r, func(name string) (*capiipamv1.IPAddressClaim, error) {
		of := claim(name)
		_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(of)})
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(of), of); err != nil {
			t.Fatal(err)
		}
		r.Ledger.ClaimSeen(of)
		return of, err
	}
}
