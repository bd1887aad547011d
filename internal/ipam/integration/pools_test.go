package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// IPAM-01, IPAM-06: names and labels of the installed CRDs.
func TestCRDs(t *testing.T) {
	expect.NoError(t, apiextensionsv1.AddToScheme(env.Scheme))
	for kind, move := range map[string]string{
		"CapstanIPPool":       "clusterctl.cluster.x-k8s.io/move-hierarchy",
		"GlobalCapstanIPPool": "clusterctl.cluster.x-k8s.io/move",
	} {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		expect.NoError(t, env.Client.Get(ctx, client.ObjectKey{Name: contract.CalculateCRDName("ipam.capstan.dev", kind)}, crd))
		if crd.Labels["cluster.x-k8s.io/v1beta2"] != "v1beta2" {
			t.Errorf("%s: no contract label: %v", kind, crd.Labels)
		}
		for _, l := range []string{"clusterctl.cluster.x-k8s.io/move-hierarchy", "clusterctl.cluster.x-k8s.io/move"} {
			if _, has := crd.Labels[l]; has != (l == move) {
				t.Errorf("%s: label %s is %v", kind, l, has)
			}
		}
		if !slices.Equal(crd.Spec.Names.Categories, []string{"cluster-api", "capstan"}) {
			t.Errorf("%s: categories are %v", kind, crd.Spec.Names.Categories)
		}
	}
}

