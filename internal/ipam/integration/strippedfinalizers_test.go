package integration

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

func strip(t *testing.T, obj client.Object) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	expect.NoError(t, client.IgnoreNotFound(env.Client.Patch(ctx, obj, patch)))
}

func wantFinalizer(t *testing.T, obj client.Object, finalizer string) {
	t.Helper()
	expect.Eventually(t, "the finalizer of "+obj.GetName(), func() error {
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
	expect.NoError(t, env.Client.Delete(ctx, low)) // The lowest free address differs from the claim's address.
	wantGone(t, low)
	old := ip.UID
	expect.NoError(t, env.Client.Delete(ctx, ip))
	strip(t, ip)
	expect.Eventually(t, "the IPAddress to be created again", func() error {
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
	expect.NoError(t, env.Client.Delete(ctx, claim))
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
	expect.Eventually(t, "the counts", func() error {
		if _, err := get(pool); err != nil || pool.Status.Addresses == nil || pool.Status.Addresses.OutOfRange != 1 || pool.Status.Addresses.Used != 1 {
			return errOr(err, "they are %+v", pool.Status.Addresses)
		}
		return nil
	})
}

// A claim was removed by force, without a release of its address. Its pool still exists, so the garbage collector removes only the
// reference to the claim from the IPAddress. The provider then removes the IPAddress. A claim of the same name adopts it, and a claim of another pool waits until it is removed.
func TestCollectedOrphanIsRemoved(t *testing.T) {
	stop := startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool, other := newGlobal("collected-"+ns, subnet("10.7.3.0/24", "10.7.3.10-10.7.3.12")), newPool(ns, "other", subnet("10.7.4.0/24"))
	create(t, pool, other)
	var ips []*capiipamv1.IPAddress
	for i, name := range []string{"gone", "again", "elsewhere"} {
		claim := newClaim(ns, name, pool)
		create(t, claim)
		ips = append(ips, wantAddress(t, claim, fmt.Sprintf("10.7.3.%d", 10+i)))
	}
	stop()
	collector := garbageCollector(t)
	for _, ip := range ips {
		claim := newClaim(ns, ip.Name, pool)
		expect.NoError(t, env.Client.Delete(ctx, claim))
		strip(t, claim)
		wantGone(t, claim)
		before := ip.DeepCopy()
		ip.OwnerReferences = slices.DeleteFunc(ip.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "IPAddressClaim" })
		expect.NoError(t, collector.Patch(ctx, ip, client.MergeFrom(before)))
	}
	again, elsewhere := newClaim(ns, "again", pool), newClaim(ns, "elsewhere", other)
	create(t, again, elsewhere)

	startManager(t, env.Config, options())
	wantGone(t, ips[0])
	if adopted := wantAddress(t, again, "10.7.3.11"); adopted.UID != ips[1].UID || !metav1.IsControlledBy(adopted, again) {
		t.Errorf("the claim of the same name did not adopt its IPAddress: %v", adopted.OwnerReferences)
	}
	wantAddress(t, elsewhere, "10.7.4.1")
	for i, address := range []string{"10.7.3.10", "10.7.3.12"} {
		next := newClaim(ns, fmt.Sprint("next", i), pool)
		create(t, next)
		wantAddress(t, next, address)
	}
}

// garbageCollector returns a client with the rights of Kubernetes' garbage collector.
func garbageCollector(t *testing.T) client.Client {
	t.Helper()
	config := rest.CopyConfig(env.Config)
	config.Impersonate.UserName = "system:serviceaccount:kube-system:generic-garbage-collector"
	c, err := client.New(config, client.Options{Scheme: env.Scheme})
	expect.NoError(t, err)
	return c
}
