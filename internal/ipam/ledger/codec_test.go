package ledger

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// The record of 100 000 resting addresses, spread over all of IPv4, is small.
func TestRestingRecordIsBounded(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	addresses := make([]alloc.U128, maxResting)
	for i := range addresses {
		addresses[i] = alloc.U128{Lo: uint64(rng.Uint32())}
	}
	addresses[0] = alloc.U128{Hi: 1 << 63, Lo: 1} // one IPv6 address
	slices.SortFunc(addresses, alloc.U128.Cmp)
	s := encodeOffsets(addresses)
	if len(s) > 600_000 {
		t.Errorf("%d addresses take %d bytes", len(addresses), len(s))
	}
	got, err := decodeOffsets(s)
	if err != nil || !slices.Equal(got, addresses) {
		t.Errorf("decoded addresses differ: %v", err)
	}
	if _, err := decodeOffsets(s[:len(s)-3]); err == nil {
		t.Error("a truncated record is accepted")
	}
}

func TestRestUntil(t *testing.T) {
	now := time.Unix(1000, 1)
	for _, rest := range []time.Duration{time.Second, time.Minute, time.Hour} {
		until := restUntil(now, rest)
		if d := until.Sub(now); d < rest || d > rest+max(rest/restBuckets, time.Second) {
			t.Errorf("a resting period of %v became %v", rest, d)
		}
	}
}

// The queue serves claims in the order of their creation. Parked claims do not delay later claims.
func TestQueue(t *testing.T) {
	q := newQueue()
	var entries []*entry
	for i := range 5 {
		entries = append(entries, q.add(Ticket{
			NamespacedName: types.NamespacedName{Name: fmt.Sprint(9 - i)}, UID: types.UID(fmt.Sprint(i)),
			Created: time.Unix(int64(i/2), 0), Seen: uint64(i),
		}))
	}
	two := alloc.U128{Lo: 2}
	servable := func() (out []bool) {
		for _, e := range entries {
			out = append(out, !e.parked && q.turn(e, two))
		}
		return out
	}
	if got := servable(); !slices.Equal(got, []bool{true, true, false, false, false}) {
		t.Errorf("claims that can be served: %v", got)
	}
	q.park(entries[0])
	if got := servable(); !slices.Equal(got, []bool{false, true, true, false, false}) {
		t.Errorf("claims that can be served after one was parked: %v", got)
	}
	q.unpark(entries[0])
	for _, e := range entries {
		q.setWaiting(e, true)
	}
	if got := q.wake(two); len(got) != 2 || got[0].Name != "9" || got[1].Name != "8" {
		t.Errorf("woken claims: %v", got)
	}
	if got := q.wake(two); len(got) != 0 {
		t.Errorf("claims woken twice: %v", got)
	}
	q.remove("0")
	if got := q.wake(two); len(got) != 1 || got[0].Name != "7" {
		t.Errorf("next claim: %v", got)
	}
}

// The next write settles the pending allocations of a dead process, after their time is over and after their claim was
// deleted or their IPAddress was seen.
func TestSettleExpired(t *testing.T) {
	now := time.Unix(1000, 0)
	plan, errs := alloc.Compile(&ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/29"}}}, field.NewPath("spec"))
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	r := NewRegistry(nil, nil, Options{Now: func() time.Time { return now }})
	p := newState(&r.opts, Key{Kind: ipamv1.CapstanIPPoolKind, Name: "p"})
	p.space.plan, p.space.set = plan, alloc.NewSet(plan)
	first := plan.Pool[0].First
	allocate := func(name string, until time.Time) {
		span := alloc.Range{First: first, Last: first}
		first = first.Add(alloc.One)
		p.pending[types.UID(name)] = &pendingEntry{uid: types.UID(name), claim: types.NamespacedName{Name: name}, span: span, until: until, shared: until}
		p.space.set.Use(span)
	}
	allocate("dead", now)
	allocate("served", now)
	allocate("alive", now)
	allocate("dead but too early", now.Add(time.Second))
	p.dead["dead"], p.dead["dead but too early"] = now, now
	p.addresses.byClaim[types.NamespacedName{Name: "served"}] = &addressEntry{}
	p.tick()
	if len(p.pending) != 2 || p.pending["alive"] == nil || p.pending["dead but too early"] == nil || p.space.set.Free() != (alloc.U128{Lo: 4}) {
		t.Errorf("pending: %v, free: %v", p.pending, p.space.set.Free())
	}
	now = now.Add(time.Second)
	p.tick()
	if len(p.pending) != 1 || p.space.set.Free() != (alloc.U128{Lo: 5}) {
		t.Errorf("later, pending: %v, free: %v", p.pending, p.space.set.Free())
	}
}
