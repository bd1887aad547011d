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

// The record stays small: 100 000 resting addresses, spread over all of IPv4.
func TestRestingRecordIsBounded(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	addresses := make([]alloc.U128, maxResting)
	for i := range addresses {
		addresses[i] = alloc.U128{Lo: uint64(rng.Uint32())}
	}
	addresses[0] = alloc.U128{Hi: 1 << 63, Lo: 1} // and one of IPv6
	slices.SortFunc(addresses, alloc.U128.Cmp)
	s := encodeOffsets(addresses)
	if len(s) > 600_000 {
		t.Errorf("%d addresses take %d bytes", len(addresses), len(s))
	}
	got, err := decodeOffsets(s)
	if err != nil || !slices.Equal(got, addresses) {
		t.Errorf("they do not survive: %v", err)
	}
	if _, err := decodeOffsets(s[:len(s)-3]); err == nil {
		t.Error("a record that is cut off is believed")
	}
}

func TestRestUntil(t *testing.T) {
	now := time.Unix(1000, 1)
	for _, rest := range []time.Duration{time.Second, time.Minute, time.Hour} {
		until := restUntil(now, rest)
		if d := until.Sub(now); d < rest || d > rest+max(rest/restBuckets, time.Second) {
			t.Errorf("%v became %v", rest, d)
		}
	}
}

// First come, first served; who cannot be served does not hold up the others.
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
	turns := func() (out []bool) {
		for _, e := range entries {
			out = append(out, !e.parked && q.turn(e, two))
		}
		return out
	}
	if got := turns(); !slices.Equal(got, []bool{true, true, false, false, false}) {
		t.Errorf("turns are %v", got)
	}
	q.park(entries[0])
	if got := turns(); !slices.Equal(got, []bool{false, true, true, false, false}) {
		t.Errorf("after one was parked turns are %v", got)
	}
	q.unpark(entries[0])
	for _, e := range entries {
		q.setWaiting(e, true)
	}
	if got := q.wake(two); len(got) != 2 || got[0].Name != "9" || got[1].Name != "8" {
		t.Errorf("woken are %v", got)
	}
	if got := q.wake(two); len(got) != 0 {
		t.Errorf("woken twice: %v", got)
	}
	q.remove("0")
	if got := q.wake(two); len(got) != 1 || got[0].Name != "7" {
		t.Errorf("the next is %v", got)
	}
}

// What somebody chose who has died is settled with the next write: when its
// time is over, and its claim has gone or its IPAddress is known.
func TestSettleExpired(t *testing.T) {
	now := time.Unix(1000, 0)
	plan, errs := alloc.Compile(&ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/29"}}}, field.NewPath("spec"))
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	p := newPool(NewRegistry(nil, nil, Options{Now: func() time.Time { return now }}), Key{Kind: ipamv1.CapstanIPPoolKind, Name: "p"})
	p.plan, p.set = plan, alloc.NewSet(plan)
	first := plan.Pool[0].First
	choose := func(name string, until time.Time) {
		span := alloc.Range{First: first, Last: first}
		first = first.Add(alloc.One)
		p.pending[types.UID(name)] = &pendingEntry{uid: types.UID(name), claim: types.NamespacedName{Name: name}, span: span, until: until, shared: true}
		p.set.Use(span)
	}
	choose("dead", now)
	choose("served", now)
	choose("alive", now)
	choose("dead but too early", now.Add(time.Second))
	p.dead["dead"], p.dead["dead but too early"] = now, now
	p.byClaim[types.NamespacedName{Name: "served"}] = &addressEntry{}
	p.tick()
	if len(p.pending) != 2 || p.pending["alive"] == nil || p.pending["dead but too early"] == nil || p.set.Free() != (alloc.U128{Lo: 4}) {
		t.Errorf("left are %v, and %v are free", p.pending, p.set.Free())
	}
	now = now.Add(time.Second)
	p.tick()
	if len(p.pending) != 1 || p.set.Free() != (alloc.U128{Lo: 5}) {
		t.Errorf("later, left are %v, and %v are free", p.pending, p.set.Free())
	}
}
