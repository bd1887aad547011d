package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// IPAM-03, IPAM-04c to IPAM-04f, IPAM-05b to IPAM-05d: the life of a claim.
func TestClaimLifeCycle(t *testing.T) {
	startManager(t, env.Config, options())
	for _, kind := range []string{"namespaced", "global"} {
		t.Run(kind, func(t *testing.T) {
			ns := env.Namespace(t)
			var pool ipamv1.Pool
			s := subnet("10.1.0.0/24")
			s.Gateway = "10.1.0.1"
			if kind == "global" {
				pool = newGlobal("life-"+ns, s)
			} else {
				pool = newPool(ns, "life", s)
			}
			create(t, pool)
			claim := newClaim(ns, "a", pool)
			create(t, claim)
			ip := wantAddress(t, claim, "10.1.0.2")
			checkAddress(t, ip, claim, pool)
			if !slices.Contains(claim.Finalizers, ipamv1.ClaimFinalizer) {
				t.Errorf("IPAM-04c: claim has no finalizer: %v", claim.Finalizers)
			}
			wantReason(t, claim, ipamv1.ClaimAddressReadyReason)
			wantCondition(t, pool, "Ready", "Ready")

			expect.NoError(t, env.Client.Delete(ctx, ip)) // a deletion by mistake: IPAM-04e
			if _, err := get(ip); err != nil || ip.Spec.Address != "10.1.0.2" {
				t.Fatalf("IPAM-04e: the address is not protected: %v", err)
			}
			expect.NoError(t, env.Client.Delete(ctx, claim))
			wantGone(t, claim)
			wantGone(t, ip)
			again := newClaim(ns, "b", pool)
			create(t, again)
			wantAddress(t, again, "10.1.0.2") // IPAM-05b
		})
	}
}

// checkAddress checks row IPAM-04e.
func checkAddress(t *testing.T, ip *capiipamv1.IPAddress, claim *capiipamv1.IPAddressClaim, pool ipamv1.Pool) {
	t.Helper()
	if ip.Name != claim.Name || ip.Spec.ClaimRef.Name != claim.Name || ip.Spec.PoolRef != claim.Spec.PoolRef {
		t.Errorf("IPAM-04e: wrong names: %+v", ip.Spec)
	}
	if ptr.Deref(ip.Spec.Prefix, -1) != 24 || ip.Spec.Gateway != "10.1.0.1" {
		t.Errorf("wrong prefix or gateway: %+v", ip.Spec)
	}
	if !slices.Contains(ip.Finalizers, "ipam.cluster.x-k8s.io/protect-address") {
		t.Errorf("IPAM-04e: not protected: %v", ip.Finalizers)
	}
	want := []metav1.OwnerReference{
		{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: claim.Name, UID: claim.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)},
		{APIVersion: ipamv1.GroupVersion.String(), Kind: pool.PoolKind(), Name: pool.GetName(), UID: pool.GetUID(), Controller: ptr.To(false), BlockOwnerDeletion: ptr.To(true)},
	}
	for i := range want {
		got := ip.OwnerReferences[i]
		if fmt.Sprint(got.APIVersion, got.Kind, got.Name, got.UID, *got.Controller, *got.BlockOwnerDeletion) !=
			fmt.Sprint(want[i].APIVersion, want[i].Kind, want[i].Name, want[i].UID, *want[i].Controller, *want[i].BlockOwnerDeletion) {
			t.Errorf("IPAM-04e: owner %d is %+v, want %+v", i, got, want[i])
		}
	}
}

// IPAM-04a: the provider ignores claims for pools of other groups or kinds.
func TestForeignClaim(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.1.1.0/24"))
	create(t, pool)
	foreign := []capiipamv1.IPPoolReference{
		{APIGroup: "ipam.cluster.x-k8s.io", Kind: "CapstanIPPool", Name: "p"},
		{APIGroup: "ipam.capstan.dev", Kind: "InClusterIPPool", Name: "p"},
	}
	for i, ref := range foreign {
		c := newClaim(ns, fmt.Sprint("foreign-", i), pool)
		c.Spec.PoolRef = ref
		create(t, c)
	}
	ours := newClaim(ns, "ours", pool)
	create(t, ours)
	addressOf(t, ours)
	for i := range foreign {
		c, err := get(&capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprint("foreign-", i)}})
		expect.NoError(t, err)
		if len(c.Finalizers) > 0 || len(c.Status.Conditions) > 0 || c.Status.AddressRef.Name != "" {
			t.Errorf("foreign claim was touched: %+v", c)
		}
	}
}

// IPAM-04b, IPAM-05a: the Cluster does not exist, is paused by its spec, or is paused by an annotation. The claim names
// it by spec.clusterName or by the deprecated label.
func TestClusterGates(t *testing.T) {
	cached, _ := runManager(t, env.Config, options())
	for _, by := range []string{"spec", "label"} {
		for _, how := range []string{"spec", "annotation"} {
			t.Run(by+"-"+how, func(t *testing.T) { testClusterGate(t, cached, by, how) })
		}
	}
}

