package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// fixture is the ledger of one pool without an API server. The test sets its clock.
type fixture struct {
	*state
	reg   *Registry
	clock time.Time
	woken []string
}

func newFixture(spec ipamv1.CapstanIPPoolSpec) *fixture {
	f := &fixture{clock: time.Unix(100_000, 0)}
	doc := &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "pool", Generation: 1},
		Spec:       spec,
	}
	doc.Status.Conditions = []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: metav1.ConditionTrue, ObservedGeneration: 1}}
	f.reg = NewRegistry(nil, nil, Options{
		Now:       func() time.Time { return f.clock },
		WakeClaim: func(claim types.NamespacedName) { f.woken = append(f.woken, claim.Name) },
	})
	f.state = f.reg.Pool(KeyOfPool(doc)).state
	f.adopt(doc, true)
	return f
}

// excluding makes the pool a global one that does not allow the namespace of the claims.
func (f *fixture) excluding() *ipamv1.GlobalCapstanIPPool {
	global := &ipamv1.GlobalCapstanIPPool{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: "global", Generation: 1}}
	f.doc.PoolSpec().DeepCopyInto(&global.Spec.CapstanIPPoolSpec)
	global.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{Names: []string{"another"}}
	global.Status.Conditions = slices.Clone(f.doc.GetConditions())
	f.adopt(global, true)
	return global.DeepCopy()
}

func (f *fixture) ref() capiipamv1.IPPoolReference {
	return capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: f.key.Kind, Name: f.key.Name}
}

func (f *fixture) claim(name string) *capiipamv1.IPAddressClaim {
	return &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("claim-" + name), CreationTimestamp: metav1.NewTime(f.clock)},
		Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: f.ref()},
	}
}

func (f *fixture) address(name, address string, prefix *int32) *capiipamv1.IPAddress {
	return &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("ip-" + name)},
		Spec:       capiipamv1.IPAddressSpec{PoolRef: f.ref(), Address: address, Prefix: prefix},
	}
}

func (f *fixture) ask(name string) Result {
	res, _ := f.decide(&Request{Ticket: TicketOf(f.claim(name))})
	return res
}

func prefixes() ipamv1.CapstanIPPoolSpec {
	return ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}, PrefixLength: ptr.To[int32](28)}
}

// A claim adopts an existing IPAddress of its name if the IPAddress is one prefix of the pool and no other IPAddress
// overlaps it. Otherwise the claim waits until one of the IPAddresses is deleted.
func TestAdoption(t *testing.T) {
	const mine, other = "ip-a", "ip-other"
	p28 := ptr.To[int32](28)
	tests := map[string]struct {
		address string
		prefix  *int32
		other   string
		want    string
		// blocker is the IPAddress whose deletion lets the pool serve the claim.
		blocker types.UID
	}{
		"one prefix":                           {"10.0.0.16", p28, "", "", ""},
		"not the first address of a prefix":    {"10.0.0.24", p28, "", "", ""},
		"outside the pool":                     {"10.9.0.0", p28, "", "", ""},
		"next to the prefix of another claim":  {"10.0.0.16", p28, "10.0.0.0/28", "", ""},
		"a part of a prefix":                   {"10.0.0.8", ptr.To[int32](32), "", "has 10.0.0.8/32, which is not one prefix of the length 28", mine},
		"without a prefix length":              {"10.0.0.16", nil, "", "has 10.0.0.16 without a prefix", mine},
		"several prefixes":                     {"10.0.0.0", ptr.To[int32](24), "10.0.0.16/28", "not one prefix", mine},
		"wrong address family":                 {"fd00::", ptr.To[int32](64), "", "no address of the family", mine},
		"the prefix of another claim":          {"10.0.0.16", p28, "10.0.0.16/28", "which claim ns/other has too", other},
		"overlaps the prefix of another claim": {"10.0.0.16", p28, "10.0.0.24/29", "which claim ns/other has too", other},
	}
	for name, tt := range tests {
		f := newFixture(prefixes())
		if tt.other != "" {
			o := netip.MustParsePrefix(tt.other)
			f.addAddress(f.address("other", o.Addr().String(), ptr.To(int32(o.Bits()))))
		}
		f.addAddress(f.address("a", tt.address, tt.prefix))
		got := f.ask("a")
		if (got.Outcome == Granted) != (tt.want == "") || !strings.Contains(got.Message, tt.want) {
			t.Errorf("%s: got %+v, want %q", name, got, tt.want)
		}
		if tt.want == "" {
			if got.Address != tt.address {
				t.Errorf("%s: got the address %s", name, got.Address)
			}
			continue
		}
		f.removeAddress(tt.blocker, false)
		if again := f.ask("a"); len(f.woken) != 1 || again.Outcome != Granted {
			t.Errorf("%s: woken claims: %v, then got %+v", name, f.woken, again)
		}
	}
}

