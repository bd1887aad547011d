package integration

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// wantUntouched checks that this manager did not change a claim of another manager. It has served a later claim already.
func wantUntouched(t *testing.T, claim *capiipamv1.IPAddressClaim) {
	t.Helper()
	_, err := get(claim)
	expect.NoError(t, err)
	if len(claim.Finalizers) > 0 || len(claim.Status.Conditions) > 0 || claim.Status.AddressRef.Name != "" {
		t.Errorf("claim %s/%s was touched: %v %+v", claim.Namespace, claim.Name, claim.Finalizers, claim.Status)
	}
}

// IPAM-03 with --namespace: the manager ignores claims of other namespaces.
func TestNamespaceOption(t *testing.T) {
	ns, other := env.Namespace(t), env.Namespace(t)
	opts := options()
	opts.WatchNamespace = ns
	startManager(t, env.Config, opts)
	pool, otherPool := newPool(ns, "p", subnet("10.6.0.0/24")), newPool(other, "p", subnet("10.6.1.0/24"))
	create(t, otherPool, pool)
	foreign, claim := newClaim(other, "a", otherPool), newClaim(ns, "a", pool)
	create(t, foreign, claim)
	wantAddress(t, claim, "10.6.0.1")
	wantUntouched(t, foreign)
	if _, err := get(otherPool); err != nil || len(otherPool.Finalizers) > 0 || len(otherPool.Status.Conditions) > 0 {
		t.Errorf("the pool of another namespace was touched: %v %+v", err, otherPool)
	}
}

