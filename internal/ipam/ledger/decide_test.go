package ledger

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// world is one pool's ledger without an API server, and its clock.
type world struct {
	*Pool
	clock time.Time
	woken []string
}

func newWorld(spec ipamv1.CapstanIPPoolSpec) *world {
	w := &world{clock: time.Unix(100_000, 0)}
	doc := &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "pool", Generation: 1},
		Spec:       spec,
	}
	doc.Status.Conditions = []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: metav1.ConditionTrue, ObservedGeneration: 1}}
	w.Pool = NewRegistry(nil, nil, Options{
		Now:       func() time.Time { return w.clock },
		WakeClaim: func(claim types.NamespacedName) { w.woken = append(w.woken, claim.Name) },
	}).Pool(KeyOfPool(doc))
	w.adopt(doc, true)
	return w
}

func (w *world) ref() capiipamv1.IPPoolReference {
	return capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: w.key.Kind, Name: w.key.Name}
}

func (w *world) claim(name string) *capiipamv1.IPAddressClaim {
	return &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("claim-" + name), CreationTimestamp: metav1.NewTime(w.clock)},
		Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: w.ref()},
	}
}

func (w *world) address(name, address string, prefix *int32) *capiipamv1.IPAddress {
	return &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("ip-" + name)},
		Spec:       capiipamv1.IPAddressSpec{PoolRef: w.ref(), Address: address, Prefix: prefix},
	}
}

func (w *world) ask(name string) Result {
	res, _ := w.decide(&Request{Ticket: TicketOf(w.claim(name))})
	return res
}

func prefixes() ipamv1.CapstanIPPoolSpec {
	return ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}, PrefixLength: ptr.To[int32](28)}
}

// An IPAddress that was made beforehand is taken over when it is just what a claim
// gets, and nobody else has any of it. Otherwise the claim waits until one of them
// has gone.
func TestAdoption(t *testing.T) {
	const mine, other = "ip-a", "ip-other"
	p28 := ptr.To[int32](28)
	tests := map[string]struct {
		address string
		prefix  *int32
		other   string
		want    string
		// going is what has to go before the claim is served.
		going types.UID
	}{
		"one prefix":          {"10.0.0.16", p28, "", "", ""},
		"not its first":       {"10.0.0.24", p28, "", "", ""},
		"out of the pool":     {"10.9.0.0", p28, "", "", ""},
		"beside somebody's":   {"10.0.0.16", p28, "10.0.0.0/28", "", ""},
		"a part":              {"10.0.0.8", ptr.To[int32](32), "", "has 10.0.0.8/32, which is not one prefix of the length 28", mine},
		"an address":          {"10.0.0.16", nil, "", "has 10.0.0.16 without a prefix", mine},
		"several":             {"10.0.0.0", ptr.To[int32](24), "10.0.0.16/28", "not one prefix", mine},
		"of the wrong family": {"fd00::", ptr.To[int32](64), "", "no address of the family", mine},
		"somebody's":          {"10.0.0.16", p28, "10.0.0.16/28", "which claim ns/other has too", other},
		"partly somebody's":   {"10.0.0.16", p28, "10.0.0.24/29", "which claim ns/other has too", other},
	}
	for name, tt := range tests {
		w := newWorld(prefixes())
		if tt.other != "" {
			o := netip.MustParsePrefix(tt.other)
			w.learn(w.address("other", o.Addr().String(), ptr.To(int32(o.Bits()))))
		}
		w.learn(w.address("a", tt.address, tt.prefix))
		got := w.ask("a")
		if (got.Outcome == Granted) != (tt.want == "") || !strings.Contains(got.Message, tt.want) {
			t.Errorf("%s: got %+v, want %q", name, got, tt.want)
		}
		if tt.want == "" {
			if got.Address != tt.address {
				t.Errorf("%s: became %s", name, got.Address)
			}
			continue
		}
		w.addressGone(tt.going, false)
		if again := w.ask("a"); len(w.woken) != 1 || again.Outcome != Granted {
			t.Errorf("%s: %v were woken, and then %+v", name, w.woken, again)
		}
	}
}