// A claim does not get its previous address again if that address is not a prefix of the pool.
func TestPreviousAddressIsNotAPrefix(t *testing.T) {
	f := newFixture(prefixes())
	odd := f.address("a", "10.0.0.8", ptr.To[int32](32))
	odd.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-a", Controller: ptr.To(true)}}
	f.addAddress(odd)
	f.removeAddress(odd.UID, false)
	if got := f.ask("a"); got.Outcome != Granted || got.Address != "10.0.0.0" || got.Prefix != 28 {
		t.Errorf("got %+v", got)
	}
}

// A user creates an IPAddress with the claim's name while the pool allocates another address to the claim. The pool
// considers this IPAddress after the deadline of the allocation.
func TestIPAddressCreatedDuringAllocation(t *testing.T) {
	f := newFixture(prefixes())
	if got := f.ask("a"); got.Address != "10.0.0.0" {
		t.Fatalf("got %+v", got)
	}
	f.addAddress(f.address("b", "10.0.0.32", ptr.To[int32](28)))
	f.addAddress(f.address("a", "10.0.0.32", ptr.To[int32](28)))
	if got := f.ask("a"); got.Outcome == Granted || got.RetryAfter <= 0 {
		t.Errorf("got %+v", got)
	}
	f.clock = f.clock.Add(2 * time.Minute)
	f.tick()
	if got := f.ask("a"); got.Outcome != Failed || !strings.Contains(got.Message, "claim ns/b has too") {
		t.Errorf("got %+v", got)
	}
}

// A pool allocates no address before its spec has been compared with other pools.
func TestAllocationWaitsForComparison(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason string, generation int64) []metav1.Condition {
		return []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: status, Reason: reason, ObservedGeneration: generation}}
	}
	tests := map[string]struct {
		conditions []metav1.Condition
		want       string
	}{
		"new pool":                          {nil, "is being compared"},
		"spec changed after the comparison": {condition(metav1.ConditionTrue, ipamv1.NotOverlappingReason, 1), "is being compared"},
		"no overlap":                        {condition(metav1.ConditionTrue, ipamv1.NotOverlappingReason, 2), ""},
		"overlap reported":                  {condition(metav1.ConditionFalse, ipamv1.OverlappingReason, 2), ""},
		"overlap refused":                   {condition(metav1.ConditionFalse, ipamv1.OverlapRefusedReason, 2), "which is refused"},
	}
	for name, tt := range tests {
		f := newFixture(prefixes())
		f.doc.(*ipamv1.CapstanIPPool).Generation = 2 //nolint:forcetypeassert // newFixture has created it.
		f.doc.SetConditions(tt.conditions)
		got := f.ask("a")
		if (got.Outcome == NotReady) != (tt.want != "") || !strings.Contains(got.Message, tt.want) {
			t.Errorf("%s: got %+v, want %q", name, got, tt.want)
		}
	}
}