// IPAM-02, IPAM-03: the conditions of an exhausted pool and of its claims show the reason. When an address is released
// or the pool grows, the waiting claims are served in the order of their creation.
func TestExhaustion(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.0.0/24", "10.2.0.10-10.2.0.11"))
	create(t, pool)
	var claims []*capiipamv1.IPAddressClaim
	for i := range 5 {
		c := newClaim(ns, fmt.Sprintf("z%d", 9-i), pool) // The order of the names differs from the order of creation.
		create(t, c)
		claims = append(claims, c)
		if i < 2 {
			addressOf(t, c)
		} else {
			wantReason(t, c, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
		}
	}
	wantCondition(t, pool, ipamv1.AddressesAvailableCondition, ipamv1.ExhaustedReason)
	c := wantCondition(t, pool, ipamv1.ReadyCondition, ipamv1.ExhaustedReason)
	if c.Status != metav1.ConditionFalse {
		t.Errorf("Ready is %v", c.Status)
	}
	wantEvent(t, ns, claims[2].Name, "PoolExhausted")
	wantEvent(t, ns, "p", "Exhausted")
	wantIdle(t)

	expect.NoError(t, env.Client.Delete(ctx, claims[0]))
	wantAddress(t, claims[2], "10.2.0.10")
	for _, c := range claims[3:] {
		if _, err := get(c); err != nil || c.Status.AddressRef.Name != "" {
			t.Fatalf("claim %s was served before an earlier claim: %v", c.Name, err)
		}
	}
	update(t, pool, func(p *ipamv1.CapstanIPPool) { p.Spec.Subnets[0].Ranges[0] = "10.2.0.10-10.2.0.13" })
	addressOf(t, claims[3])
	addressOf(t, claims[4])
	wantCondition(t, pool, ipamv1.AddressesAvailableCondition, ipamv1.ExhaustedReason) // The pool is full.
	wantCondition(t, pool, ipamv1.ReadyCondition, ipamv1.ReadyReason)                  // No claim waits.
}

// wantIdle checks that waiting claims cause no work without events.
func wantIdle(t *testing.T) {
	t.Helper()
	expect.Idle(t, "the reconciler of claims", countWait, func() string { return fmt.Sprint(testmetrics.Reconciles(t, "ipaddressclaim")) })
}

func wantEvent(t *testing.T, ns, name, reason string) {
	t.Helper()
	expect.Eventually(t, "an event "+reason+" on "+name, func() error {
		list := &eventsv1.EventList{}
		if err := env.Client.List(ctx, list, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == reason && e.Regarding.Name == name {
				return nil
			}
		}
		return fmt.Errorf("%d other events", len(list.Items))
	})
}

// The webhook refuses to remove used addresses from a pool and to delete a used pool.
func TestPoolInUseIsProtected(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.1.0/24", "10.2.1.10-10.2.1.20"))
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	wantAddress(t, claim, "10.2.1.10")
	expect.Eventually(t, "the removal of used addresses to be refused", func() error {
		if _, err := get(pool); err != nil {
			return err
		}
		pool.Spec.Subnets[0].Ranges[0] = "10.2.1.11-10.2.1.20"
		err := env.Client.Update(ctx, pool)
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "10.2.1.10 of claim "+ns+"/a") {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	err := env.Client.Delete(ctx, pool)
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "delete their claims first") {
		t.Errorf("deletion of a pool in use: %v", err)
	}
	// A drained subnet gets no new allocations. Existing allocations stay valid.
	update(t, pool, func(p *ipamv1.CapstanIPPool) {
		p.Spec.Subnets[0].Drain = ptr.To(true)
		p.Spec.Subnets = append(p.Spec.Subnets, subnet("10.2.2.0/24"))
	})
	second := newClaim(ns, "b", pool)
	create(t, second)
	wantAddress(t, second, "10.2.2.1")
	wantAddress(t, claim, "10.2.1.10")
	for _, c := range []*capiipamv1.IPAddressClaim{claim, second} {
		expect.NoError(t, env.Client.Delete(ctx, c))
		wantGone(t, c)
	}
	remove(t, pool)
	wantGone(t, pool)
}

// Without the webhook, the status of a pool shows the used addresses that are no longer in the spec, and an invalid
// spec.
func TestOutOfRangeAndInvalidSpecWithoutWebhook(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.3.0/24", "10.2.3.10-10.2.3.20"))
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	wantAddress(t, claim, "10.2.3.10")
	withoutWebhooks(t, func() {
		update(t, pool, func(p *ipamv1.CapstanIPPool) { p.Spec.Subnets[0].Ranges[0] = "10.2.3.11-10.2.3.20" })
		wantCondition(t, pool, ipamv1.AddressesInRangeCondition, ipamv1.OutOfRangeReason)
		if a := pool.Status.Addresses; a.OutOfRange != 1 || a.Used != 0 || a.Free != "10" {
			t.Errorf("counts are %+v", a)
		}
		expect.NoError(t, env.Client.Delete(ctx, claim))
		wantCondition(t, pool, ipamv1.AddressesInRangeCondition, ipamv1.InRangeReason)

		update(t, pool, func(p *ipamv1.CapstanIPPool) { p.Spec.Subnets[0].Ranges[0] = "10.2.3.20-10.2.3.11" })
		c := wantCondition(t, pool, ipamv1.SpecValidCondition, ipamv1.InvalidSpecReason)
		if !strings.Contains(c.Message, "reversed") {
			t.Errorf("unclear message %q", c.Message)
		}
		late := newClaim(ns, "late", pool)
		create(t, late)
		wantReason(t, late, capiipamv1.IPAddressClaimReadyPoolNotReadyReason)
		update(t, pool, func(p *ipamv1.CapstanIPPool) { p.Spec.Subnets[0].Ranges[0] = "10.2.3.11-10.2.3.20" })
		wantAddress(t, late, "10.2.3.11")
	})
}

// IPAM adoption: a claim adopts an existing IPAddress of its name.
func TestAdoption(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.4.0/24"))
	create(t, pool)
	claim := newClaim(ns, "a", pool)
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a"},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: "a"}, PoolRef: refTo(pool),
			Address: "10.2.4.77", Prefix: ptr.To[int32](23), Gateway: "10.2.4.254",
		},
	}
	create(t, ip)
	uid := ip.UID
	create(t, claim)
	got := wantAddress(t, claim, "10.2.4.77")
	if got.UID != uid || *got.Spec.Prefix != 23 || got.Spec.Gateway != "10.2.4.254" {
		t.Errorf("it was changed: %+v", got.Spec)
	}
	if len(got.OwnerReferences) != 2 || !slices.Contains(got.Finalizers, ipamv1.AddressFinalizer) {
		t.Errorf("it was not completed: %+v", got.ObjectMeta)
	}
	// The provider refuses a second IPAddress with the same address. It serves the claim when the IPAddress is
	// corrected.
	twin := ip.DeepCopy()
	twin.ObjectMeta = metav1.ObjectMeta{Namespace: ns, Name: "b"}
	twin.Spec.ClaimRef.Name = "b"
	create(t, twin)
	b := newClaim(ns, "b", pool)
	create(t, b)
	if m := wantReason(t, b, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, ns+"/a has too") {
		t.Errorf("unclear message %q", m)
	}
	expect.NoError(t, env.Client.Delete(ctx, twin))
	wantAddress(t, b, "10.2.4.1")
}