// What a claim had that was no prefix of the pool's is not given back to it.
func TestHadAnOddAddress(t *testing.T) {
	w := newWorld(prefixes())
	odd := w.address("a", "10.0.0.8", ptr.To[int32](32))
	odd.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-a", Controller: ptr.To(true)}}
	w.learn(odd)
	w.addressGone(odd.UID, false)
	if got := w.ask("a"); got.Outcome != Granted || got.Address != "10.0.0.0" || got.Prefix != 28 {
		t.Errorf("got %+v", got)
	}
}

// An IPAddress of the claim's name that comes while the claim is given something
// else is looked at when the latter can no longer be made.
func TestMadeByHandMeanwhile(t *testing.T) {
	w := newWorld(prefixes())
	if got := w.ask("a"); got.Address != "10.0.0.0" {
		t.Fatalf("got %+v", got)
	}
	w.learn(w.address("b", "10.0.0.32", ptr.To[int32](28)))
	w.learn(w.address("a", "10.0.0.32", ptr.To[int32](28)))
	if got := w.ask("a"); got.Outcome == Granted || got.RetryAfter <= 0 {
		t.Errorf("got %+v", got)
	}
	w.clock = w.clock.Add(2 * time.Minute)
	w.tick()
	if got := w.ask("a"); got.Outcome != Failed || !strings.Contains(got.Message, "claim ns/b has too") {
		t.Errorf("got %+v", got)
	}
}

// A pool hands out nothing before its spec has been compared with other pools.
func TestUnjudged(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason string, generation int64) []metav1.Condition {
		return []metav1.Condition{{Type: ipamv1.NotOverlappingCondition, Status: status, Reason: reason, ObservedGeneration: generation}}
	}
	tests := map[string]struct {
		conditions []metav1.Condition
		want       string
	}{
		"just made":        {nil, "is being compared"},
		"changed since":    {condition(metav1.ConditionTrue, ipamv1.NotOverlappingReason, 1), "is being compared"},
		"apart":            {condition(metav1.ConditionTrue, ipamv1.NotOverlappingReason, 2), ""},
		"overlap reported": {condition(metav1.ConditionFalse, ipamv1.OverlappingReason, 2), ""},
		"overlap refused":  {condition(metav1.ConditionFalse, ipamv1.OverlapRefusedReason, 2), "which is refused"},
	}
	for name, tt := range tests {
		w := newWorld(prefixes())
		w.doc.(*ipamv1.CapstanIPPool).Generation = 2 //nolint:forcetypeassert // newWorld made it.
		w.doc.SetConditions(tt.conditions)
		got := w.ask("a")
		if (got.Outcome == NotReady) != (tt.want != "") || !strings.Contains(got.Message, tt.want) {
			t.Errorf("%s: got %+v, want %q", name, got, tt.want)
		}
	}
}