// ALL-18: a pool serves the namespaces of allowedNamespaces. The cases are those of a CapstanHost.
func TestAdmits_ALL18(t *testing.T) {
	team := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
	a, b := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	tests := map[string]struct {
		allowed *ipamv1.AllowedNamespaces
		labels  map[string]string
		want    bool
	}{
		"all by default":                       {want: true},
		"by name":                              {allowed: &ipamv1.AllowedNamespaces{Names: []string{"x", "ns"}}, want: true},
		"another name":                         {allowed: &ipamv1.AllowedNamespaces{Names: []string{"x"}}},
		"by label":                             {allowed: &ipamv1.AllowedNamespaces{Selector: team}, labels: a, want: true},
		"another label":                        {allowed: &ipamv1.AllowedNamespaces{Selector: team}, labels: b},
		"name matches, label does not":         {allowed: &ipamv1.AllowedNamespaces{Names: []string{"ns"}, Selector: team}, want: true},
		"empty selector selects all":           {allowed: &ipamv1.AllowedNamespaces{Selector: &metav1.LabelSelector{}}, want: true},
		"empty allowedNamespaces selects none": {allowed: &ipamv1.AllowedNamespaces{}},
		"invalid selector selects none": {allowed: &ipamv1.AllowedNamespaces{Selector: &metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Near"}},
		}}},
	}
	for name, tt := range tests {
		if got := admits(tt.allowed, "ns", tt.labels); got != tt.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// IPAM-06: objects from another management cluster count as arrivals of a move. Objects that are created here do not.
func TestArrivals_IPAM06(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	step := func(name string, arrives bool, do func()) {
		t.Helper()
		f.clock = f.clock.Add(time.Minute)
		do()
		if got := f.view().Quiet == 0; got != arrives {
			t.Errorf("%s: counts as an arrival: %v, want %v", name, got, arrives)
		}
	}
	copied := f.claim("copied")
	copied.Annotations = map[string]string{ipamv1.OriginUIDAnnotation: "at the source"}
	marked := f.claim("marked")
	marked.Annotations = map[string]string{ipamv1.OriginUIDAnnotation: string(marked.UID)}
	step("a claim from another cluster", true, func() { f.reg.ClaimSeen(copied) })
	step("a new claim", false, func() { f.reg.ClaimSeen(f.claim("new")) })
	step("a claim with the annotation of this cluster", false, func() { f.reg.ClaimSeen(marked) })
	step("an address from another cluster", true, func() { f.reg.AddressSeen(f.address("copied", "10.0.0.7", nil)) })
	step("a new address", false, func() {
		if got := f.ask("new"); got.Outcome != Granted {
			t.Fatalf("got %+v", got)
		}
		ip := f.address("new", "10.0.0.1", nil)
		ip.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-new", Controller: ptr.To(true)}}
		f.reg.AddressSeen(ip)
	})
}

// IPAM-06: a claim from another management cluster waits at most LongestArrival, even if addresses arrive all the time.
func TestCopiedClaimWaitIsBounded_IPAM06(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	r := &Request{Ticket: TicketOf(f.claim("a")), Copied: true}
	for i := range 60 {
		f.clock = f.clock.Add(20 * time.Second)
		f.addAddress(f.address(fmt.Sprint("other", i), fmt.Sprintf("10.0.0.%d", 100+i), nil))
		res, _ := f.decide(r)
		if age := f.clock.Sub(r.Created); (res.Outcome == Granted) != (age >= LongestArrival) {
			t.Fatalf("after %v: %+v", age, res)
		}
	}
}

// A read of all addresses removes deleted IPAddresses from the index. It keeps IPAddresses that were created during the
// read.
func TestCompare(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/30"}}})
	there, gone, late := f.address("there", "10.0.0.1", nil), f.address("gone", "10.0.0.2", nil), f.address("late", "10.0.0.9", nil)
	f.addAddress(there)
	f.addAddress(gone)
	known := []types.UID{there.UID, gone.UID}
	f.addAddress(late)
	f.compare(known, []*capiipamv1.IPAddress{there})
	if v := f.view(); v.Addresses != 2 || v.Used != 1 || v.OutOfRange != 1 {
		t.Errorf("got %+v", v)
	}
	f.addAddress(gone) // a delayed event
	if got := f.ask("a"); got.Address != "10.0.0.2" {
		t.Errorf("the address of the deleted IPAddress is not free: %+v", got)
	}
}

// A claim that cannot get any address does not delay later claims, also if its reconcile is faster than the watch.
func TestParkedBeforeItIsSeen(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/30"}}})
	f.ask("a") // One of two addresses remains.
	gated, gone := f.claim("gated"), f.claim("gone")
	f.clock = f.clock.Add(time.Second)
	f.reg.Park(gated)
	f.reg.ClaimSeen(gated)
	f.reg.ClaimSeen(gone)
	f.reg.ClaimGone(gone)
	f.reg.Park(gone)
	f.reg.ClaimSeen(f.claim("later"))
	if got := f.ask("later"); got.Outcome != Granted {
		t.Errorf("a later claim: %+v", got)
	}
	if _, queued := f.queue.tickets["claim-gone"]; queued {
		t.Error("a deleted claim is in the queue")
	}
}

// A process that does not lead also drops old entries, including the ledgers of pools that do not exist.
func TestPrune(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	ip := f.address("a", "10.0.0.1", nil)
	ip.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-a", Controller: ptr.To(true)}}
	f.reg.AddressSeen(ip)
	f.reg.AddressGone(ip)
	f.reg.ClaimGone(f.claim("a"))
	nonexistent, waiting := f.claim("b"), f.claim("c")
	nonexistent.Spec.PoolRef.Name, waiting.Spec.PoolRef.Name = "nonexistent", "future"
	f.reg.ClaimSeen(nonexistent)
	f.reg.ClaimGone(nonexistent)
	f.reg.ClaimSeen(waiting)

	f.reg.Prune()
	if len(f.addresses.gone) != 1 || len(f.dead) != 1 || len(f.last) != 1 || len(f.reg.pools) != 3 {
		t.Errorf("entries were dropped too early: %v %v %v %v", f.addresses.gone, f.dead, f.last, f.reg.pools)
	}
	f.clock = f.clock.Add(remember + time.Second)
	f.reg.Prune()
	if len(f.addresses.gone)+len(f.dead)+len(f.last) != 0 || len(f.reg.pools) != 2 {
		t.Errorf("entries remain: %v %v %v %v", f.addresses.gone, f.dead, f.last, f.reg.pools)
	}
	f.forgetDoc() // like a process that does not lead
	f.reg.ClaimGone(waiting)
	f.clock = f.clock.Add(remember + time.Second)
	f.reg.Prune()
	if len(f.reg.pools) != 0 {
		t.Errorf("ledgers remain: %v", f.reg.pools)
	}
}

// ALL-18: a claim of a namespace that the pool does not allow any more keeps its address, also after its IPAddress was removed by force.
// No other claim of the namespace gets one.
func TestAddressOfExcludedNamespace_ALL18(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	f.excluding()
	served := f.address("served", "10.0.0.7", ptr.To[int32](24))
	served.OwnerReferences = []metav1.OwnerReference{{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: "served", UID: "claim-served", Controller: ptr.To(true)}}
	f.addAddress(served)
	f.addAddress(f.address("by-hand", "10.0.0.8", ptr.To[int32](24)))
	for name, want := range map[string]Outcome{"served": Granted, "by-hand": Failed, "other": Failed} {
		if got := f.ask(name); got.Outcome != want {
			t.Errorf("%s: %+v", name, got)
		}
	}
	f.reg.Pool(f.key).Created("claim-served", served)
	f.removeAddress(served.UID, false)
	asking := &Request{Ticket: TicketOf(f.claim("served")), Ask: "10.0.0.200"}
	f.addAddress(f.address("other", "10.0.0.7", ptr.To[int32](24)))
	if got, _ := f.decide(asking); got.Outcome != Failed || !strings.Contains(got.Message, "10.0.0.7 of CapstanIPPool/ns/p is in use") {
		t.Errorf("removed by force, and its address in use: %+v", got)
	}
	f.removeAddress("ip-other", false)
	if got, _ := f.decide(asking); got.Outcome != Granted || got.Address != "10.0.0.7" || !slices.Contains(f.woken, "served") {
		t.Errorf("removed by force: %+v, woken: %v", got, f.woken)
	}
}

// ALL-18: a claim of a namespace that the pool does not allow any more gets no other address if its former one left the pool, and none
// for an IPAddress that somebody has written in the place of its own.
func TestFormerAddressOfExcludedNamespace_ALL18(t *testing.T) {
	for name, change := range map[string]func(*fixture, *ipamv1.GlobalCapstanIPPool){
		"left the pool": func(_ *fixture, p *ipamv1.GlobalCapstanIPPool) { p.Spec.Subnets[0].CIDR = "10.0.1.0/24" },
		"now a part of a prefix": func(_ *fixture, p *ipamv1.GlobalCapstanIPPool) {
			p.Spec.PrefixLength = ptr.To[int32](28)
		},
		"another IPAddress": func(f *fixture, _ *ipamv1.GlobalCapstanIPPool) {
			by := f.address("served", "10.0.0.200", ptr.To[int32](24))
			by.UID = "by-hand"
			f.addAddress(by)
		},
	} {
		f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
		global := f.excluding()
		served := f.address("served", "10.0.0.7", ptr.To[int32](24))
		served.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-served", Controller: ptr.To(true)}}
		f.addAddress(served)
		f.removeAddress(served.UID, false)
		global.Generation = 2
		global.Status.Conditions[0].ObservedGeneration = 2
		change(f, global)
		f.adopt(global, true)
		for _, ask := range []string{"", "10.0.1.9"} {
			if got, _ := f.decide(&Request{Ticket: TicketOf(f.claim("served")), Ask: ask}); got.Outcome != Failed || !strings.Contains(got.Message, "does not serve claims of namespace ns") {
				t.Errorf("%s, asking for %q: %+v", name, ask, got)
			}
		}
	}
}

// A claim whose IPAddress the API server refuses gets the same address at each attempt: RoundRobin continues after it, so that the
// address that was just released is used last.
func TestRefusedAttemptsKeepCursor(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}, Order: ipamv1.RoundRobinOrder})
	f.ask("served")
	f.reg.Pool(f.key).Created("claim-served", f.address("served", "10.0.0.1", ptr.To[int32](24)))
	f.removeAddress("ip-served", false)
	for attempt := range 3 {
		a, b := f.ask("a"), f.ask("b")
		if a.Address != "10.0.0.2" || b.Address != "10.0.0.3" {
			t.Errorf("attempt %d: got %+v and %+v, want 10.0.0.2 and 10.0.0.3", attempt, a, b)
		}
		f.reg.Pool(f.key).Refused(TicketOf(f.claim("a")))
		f.reg.Pool(f.key).Refused(TicketOf(f.claim("b")))
	}
	if got := f.ask("c"); got.Address != "10.0.0.4" {
		t.Errorf("the next claim: got %+v, want 10.0.0.4", got)
	}
}

