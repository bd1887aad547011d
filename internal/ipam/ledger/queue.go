package ledger

import (
	"cmp"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	"capstan.dev/capstan/internal/ipam/alloc"
)

// Ticket is a claim's place in the queue of its pool.
type Ticket struct {
	types.NamespacedName
	UID     types.UID
	Created time.Time
	// Seen orders claims of the same second: the resourceVersion with which
	// the claim was first seen.
	Seen uint64
}

// TicketOf returns the ticket of a claim.
func TicketOf(claim *capiipamv1.IPAddressClaim) Ticket {
	seen, _ := strconv.ParseUint(claim.ResourceVersion, 10, 64)
	return Ticket{
		NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name},
		UID:            claim.UID,
		Created:        claim.CreationTimestamp.Time,
		Seen:           seen,
	}
}

func (t Ticket) compare(o Ticket) int {
	return cmp.Or(
		t.Created.Compare(o.Created),
		cmp.Compare(t.Seen, o.Seen),
		cmp.Compare(t.Namespace, o.Namespace),
		cmp.Compare(t.Name, o.Name),
		cmp.Compare(t.UID, o.UID),
	)
}

// queue has the claims of a pool that have no address yet, first come first.
// It decides nothing while there are addresses for all.
type queue struct {
	tickets map[types.UID]*entry
	order   *alloc.Tree[Ticket]
	waiting int
	wanting int
}

type entry struct {
	Ticket
	// waiting: it has been told to wait and nobody looks at it until woken.
	waiting bool
	// parked: it cannot be served whatever is free, for example because its
	// cluster is paused, and so must not hold up those behind it.
	parked bool
	// exact: it waits for one certain address.
	exact alloc.U128
	want  bool
}

// setWant notes that a claim waits for one certain address.
func (q *queue) setWant(e *entry, want bool, exact alloc.U128) {
	if e.want != want {
		if want {
			q.wanting++
		} else {
			q.wanting--
		}
	}
	e.want, e.exact = want, exact
}

func newQueue() *queue {
	return &queue{tickets: map[types.UID]*entry{}, order: alloc.NewTree(Ticket.compare)}
}

// add puts a claim in line. A claim that is in line keeps its place.
func (q *queue) add(t Ticket) *entry {
	e, ok := q.tickets[t.UID]
	if !ok {
		e = &entry{Ticket: t}
		q.tickets[t.UID] = e
		q.order.Set(t)
	}
	return e
}

// remove takes a claim out of line.
func (q *queue) remove(uid types.UID) bool {
	e, ok := q.tickets[uid]
	if !ok {
		return false
	}
	q.setWaiting(e, false)
	q.setWant(e, false, alloc.U128{})
	q.order.Delete(e.Ticket)
	delete(q.tickets, uid)
	return true
}

// park takes a claim out of the order but remembers its place.
func (q *queue) park(e *entry) {
	e.parked = true
	q.order.Delete(e.Ticket)
}

// unpark puts it back in its place.
func (q *queue) unpark(e *entry) {
	if e.parked {
		e.parked = false
		q.setWant(e, false, alloc.U128{})
		q.order.Set(e.Ticket)
	}
}

func (q *queue) setWaiting(e *entry, waiting bool) {
	if e.waiting != waiting {
		e.waiting = waiting
		if waiting {
			q.waiting++
		} else {
			q.waiting--
		}
	}
}

// turn reports whether a claim is among the first n in line.
func (q *queue) turn(e *entry, n alloc.U128) bool {
	return n.AtLeast(uint64(q.order.Len())) || n.AtLeast(uint64(q.order.Rank(e.Ticket))+1)
}

// wake returns the waiting claims among the first n in line, and clears their
// waiting mark.
func (q *queue) wake(n alloc.U128) []types.NamespacedName {
	if q.waiting == 0 || n.IsZero() {
		return nil
	}
	var woken []types.NamespacedName
	place := uint64(0)
	q.order.Ascend(func(t Ticket) bool {
		place++
		if !n.AtLeast(place) {
			return false
		}
		if e := q.tickets[t.UID]; e.waiting {
			q.setWaiting(e, false)
			woken = append(woken, e.NamespacedName)
		}
		return q.waiting > 0
	})
	return woken
}

// wakeIf wakes the claims that f picks, in line or parked.
func (q *queue) wakeIf(f func(*entry) bool) []types.NamespacedName {
	var woken []types.NamespacedName
	for _, e := range q.tickets {
		if f(e) {
			q.setWaiting(e, false)
			woken = append(woken, e.NamespacedName)
		}
	}
	return woken
}
