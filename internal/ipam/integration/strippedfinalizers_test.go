package integration

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

func strip(t *testing.T, obj client.Object) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	must(t, client.IgnoreNotFound(env.Client.Patch(ctx, obj, patch)))
}

func wantFinalizer(t *testing.T, obj client.Object, finalizer string) {
	t.Helper()
	eventually(t, "the finalizer of "+obj.GetName(), func() error {
		if _, err := get(obj); err != nil || !slices.Contains(obj.GetFinalizers(), finalizer) {
			return errOr(err, "finalizers are %v", obj.GetFinalizers())
		}
		return nil
	})
}

// IPAM-04c, IPAM-04e: the provider restores finalizers that a user has removed.
func TestFinalizersAreRestored(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.7.0.0/24"))
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	ip := wantAddress(t, claim, "10.7.0.1")
	for _, o := range []struct {
		client.Object
		finalizer string
	}{{claim, ipamv1.ClaimFinalizer}, {ip, ipamv1.AddressFinalizer}, {pool, ipamv1.PoolFinalizer}} {
		strip(t, o.Object)
		wantFinalizer(t, o.Object, o.finalizer)
	}
}

// The provider creates an IPAddress again, with the same address, after a user has removed it by force.
func TestAddressRemovedByForce(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.7.1.0/24"))
	create(t, pool)
	low, claim := newClaim(ns, "low", pool), newClaim(ns, "a", pool)
	create(t, low)
	wantAddress(t, low, "10.7.1.1")
	create(t, claim)
	ip := wantAddress(t, claim, "10.7.1.2")
	must(t, env.Client.Delete(ctx, low)) // The lowest free address differs from the claim's address.
	wantGone(t, low)
	old := ip.UID
	must(t, env.Client.Delete(ctx, ip))
	strip(t, ip)
	eventually(t, "the IPAddress to be created again", func() error {
		again, err := get(&capiipamv1.IPAddress{ObjectMeta: claim.ObjectMeta})
		if err != nil || again.UID == old {
			return errOr(err, "it is still the old one")
		}
		if again.Spec.Address != "10.7.1.2" {
			t.Fatalf("the claim's address changed to %s", again.Spec.Address)
		}
		return nil
	})
}

// A user removes the finalizers of a claim while no manager runs. The IPAddress of the claim is then an orphan. The
// provider removes it and its address is free.
func TestOrphanIsRemoved(t *testing.T) {
	stop := startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.7.2.0/24", "10.7.2.10"))
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	ip := wantAddress(t, claim, "10.7.2.10")
	stop()
	must(t, env.Client.Delete(ctx, claim))
	strip(t, claim)
	wantGone(t, claim)
	// An IPAddress that was created before its claim is not an orphan.
	beforehand := &capiipamv1.IPAddress{
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: "later"}, PoolRef: refTo(pool), Address: "10.7.2.99", Prefix: ip.Spec.Prefix,
		},
	}
	beforehand.Namespace, beforehand.Name = ns, "later"
	create(t, beforehand)

	startManager(t, env.Config, options())
	wantGone(t, ip)
	next := newClaim(ns, "b", pool)
	create(t, next)
	wantAddress(t, next, "10.7.2.10")
	if _, err := get(beforehand); err != nil {
		t.Errorf("the IPAddress that was created before its claim was removed: %v", err)
	}
	eventually(t, "the counts", func() error {
		if _, err := get(pool); err != nil || pool.Status.Addresses == nil || pool.Status.Addresses.OutOfRange != 1 || pool.Status.Addresses.Used != 1 {
			return errOr(err, "they are %+v", pool.Status.Addresses)
		}
		return nil
	})
}