// ALL-18: which namespaces a pool serves. The cases are those of a CapstanHost.
func TestAdmits_ALL18(t *testing.T) {
	team := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
	a, b := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	tests := map[string]struct {
		allowed *ipamv1.AllowedNamespaces
		labels  map[string]string
		want    bool
	}{
		"all by default":      {want: true},
		"by name":             {allowed: &ipamv1.AllowedNamespaces{Names: []string{"x", "ns"}}, want: true},
		"not by another name": {allowed: &ipamv1.AllowedNamespaces{Names: []string{"x"}}},
		"by label":            {allowed: &ipamv1.AllowedNamespaces{Selector: team}, labels: a, want: true},
		"not by label":        {allowed: &ipamv1.AllowedNamespaces{Selector: team}, labels: b},
		"either is enough":    {allowed: &ipamv1.AllowedNamespaces{Names: []string{"ns"}, Selector: team}, want: true},
		"empty selector: all": {allowed: &ipamv1.AllowedNamespaces{Selector: &metav1.LabelSelector{}}, want: true},
		"empty: none":         {allowed: &ipamv1.AllowedNamespaces{}},
		"invalid selector: none": {allowed: &ipamv1.AllowedNamespaces{Selector: &metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Near"}},
		}}},
	}
	for name, tt := range tests {
		if got := admits(tt.allowed, "ns", tt.labels); got != tt.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// IPAM-06: what tells that a move goes on, and what does not.
func TestQuiet_IPAM06(t *testing.T) {
	w := newWorld(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	step := func(what string, arrives bool, do func()) {
		t.Helper()
		w.clock = w.clock.Add(time.Minute)
		do()
		if got := w.View().Quiet == 0; got != arrives {
			t.Errorf("%s: counts as an arrival: %v", what, got)
		}
	}
	copied := w.claim("copied")
	copied.Annotations = map[string]string{ipamv1.OriginUIDAnnotation: "at the source"}
	marked := w.claim("marked")
	marked.Annotations = map[string]string{ipamv1.OriginUIDAnnotation: string(marked.UID)}
	step("a claim that comes along", true, func() { w.reg.ClaimSeen(copied) })
	step("a claim that is made here", false, func() { w.reg.ClaimSeen(w.claim("new")) })
	step("a claim of ours", false, func() { w.reg.ClaimSeen(marked) })
	step("an address that comes along", true, func() { w.reg.AddressSeen(w.address("copied", "10.0.0.7", nil)) })
	step("an address that is made here", false, func() {
		if got := w.ask("new"); got.Outcome != Granted {
			t.Fatalf("got %+v", got)
		}
		ip := w.address("new", "10.0.0.1", nil)
		ip.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-new", Controller: ptr.To(true)}}
		w.reg.AddressSeen(ip)
	})
}

// IPAM-06: a claim that comes to a pool which is busy for other reasons does not
// wait for ever.
func TestCopiedClaimDoesNotWaitForEver_IPAM06(t *testing.T) {
	w := newWorld(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	r := &Request{Ticket: TicketOf(w.claim("a")), Copied: true}
	for i := range 60 {
		w.clock = w.clock.Add(20 * time.Second)
		w.learn(w.address(fmt.Sprint("other", i), fmt.Sprintf("10.0.0.%d", 100+i), nil))
		res, _ := w.decide(r)
		if age := w.clock.Sub(r.Created); (res.Outcome == Granted) != (age >= LongestArrival) {
			t.Fatalf("after %v: %+v", age, res)
		}
	}
}

// A read of all addresses takes what has gone unseen out of the index, and leaves
// what was made while it was under way.
func TestCompare(t *testing.T) {
	w := newWorld(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/30"}}})
	there, gone, late := w.address("there", "10.0.0.1", nil), w.address("gone", "10.0.0.2", nil), w.address("late", "10.0.0.9", nil)
	w.learn(there)
	w.learn(gone)
	known := []types.UID{there.UID, gone.UID}
	w.learn(late)
	w.compare(known, []*capiipamv1.IPAddress{there})
	if v := w.View(); v.Addresses != 2 || v.Used != 1 || v.OutOfRange != 1 {
		t.Errorf("got %+v", v)
	}
	w.learn(gone) // an event that comes late
	if got := w.ask("a"); got.Address != "10.0.0.2" {
		t.Errorf("its address is not free: %+v", got)
	}
}

// A process that only follows does not remember for ever, not even pools that
// nobody but a claim has ever named.
func TestPrune(t *testing.T) {
	w := newWorld(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24"}}})
	ip := w.address("a", "10.0.0.1", nil)
	ip.OwnerReferences = []metav1.OwnerReference{{Kind: "IPAddressClaim", UID: "claim-a", Controller: ptr.To(true)}}
	w.reg.AddressSeen(ip)
	w.reg.AddressGone(ip)
	w.reg.ClaimGone(w.claim("a"))
	invented, waiting := w.claim("b"), w.claim("c")
	invented.Spec.PoolRef.Name, waiting.Spec.PoolRef.Name = "invented", "to come"
	w.reg.ClaimSeen(invented)
	w.reg.ClaimGone(invented)
	w.reg.ClaimSeen(waiting)

	w.reg.Prune()
	if len(w.gone) != 1 || len(w.dead) != 1 || len(w.last) != 1 || len(w.reg.pools) != 3 {
		t.Errorf("too early: %v %v %v %v", w.gone, w.dead, w.last, w.reg.pools)
	}
	w.clock = w.clock.Add(remember + time.Second)
	w.reg.Prune()
	if len(w.gone)+len(w.dead)+len(w.last) != 0 || len(w.reg.pools) != 2 {
		t.Errorf("left: %v %v %v %v", w.gone, w.dead, w.last, w.reg.pools)
	}
	w.forgetDoc() // as in a process that does not lead
	w.reg.ClaimGone(waiting)
	w.clock = w.clock.Add(remember + time.Second)
	w.reg.Prune()
	if len(w.reg.pools) != 0 {
		t.Errorf("ledgers are left: %v", w.reg.pools)
	}
}