// Two managers with --namespace allocate from one GlobalCapstanIPPool. No address is allocated twice, and none is lost.
// Each manager uses the addresses that the other one releases, and the last release lets the pool be removed.
func TestGlobalPoolOfTwoNamespaces(t *testing.T) {
	w := startWitness(t)
	a, b := env.Namespace(t), env.Namespace(t)
	for _, ns := range []string{a, b} {
		opts := options()
		opts.WatchNamespace = ns
		startManager(t, env.Config, opts)
	}
	pool := newGlobal("shared-"+a, subnet("10.6.5.0/24", "10.6.5.10"))
	create(t, pool)
	before := newClaim(b, "first", pool)
	create(t, before)
	wantAddress(t, before, "10.6.5.10")
	for i, ns := range []string{a, b, a} { // Each manager waits for the other manager's release.
		next := newClaim(ns, fmt.Sprint("next-", i), pool)
		create(t, next)
		wantReason(t, next, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
		wantSettled(t, pool)
		expect.NoError(t, env.Client.Delete(ctx, before))
		wantAddress(t, next, "10.6.5.10")
		before = next
	}
	update(t, pool, func(p *ipamv1.GlobalCapstanIPPool) { // Admission can then accept the deletion.
		p.Annotations[clusterctlv1.DeleteForMoveAnnotation] = ""
	})
	expect.NoError(t, env.Client.Delete(ctx, pool))
	expect.NoError(t, env.Client.Delete(ctx, before))
	wantGone(t, pool)
	w.report(t)
}

// wantSettled checks that no manager has work for a pool without events, so that only events lead to further work.
func wantSettled(t *testing.T, pool ipamv1.Pool) {
	t.Helper()
	expect.Eventually(t, "no pending address", func() error {
		if _, err := get(pool); err != nil || len(pool.PoolStatus().Allocator.Pending) > 0 {
			return errOr(err, "the record is %+v", pool.PoolStatus().Allocator)
		}
		return nil
	})
	expect.Idle(t, "the reconciler of pools", countWait, func() string { return fmt.Sprint(testmetrics.Reconciles(t, pool.PoolKind())) })
}

// countWait is longer than the delay before a manager updates the counts, and longer than the quarantine of the tests.
const countWait = 3 * time.Second

// ALL-18: a GlobalCapstanIPPool serves the namespaces of allowedNamespaces, by name or by label. Existing allocations
// stay valid after the list changes.
func TestAllowedNamespaces_ALL18(t *testing.T) {
	startManager(t, env.Config, options())
	a, b := env.Namespace(t), env.Namespace(t)
	pool := newGlobal("tenants-"+a, subnet("10.6.6.0/24"))
	pool.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{}
	if err := env.Client.Create(ctx, pool.DeepCopy()); !apierrors.IsInvalid(err) {
		t.Errorf("a pool that serves no namespace: %v", err)
	}
	pool.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{Names: []string{a}}
	create(t, pool)
	noNames := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"allowedNamespaces":{"names":[]}}}`))
	if err := env.Client.Patch(ctx, pool.DeepCopy(), noNames); !apierrors.IsInvalid(err) {
		t.Errorf("an empty list of names: %v", err)
	}
	mine, theirs := newClaim(a, "mine", pool), newClaim(b, "theirs", pool)
	create(t, theirs)
	if m := wantReason(t, theirs, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, "allowedNamespaces") {
		t.Errorf("unclear message %q", m)
	}
	create(t, mine)
	ip := wantAddress(t, mine, "10.6.6.1")

	update(t, pool, func(p *ipamv1.GlobalCapstanIPPool) {
		p.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "b"}}}
	})
	late := newClaim(a, "late", pool)
	create(t, late)
	wantReason(t, late, capiipamv1.IPAddressClaimReadyAllocationFailedReason)
	update(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b}}, func(n *corev1.Namespace) { n.Labels = map[string]string{"team": "b"} })
	wantAddress(t, theirs, "10.6.6.2")

	// The IPAddress is created again, although the pool would refuse a new claim.
	old := ip.UID
	expect.NoError(t, env.Client.Delete(ctx, ip))
	strip(t, ip)
	expect.Eventually(t, "the IPAddress to be created again", func() error {
		if again := wantAddress(t, mine, "10.6.6.1"); again.UID == old {
			return errors.New("it is still the old one")
		}
		return nil
	})
	update(t, pool, func(p *ipamv1.GlobalCapstanIPPool) { p.Spec.AllowedNamespaces = nil })
	wantAddress(t, late, "10.6.6.3")
}

// ALL-18: claims of a namespace that the pool does not serve keep no address from others, also if their annotations leave no room for those
// of the provider, so that the API server refuses each of its writes.
func TestClaimsWithoutRoom_ALL18(t *testing.T) {
	startManager(t, env.Config, options())
	tenant, evil := env.Namespace(t), env.Namespace(t)
	pool := newGlobal("small-"+tenant, subnet("10.6.7.0/24", "10.6.7.1"))
	pool.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{Names: []string{tenant}}
	create(t, pool)
	full := newClaim(evil, "full", pool)
	full.Annotations = map[string]string{"a": strings.Repeat("x", validation.TotalAnnotationSizeLimitB-1)}
	create(t, full)
	if m := wantReason(t, full, capiipamv1.IPAddressClaimReadyAllocationFailedReason); !strings.Contains(m, "metadata.annotations: Too long") {
		t.Errorf("unclear message %q", m)
	}
	claim := newClaim(tenant, "claim", pool)
	create(t, claim)
	wantAddress(t, claim, "10.6.7.1")
	update(t, full, func(c *capiipamv1.IPAddressClaim) { c.Annotations = nil })
	expect.Eventually(t, "the claim to have the finalizer", func() error {
		if c, err := get(full); err != nil || len(c.Finalizers) == 0 {
			return errOr(err, "it has none")
		}
		return nil
	})
}

// IPAM-03 with --watch-filter: the manager serves only claims with the value of the label, also if the label is added
// later. It does not allocate the address of another manager's claim.
func TestWatchFilterOption(t *testing.T) {
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.6.2.0/24"))
	create(t, pool)
	stop := startManager(t, env.Config, options())
	first := newClaim(ns, "first", pool)
	create(t, first)
	wantAddress(t, first, "10.6.2.1")
	stop()

	opts := options()
	opts.WatchFilter = "mine"
	startManager(t, env.Config, opts)
	none, theirs, mine := newClaim(ns, "none", pool), newClaim(ns, "theirs", pool), newClaim(ns, "mine", pool)
	theirs.Labels = map[string]string{clusterv1.WatchLabel: "theirs"}
	mine.Labels = map[string]string{clusterv1.WatchLabel: "mine"}
	create(t, none, theirs, mine)
	wantAddress(t, mine, "10.6.2.2")
	wantUntouched(t, none)
	wantUntouched(t, theirs)
	// Events of other objects do not change this.
	create(t, &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "none"},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: "none"}, PoolRef: refTo(pool), Address: "10.6.2.50", Prefix: ptr.To[int32](24),
		},
	})
	update(t, theirs, func(c *capiipamv1.IPAddressClaim) { c.Labels[clusterv1.WatchLabel] = "mine" })
	wantAddress(t, theirs, "10.6.2.3")
	wantUntouched(t, none)
}

// ALL-07: managers with different filters divide the pools among them. Each can allocate from the pools of the others
// for its own claims. No address is allocated twice.
func TestTwoWatchFilters(t *testing.T) {
	ns := env.Namespace(t)
	labelled := func(o client.Object, filter string) { o.SetLabels(map[string]string{clusterv1.WatchLabel: filter}) }
	red, blue := newPool(ns, "red", subnet("10.6.7.0/24", "10.6.7.1-10.6.7.30")), newPool(ns, "blue", subnet("10.6.8.0/24"))
	nobodys := newPool(ns, "nobodys", subnet("10.6.9.0/24"))
	labelled(red, "red")
	labelled(blue, "blue")
	create(t, red, blue, nobodys)

	start := func(filter string) (stop func()) {
		opts := options()
		opts.WatchFilter = filter
		return startManager(t, env.Config, opts)
	}
	stopRed := start("red")
	claim := func(name, filter string, pool ipamv1.Pool) *capiipamv1.IPAddressClaim {
		c := newClaim(ns, name, pool)
		labelled(c, filter)
		create(t, c)
		return c
	}
	waiting := claim("waiting", "red", nobodys)
	wantCondition(t, red, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	if message := wantReason(t, waiting, capiipamv1.IPAddressClaimReadyPoolNotReadyReason); !strings.Contains(message, clusterv1.WatchLabel) {
		t.Errorf("the claim does not name the label: %s", message)
	}
	for _, pool := range []*ipamv1.CapstanIPPool{blue, nobodys} {
		if p, err := get(pool); err != nil || len(p.Finalizers)+len(p.Status.Conditions) > 0 {
			t.Errorf("the manager of red changed the pool %s: %+v, %v", pool.Name, p, err)
		}
	}

	start("blue")
	wantCondition(t, blue, ipamv1.ReadyCondition, ipamv1.ReadyReason)
	var claims []*capiipamv1.IPAddressClaim
	for i := range 15 {
		claims = append(claims, claim(fmt.Sprint("red-", i), "red", red), claim(fmt.Sprint("blue-", i), "blue", red))
	}
	holders := map[string]string{}
	for _, c := range claims {
		expect.Eventually(t, "an address for "+c.Name, func() error { return served(c) })
		ip := addressOf(t, c)
		if other := holders[ip.Spec.Address]; other != "" {
			t.Errorf("%s has the address %s of %s", c.Name, ip.Spec.Address, other)
		}
		holders[ip.Spec.Address] = c.Name
	}
	// The pool is full. The release of an address wakes the claim of the other manager.
	last := claim("last", "blue", red)
	wantReason(t, last, capiipamv1.IPAddressClaimReadyPoolExhaustedReason)
	remove(t, claims[0])
	expect.Eventually(t, "the released address", func() error { return served(last) })

	update(t, nobodys, func(p *ipamv1.CapstanIPPool) { labelled(p, "blue") })
	wantAddress(t, waiting, "10.6.9.1")

	// Only the manager of the pool removes it, and only when no manager has an address of it.
	stopRed()
	withoutWebhooks(t, func() { expect.NoError(t, env.Client.Delete(ctx, red)) })
	for _, c := range append(claims[1:], last) {
		if c.Labels[clusterv1.WatchLabel] == "blue" {
			remove(t, c)
			wantGone(t, c)
		}
	}
	if p, err := get(red); err != nil || !slices.Contains(p.Finalizers, ipamv1.PoolFinalizer) {
		t.Errorf("the manager of blue released the pool of red: %v", err)
	}
	start("red")
	for _, c := range claims[1:] {
		if c.Labels[clusterv1.WatchLabel] == "red" {
			remove(t, c)
		}
	}
	wantGone(t, red)
}

// gauges returns the values of a pool's metric by state, or by "" if the metric has no state.
func gauges(t *testing.T, metric string, pool ipamv1.Pool) map[string]float64 {
	t.Helper()
	got := map[string]float64{}
	for _, s := range testmetrics.Gather(t, metric, map[string]string{"kind": pool.PoolKind(), "namespace": pool.GetNamespace(), "pool": pool.GetName()}) {
		got[s.Labels["state"]+s.Labels["outcome"]] = s.Value
	}
	return got
}

// The gauges follow a pool and are removed with it, and so are the counters.
func TestMetrics(t *testing.T) {
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.6.3.0/24", "10.6.3.10-10.6.3.12"))
	create(t, pool)
	want := func(what string, addresses map[string]float64, waiting float64) {
		t.Helper()
		expect.Eventually(t, "the gauges "+what, func() error {
			a, w := gauges(t, "capstan_ipam_pool_addresses", pool), gauges(t, "capstan_ipam_pool_waiting_claims", pool)
			if !maps.Equal(a, addresses) || w[""] != waiting {
				return fmt.Errorf("they are %v, %v", a, w)
			}
			return nil
		})
	}
	want("of an unused pool", map[string]float64{"total": 3, "free": 3, "used": 0, "resting": 0, "out_of_range": 0}, 0)
	var claims []*capiipamv1.IPAddressClaim
	for i := range 5 {
		c := newClaim(ns, fmt.Sprint("c", i), pool)
		claims = append(claims, c)
		create(t, c)
	}
	want("of a full pool", map[string]float64{"total": 3, "free": 0, "used": 3, "resting": 0, "out_of_range": 0}, 2)
	if n := gauges(t, "capstan_ipam_allocations_total", pool)[""]; n != 3 {
		t.Errorf("%v allocations were counted", n)
	}
	if r := gauges(t, "capstan_ipam_record_total", pool); r["takeover"] != 1 || r["write"] < 1 || r["conflict"] > 10 {
		t.Errorf("writes of the record: %v", r)
	}
	for _, c := range claims {
		expect.NoError(t, env.Client.Delete(ctx, c))
	}
	for _, c := range claims {
		wantGone(t, c)
	}
	want("of a pool after the release of all addresses", map[string]float64{"total": 3, "free": 3, "used": 0, "resting": 0, "out_of_range": 0}, 0)
	remove(t, pool)
	wantGone(t, pool)
	expect.Eventually(t, "the metrics of a deleted pool to be removed", func() error {
		for _, m := range []string{"capstan_ipam_pool_addresses", "capstan_ipam_pool_waiting_claims", "capstan_ipam_allocations_total", "capstan_ipam_record_total"} {
			if got := gauges(t, m, pool); len(got) > 0 {
				return fmt.Errorf("%s is %v", m, got)
			}
		}
		return nil
	})
}

// A manager serves the claims that were created, and releases the claims that were deleted, while no manager ran. It
// writes nothing for claims that are served already. TestUnservedFirst checks that it serves the other claims first.
func TestRestart(t *testing.T) {
	ns := env.Namespace(t)
	pool := newPool(ns, "p", subnet("10.6.4.0/24"))
	going, waiting, staying := newClaim(ns, "going", pool), newClaim(ns, "waiting", pool), newClaim(ns, "staying", pool)
	create(t, pool, going, staying)
	stop := startManager(t, env.Config, options())
	ip, kept := addressOf(t, going), addressOf(t, staying)
	wantReason(t, going, ipamv1.ClaimAddressReadyReason)
	wantReason(t, staying, ipamv1.ClaimAddressReadyReason)
	stop()
	_, err := get(staying) // The cache contains all writes of the first manager.
	expect.NoError(t, err)
	_, err = get(kept)
	expect.NoError(t, err)
	untouched := []client.Object{staying.DeepCopy(), kept.DeepCopy()}
	expect.NoError(t, env.Client.Delete(ctx, going))
	create(t, waiting)
	startManager(t, env.Config, options())
	addressOf(t, waiting)
	wantGone(t, going)
	wantGone(t, ip)
	wantIdle(t)
	for _, before := range untouched {
		version := before.GetResourceVersion()
		if after, err := get(before); err != nil || after.GetResourceVersion() != version {
			t.Errorf("%T %s was written again (%v)", before, before.GetName(), err)
		}
	}
}