// An IPAddress with the claim's name may belong to another object. The provider does not change it. The claim's
// condition shows the reason, and the claim does not delay others. It is served after the IPAddress is removed.
func TestAddressOfAnotherOwner(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.7.0/24", "10.2.7.10-10.2.7.11"))
	create(t, pool)
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "ConfigMap", Name: "router", UID: "router", Controller: ptr.To(true)},
		}},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: "a"}, PoolRef: refTo(pool), Address: "10.2.7.10", Prefix: ptr.To[int32](24),
		},
	}
	create(t, ip)
	claim, behind := newClaim(ns, "a", pool), newClaim(ns, "b", pool)
	create(t, claim)
	if m := wantReason(t, claim, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, `belongs to ConfigMap "router"`) {
		t.Errorf("unclear message %q", m)
	}
	create(t, behind)
	wantAddress(t, behind, "10.2.7.11")
	uid := ip.UID
	update(t, ip, func(ip *capiipamv1.IPAddress) { ip.OwnerReferences = nil })
	if got := wantAddress(t, claim, "10.2.7.10"); got.UID != uid {
		t.Error("it was deleted and created again")
	}
}

// In a pool of prefixes, the provider does not adopt an IPAddress that is not one of the prefixes. Its addresses stay
// used until it is deleted.
func TestAdoptionOfAnOddPrefix(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.11.0/26"))
	pool.Spec.PrefixLength, pool.Spec.RestSeconds = ptr.To[int32](28), ptr.To[int32](3600)
	create(t, pool)
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a"},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: "a"}, PoolRef: refTo(pool), Address: "10.2.11.8", Prefix: ptr.To[int32](32),
		},
	}
	create(t, ip)
	claim := newClaim(ns, "a", pool)
	create(t, claim)
	if m := wantReason(t, claim, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, "10.2.11.8/32, which is not one prefix") {
		t.Errorf("unclear message %q", m)
	}
	var others []*capiipamv1.IPAddressClaim
	for i, want := range []string{"10.2.11.16", "10.2.11.32", "10.2.11.48"} {
		c := newClaim(ns, fmt.Sprint("c", i), pool)
		create(t, c)
		wantAddress(t, c, want)
		others = append(others, c)
	}
	expect.NoError(t, env.Client.Delete(ctx, ip))
	wantAddress(t, claim, "10.2.11.0")
	last := newClaim(ns, "last", pool)
	create(t, last)
	wantReason(t, last, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
	for i, c := range others {
		wantAddress(t, c, fmt.Sprintf("10.2.11.%d", 16*(i+1)))
	}
}

// Reservations by claim name, and requested addresses by annotation.
func TestExactAddresses(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.2.5.0/24"))
	pool.Spec.Reservations = []ipamv1.Reservation{{Address: "10.2.5.1", Claim: "kept"}}
	create(t, pool)
	ask := func(name, address string) *capiipamv1.IPAddressClaim {
		c := newClaim(ns, name, pool)
		if address != "" {
			c.Annotations = map[string]string{ipamv1.AddressAnnotation: address}
		}
		create(t, c)
		return c
	}
	wantAddress(t, ask("any", ""), "10.2.5.2")
	first := ask("exact", "10.2.5.50")
	wantAddress(t, first, "10.2.5.50")
	second := ask("exact-too", "10.2.5.50")
	if m := wantReason(t, second, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, "in use by claim "+ns+"/exact") {
		t.Errorf("unclear message %q", m)
	}
	for address, want := range map[string]string{"10.2.5.1": "is reserved for claim \"kept\"", "10.9.9.9": "is not in the pool", "ten": "expected an IP address", "10.2.5.0": "is not in the pool"} {
		c := ask("bad-"+strings.ReplaceAll(address, ".", "-"), address)
		if m := wantReason(t, c, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, want) {
			t.Errorf("%s: unclear message %q", address, m)
		}
	}
	wantAddress(t, ask("kept", ""), "10.2.5.1")
	expect.NoError(t, env.Client.Delete(ctx, first))
	wantAddress(t, second, "10.2.5.50")
}