func testClusterGate(t *testing.T, cached client.Reader, by, how string) {
	t.Helper()
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.1.2.0/24"))
	create(t, pool)
	claim := newClaim(ns, "gated", pool)
	if by == "spec" {
		claim.Spec.ClusterName = "c"
	} else {
		claim.Labels = map[string]string{clusterv1.ClusterNameLabel: "c"}
	}
	create(t, claim)
	witness := func(name string) { w := newClaim(ns, name, pool); create(t, w); addressOf(t, w) }
	untouched := func(step string) {
		t.Helper()
		_, err := get(claim)
		expect.NoError(t, err)
		if len(claim.Finalizers) > 0 || claim.Status.AddressRef.Name != "" {
			t.Fatalf("%s: claim was touched: %v %v", step, claim.Finalizers, claim.Status)
		}
	}
	witness("w1")
	untouched("IPAM-04b: Cluster not found")

	cluster := newCluster(ns, "c", how == "spec")
	if how == "annotation" {
		cluster.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
	}
	create(t, cluster)
	witness("w2")
	untouched("IPAM-04b: Cluster paused")
	pause := func(p bool) {
		update(t, cluster, func(c *clusterv1.Cluster) {
			if how == "spec" {
				c.Spec.Paused = ptr.To(p)
			} else if delete(c.Annotations, clusterv1.PausedAnnotation); p {
				c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
			}
		})
	}
	pause(false)
	ip := addressOf(t, claim)

	pause(true)
	// The events of claims and Clusters come from two watches, so their order is not defined.
	expect.Eventually(t, "the provider's cache to contain the paused Cluster", func() error {
		seen := newCluster(ns, "c", false)
		if err := cached.Get(ctx, client.ObjectKeyFromObject(seen), seen); err != nil || !annotations.IsPaused(seen, seen) {
			return errOr(err, "the cache does not contain it")
		}
		return nil
	})
	witness("w3")
	expect.NoError(t, env.Client.Delete(ctx, claim))
	witness("w4")
	if _, err := get(claim); err != nil {
		t.Fatalf("IPAM-05a: claim of a paused Cluster was removed: %v", err)
	}
	// IPAM-05a: the deletion of a claim does not wait for a Cluster that was deleted.
	expect.NoError(t, env.Client.Delete(ctx, cluster))
	wantGone(t, claim)
	wantGone(t, ip)
}

// A claim can be deleted after its pool was deleted, with or without the pool's finalizer. Row IPAM-05.
func TestClaimOfDeletedPoolIsRemoved(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.1.3.0/24"))
	pool.Spec.RestSeconds = ptr.To[int32](3600)
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	ip := addressOf(t, claim)
	removeByForce(t, pool)
	late := newClaim(ns, "late", pool)
	create(t, late)
	if m := wantReason(t, late, capiipamv1.IPAddressClaimReadyPoolNotReadyReason); !strings.Contains(m, "does not exist") {
		t.Errorf("unclear message %q", m)
	}
	expect.NoError(t, env.Client.Delete(ctx, claim))
	wantGone(t, claim)
	wantGone(t, ip)
	create(t, newPool(ns, "p", subnet("10.1.3.0/24")))
	addressOf(t, late)
}

// removeByForce removes a pool as clusterctl does: the webhook allows it, and the finalizers are removed.
func removeByForce(t *testing.T, pool *ipamv1.CapstanIPPool) {
	t.Helper()
	update(t, pool, func(p *ipamv1.CapstanIPPool) {
		p.Annotations = map[string]string{clusterctlv1.DeleteForMoveAnnotation: ""}
	})
	expect.NoError(t, env.Client.Delete(ctx, pool))
	expect.NoError(t, client.IgnoreNotFound(env.Client.Patch(ctx, pool, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":[]}}`)))))
	wantGone(t, pool)
}

// IPAM-08: each claim gets an address of one family.
func TestDualStackTakesTwoPools(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	v4, v6 := newPool(ns, "v4", subnet("10.1.4.0/24")), newPool(ns, "v6", subnet("fd00:1:4::/64"))
	create(t, v4, v6)
	a, b := newClaim(ns, "m-v4", v4), newClaim(ns, "m-v6", v6)
	create(t, a, b)
	wantAddress(t, a, "10.1.4.1")
	ip := wantAddress(t, b, "fd00:1:4::1")
	if ptr.Deref(ip.Spec.Prefix, 0) != 64 {
		t.Errorf("prefix is %v", ip.Spec.Prefix)
	}
	wantCondition(t, v6, "Ready", "Ready")
	expect.Eventually(t, "the counts of an IPv6 pool", func() error {
		if _, err := get(v6); err != nil {
			return err
		}
		if c := v6.Status.Addresses; c == nil || c.Total != "18446744073709551615" || c.Free != "18446744073709551614" || c.Used != 1 {
			return fmt.Errorf("counts are %+v", c)
		}
		return nil
	})
}

// IPAM-05: an address with the finalizer of another party stays allocated after its claim was deleted, until that party removes it. The
// infrastructure provider relies on this for the addresses of Services.
func TestForeignFinalizerHoldsAddress(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "one", subnet("10.1.0.0/24", "10.1.0.9"))
	create(t, pool)
	first, second := newClaim(ns, "first", pool), newClaim(ns, "second", pool)
	create(t, first)
	ip := wantAddress(t, first, "10.1.0.9")
	update(t, ip, func(ip *capiipamv1.IPAddress) { ip.Finalizers = append(ip.Finalizers, "example.com/used") })
	expect.NoError(t, env.Client.Delete(ctx, first))
	expect.Eventually(t, "the deletion of the address", func() error {
		if got, err := get(ip); err != nil || got.DeletionTimestamp.IsZero() {
			return errOr(err, "%v", got)
		}
		return nil
	})
	create(t, second)
	wantReason(t, second, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
	update(t, ip, func(ip *capiipamv1.IPAddress) {
		ip.Finalizers = slices.DeleteFunc(ip.Finalizers, func(f string) bool { return f == "example.com/used" })
	})
	wantGone(t, first)
	wantAddress(t, second, "10.1.0.9")
}