// ALL-18: a claim whose IPAddress the API server has refused never had an address, so it gets none after the pool has excluded its
// namespace.
func TestRefusedClaimOfExcludedNamespace_ALL18(t *testing.T) {
	f := newFixture(twoAddresses())
	f.ask("a")
	f.reg.Pool(f.key).Refused(TicketOf(f.claim("a")))
	f.excluding()
	if got := f.ask("a"); got.Outcome != Failed || !strings.Contains(got.Message, "does not serve claims of namespace ns") {
		t.Errorf("got %+v", got)
	}
}

// The record of a pool is bounded: if too many chosen addresses have no IPAddress yet, further claims wait.
func TestPendingIsBounded(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/16"}}})
	for i := range mostPending {
		if got := f.ask(fmt.Sprint(i)); got.Outcome != Granted {
			t.Fatalf("claim %d: %+v", i, got)
		}
	}
	if got := f.ask("next"); got.Outcome != NotReady || got.RetryAfter != notReadyRetry || len(f.pending) != mostPending {
		t.Errorf("got %+v with %d pending allocations", got, len(f.pending))
	}
	if got := f.ask("0"); got.Outcome != Granted {
		t.Errorf("a pending claim: %+v", got)
	}
	f.reg.Pool(f.key).Created("claim-0", f.address("0", "10.0.0.1", nil))
	if got := f.ask("next"); got.Outcome != Granted {
		t.Errorf("later: %+v", got)
	}
}