// movable fails the test if a move could lose the resting addresses of a stored version of a pool: the version has
// neither a copy of them nor the annotation that makes clusterctl wait (ALL-12, CTL-13).
func movable(t *testing.T) {
	t.Helper()
	follow(t, &ipamv1.CapstanIPPoolList{}, func(_ watch.EventType, obj runtime.Object) {
		pool, ok := obj.(*ipamv1.CapstanIPPool)
		if ok && !ledger.Saved(pool, time.Now()) && !ledger.BlocksMove(pool) {
			t.Errorf("a move of %s would lose the resting addresses %+v; annotations %v", pool.Name, pool.Status.Allocator.Resting, pool.Annotations)
		}
	})
}

// A released address rests. This does not delay the deletion of the claim, and a restart of the manager does not end it.
// Every stored version of a pool has a copy of its resting addresses (ALL-12) or the annotation block-move (CTL-13).
func TestRest(t *testing.T) {
	movable(t)
	stop := startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool, long := newPool(ns, "p", subnet("10.2.6.0/24", "10.2.6.10")), newPool(ns, "long", subnet("10.2.6.0/24", "10.2.6.20"))
	pool.Spec.RestSeconds, long.Spec.RestSeconds = ptr.To[int32](6), ptr.To[int32](3600)
	create(t, pool, long)
	a, first := newClaim(ns, "a", pool), newClaim(ns, "first", long)
	create(t, a, first)
	wantAddress(t, a, "10.2.6.10")
	wantAddress(t, first, "10.2.6.20")
	released := time.Now()
	expect.NoError(t, env.Client.Delete(ctx, a))
	expect.NoError(t, env.Client.Delete(ctx, first))
	wantGone(t, a)
	wantGone(t, first) // long before the end of its hour
	expect.Eventually(t, "the copy, so that clusterctl does not wait", func() error {
		p, err := get(long)
		if err == nil && (ledger.BlocksMove(p) || p.Annotations[ipamv1.RestingAnnotation] == "") {
			err = errOr(nil, "annotations %v", p.Annotations)
		}
		return err
	})
	stop()
	startManager(t, env.Config, options())
	b, second := newClaim(ns, "b", pool), newClaim(ns, "second", long)
	create(t, b, second)
	wantReason(t, second, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
	wantAddress(t, b, "10.2.6.10")
	if d := time.Since(released); d < 6*time.Second {
		t.Errorf("the address rested only %v", d)
	}
}

// Prefixes and allocation orders, in pools of both kinds.
func TestPrefixesAndOrders(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	v4 := newGlobal("prefix-"+ns, subnet("10.2.8.0/24"))
	v4.Spec.PrefixLength = ptr.To[int32](28)
	v6 := newPool(ns, "v6", subnet("fd00:2::/48"))
	v6.Spec.PrefixLength, v6.Spec.Order = ptr.To[int32](64), ipamv1.RandomOrder
	robin := newPool(ns, "robin", subnet("10.2.9.0/29"))
	robin.Spec.Order = ipamv1.RoundRobinOrder
	create(t, v4, v6, robin)
	a, b, c := newClaim(ns, "a", v4), newClaim(ns, "b", v4), newClaim(ns, "c", v6)
	b.Annotations = map[string]string{ipamv1.AddressAnnotation: "10.2.8.64/28"}
	create(t, a, b, c)
	if ip := wantAddress(t, a, "10.2.8.0"); *ip.Spec.Prefix != 28 {
		t.Errorf("prefix is %d", *ip.Spec.Prefix)
	}
	wantAddress(t, b, "10.2.8.64")
	if ip := addressOf(t, c); *ip.Spec.Prefix != 64 || !strings.HasPrefix(ip.Spec.Address, "fd00:2:") {
		t.Errorf("got %s/%d", ip.Spec.Address, *ip.Spec.Prefix)
	}
	for i := range 8 {
		r := newClaim(ns, fmt.Sprint("r", i), robin)
		create(t, r)
		wantAddress(t, r, fmt.Sprintf("10.2.9.%d", i%6+1))
		expect.NoError(t, env.Client.Delete(ctx, r))
		wantGone(t, r)
	}
}

// A pool that refuses overlaps does not block pools of other namespaces or global pools, and its messages do not reveal
// them. Only a namespaced pool that overlaps a global one is refused.
func TestOverlapOfTenants(t *testing.T) {
	startManager(t, env.Config, options())
	attacker, victim := env.Namespace(t), env.Namespace(t)
	broad := newPool(attacker, "broad", subnet("10.2.0.0/16", "10.2.40.0/22"))
	broad.Spec.Overlap = ipamv1.RefuseOverlap
	create(t, broad)
	wantCondition(t, broad, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	honest, global := newPool(victim, "secret-name", subnet("10.2.40.0/24")), newGlobal("global-"+victim, subnet("10.2.41.0/24"))
	create(t, honest, global)
	wantCondition(t, honest, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	wantCondition(t, honest, ipamv1.NotOverlappingCondition, ipamv1.NotOverlappingReason)
	wantCondition(t, global, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	wantCondition(t, broad, ipamv1.ReadyCondition, ipamv1.OverlapRefusedReason)
	if c := wantCondition(t, broad, ipamv1.NotOverlappingCondition, ipamv1.OverlapRefusedReason); strings.Contains(c.Message, "secret-name") || !strings.Contains(c.Message, global.Name) {
		t.Errorf("the message is %q", c.Message)
	}
	// Admission refuses it as well.
	second := newPool(attacker, "second", subnet("10.2.40.0/24"))
	second.Spec.Overlap = ipamv1.RefuseOverlap
	if err := env.Client.Create(ctx, second); !apierrors.IsInvalid(err) || strings.Contains(err.Error(), "secret-name") {
		t.Errorf("overlaps broad: got %v", err)
	}
	update(t, global, func(p *ipamv1.GlobalCapstanIPPool) { p.Spec.Overlap = ipamv1.RefuseOverlap })
	// Messages do not reveal claims to other namespaces.
	held := newClaim(victim, "secret-claim", global)
	held.Annotations = map[string]string{ipamv1.AddressAnnotation: "10.2.41.7"}
	create(t, held)
	wantAddress(t, held, "10.2.41.7")
	curious := newClaim(attacker, "curious", global)
	curious.Annotations = held.Annotations
	create(t, curious)
	if m := wantReason(t, curious, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, "in use by a claim of another namespace") {
		t.Errorf("the message is %q", m)
	}
}

// Overlaps between pools are reported. They are refused if one of the pools requests that.
func TestOverlap(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	a, b := newPool(ns, "a", subnet("10.2.10.0/24", "10.2.10.1-10.2.10.50")), newPool(ns, "b", subnet("10.2.10.0/24", "10.2.10.40-10.2.10.60"))
	create(t, a, b)
	for _, p := range []*ipamv1.CapstanIPPool{a, b} {
		c := wantCondition(t, p, ipamv1.NotOverlappingCondition, ipamv1.OverlappingReason)
		if !strings.Contains(c.Message, "10.2.10.40-10.2.10.50") {
			t.Errorf("unclear message %q", c.Message)
		}
		wantCondition(t, p, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	}
	strict := newPool(ns, "c", subnet("10.2.10.0/24", "10.2.10.60-10.2.10.70"))
	strict.Spec.Overlap = ipamv1.RefuseOverlap
	expect.Eventually(t, "the overlap to be refused", func() error {
		err := env.Client.Create(ctx, strict.DeepCopy(), client.DryRunAll)
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "10.2.10.60-10.2.10.60 in common with CapstanIPPool/"+ns+"/b") {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	// Without the webhook, the pool is created, but it serves no claim.
	withoutWebhooks(t, func() { create(t, strict) })
	wantCondition(t, strict, ipamv1.ReadyCondition, ipamv1.OverlapRefusedReason)
	claim := newClaim(ns, "x", strict)
	create(t, claim)
	wantReason(t, claim, capiipamv1.IPAddressClaimReadyPoolNotReadyReason)
	// The older pool reports the overlap and continues to serve claims.
	expect.Eventually(t, "the older pool to report the refused one", func() error {
		c := wantCondition(t, b, ipamv1.NotOverlappingCondition, ipamv1.OverlappingReason)
		if !strings.Contains(c.Message, "10.2.10.60-10.2.10.60 in common with CapstanIPPool/"+ns+"/c") {
			return fmt.Errorf("the message is %q", c.Message)
		}
		return nil
	})
	wantCondition(t, b, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	older := newClaim(ns, "older", b)
	create(t, older)
	wantAddress(t, older, "10.2.10.40")

	update(t, strict, func(p *ipamv1.CapstanIPPool) { p.Spec.Subnets[0].Ranges[0] = "10.2.10.61-10.2.10.70" })
	wantAddress(t, claim, "10.2.10.61")
}

// An administrator creates a global pool that refuses overlaps over the pool of a namespace. The older pool stays editable, apart from new
// common addresses. clusterctl or a backup can create it again: it keeps its addresses and allocates no new ones, also if a tenant has
// written the annotation of a copy.
func TestOverlapThatWasAllowed(t *testing.T) {
	startManager(t, env.Config, options())
	ns, target := env.Namespace(t), env.Namespace(t)
	old, global := newPool(ns, "p", subnet("10.2.60.0/24", "10.2.60.10-10.2.60.20")), newGlobal("strict-"+ns, subnet("10.2.60.0/24"))
	global.Spec.Overlap = ipamv1.RefuseOverlap
	create(t, old, global)
	wantCondition(t, old, ipamv1.ReadyCondition, ipamv1.OverlapRefusedReason)
	update(t, old, func(p *ipamv1.CapstanIPPool) { p.Spec.RestSeconds = ptr.To[int32](1) })
	expect.Eventually(t, "more common addresses to be refused", func() error {
		if _, err := get(old); err != nil {
			return err
		}
		old.Spec.Subnets[0].Ranges[0] = "10.2.60.10-10.2.60.30"
		err := env.Client.Update(ctx, old)
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "has 10.2.60.21-10.2.60.30 in common with GlobalCapstanIPPool/"+global.Name) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})

	moved := newPool(target, "p", subnet("10.2.60.0/24", "10.2.60.10-10.2.60.20"))
	if err := env.Client.Create(ctx, moved.DeepCopy()); !apierrors.IsInvalid(err) {
		t.Errorf("a new pool: %v", err)
	}
	origin := map[string]string{ipamv1.OriginUIDAnnotation: "before"}
	moved.Annotations = origin
	served := newClaim(target, "served", moved)
	served.Annotations = origin
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: target, Name: "served", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: "served", UID: "before", Controller: ptr.To(true)},
		}},
		Spec: capiipamv1.IPAddressSpec{ClaimRef: capiipamv1.IPAddressClaimReference{Name: "served"}, PoolRef: refTo(moved), Address: "10.2.60.12", Prefix: ptr.To[int32](24)},
	}
	create(t, moved, ip, served)
	wantAddress(t, served, "10.2.60.12")
	wantCondition(t, moved, ipamv1.ReadyCondition, ipamv1.OverlapRefusedReason)
	late := newClaim(target, "late", moved)
	create(t, late)
	if m := wantReason(t, late, capiipamv1.IPAddressClaimReadyPoolNotReadyReason); !strings.Contains(m, "overlaps another pool") {
		t.Errorf("unclear message %q", m)
	}
}