// A request whose claim was deleted meanwhile gets no address and no place in the queue, where it would hold back later claims.
func TestDeletedClaimGetsNoAddress(t *testing.T) {
	f := newFixture(twoAddresses())
	f.ask("a")
	for _, name := range []string{"a", "b"} {
		f.reg.Pool(f.key).Abandon(f.claim(name).UID)
		if got := f.ask(name); got.Outcome != NotReady || got.RetryAfter <= 0 {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	if len(f.queue.tickets) != 0 {
		t.Errorf("the queue contains %v", f.queue.tickets)
	}
}

// A claim whose IPAddress was moved is woken when the history of the move ends, also if clusterctl has given up the move.
func TestMoveThatIsGivenUp(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	moved := f.address("a", "10.0.0.7", ptr.To[int32](24))
	moved.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-a", Controller: ptr.To(true)}}
	f.addAddress(moved)
	f.removeAddress(moved.UID, true)
	if got := f.ask("a"); got.Outcome != NotReady || !strings.Contains(got.Message, "clusterctl is moving") {
		t.Fatalf("after the move: %+v", got)
	}
	f.clock = f.clock.Add(remember + time.Second)
	f.forgetOld(f.clock)
	if got := f.ask("a"); len(f.woken) != 1 || got.Outcome != Granted {
		t.Errorf("woken claims: %v, then got %+v", f.woken, got)
	}
}

// The pool reports the number of waiting claims again when one of them is deleted, and looks again when the watch reports the deletion of
// an IPAddress that the release has reported before: until then, the IPAddress in the cache keeps a deleted pool.
func TestPoolLooksAgain(t *testing.T) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/29", Ranges: []ipamv1.AddressRange{"10.0.0.1"}}}})
	changes := 0
	f.opts.PoolChanged = func(Key) { changes++ }
	f.addAddress(f.address("a", "10.0.0.1", ptr.To[int32](29)))
	if got := f.ask("b"); got.Outcome != Exhausted {
		t.Fatalf("got %+v", got)
	}
	reported := func(what string, f func()) {
		before := changes
		if f(); changes == before {
			t.Errorf("%s: the pool is not reconciled", what)
		}
	}
	reported("the deletion of a waiting claim", func() { f.leave("claim-b") })
	reported("the release of an address", func() { f.removeAddress("ip-a", false) })
	f.doc.SetDeletionTimestamp(&metav1.Time{Time: f.clock})
	reported("the watch's report of the release", func() { f.removeAddress("ip-a", false) })
}

// A pool that overlaps another one against the policy of one of them serves only claims that have their address, for example after a move.
func TestAddressOfRefusedPool(t *testing.T) {
	for name, tt := range map[string]struct {
		exists, out bool
		want        Outcome
	}{
		"new claim":                    {false, false, NotReady},
		"IPAddress by hand":            {true, false, NotReady},
		"has its address":              {true, true, Granted},
		"its address was just removed": {false, true, NotReady},
	} {
		f := newFixture(twoAddresses())
		f.doc.GetConditions()[0].Status, f.doc.GetConditions()[0].Reason = metav1.ConditionFalse, ipamv1.OverlapRefusedReason
		if tt.exists {
			f.addAddress(f.address("a", "10.0.0.2", ptr.To[int32](30)))
		}
		got, _ := f.decide(&Request{Ticket: TicketOf(f.claim("a")), Out: tt.out})
		if got.Outcome != tt.want || got.Outcome == Granted && got.Address != "10.0.0.2" {
			t.Errorf("%s: got %+v, want %v", name, got, tt.want)
		}
	}
}
