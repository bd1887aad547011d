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
	// Seen is the resourceVersion with which the claim was first seen. It orders claims of the same second.
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

// queue contains the claims of a pool that have no address yet, in the order of their creation.
type queue struct {
	tickets map[types.UID]*entry
	// order contains all claims except the parked ones.
	order *alloc.Tree[Ticket]
	// waiting and wanting are the numbers of entries with these fields.
	waiting int
	wanting int
}

// entry is a claim in the queue.
type entry struct {
	Ticket
	// waiting is true if the claim is not reconciled before the ledger wakes it.
	waiting bool
	// parked is true if the claim cannot get any address, for example because its cluster is paused. It then does not
	// delay later claims.
	parked bool
	// want is true if the claim waits for the address exact.
	want  bool
	exact alloc.U128
}

// setWant records whether a claim waits for one certain address.
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

// add adds a claim to the queue. A claim that is in the queue keeps its place.
func (q *queue) add(t Ticket) *entry {
	e, ok := q.tickets[t.UID]
	if !ok {
		e = &entry{Ticket: t}
		q.tickets[t.UID] = e
		q.order.Set(t)
	}
	return e
}

// remove removes a claim from the queue. It reports whether the claim was in it.
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

// park removes a claim from the order and keeps its ticket.
func (q *queue) park(e *entry) {
	e.parked = true
	q.order.Delete(e.Ticket)
}

// unpark returns a parked claim to its place in the order.
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

// turn reports whether a claim is among the first n of the order.
func (q *queue) turn(e *entry, n alloc.U128) bool {
	return n.AtLeast(uint64(q.order.Len())) || n.AtLeast(uint64(q.order.Rank(e.Ticket))+1)
}

// wake returns the waiting claims among the first n of the order. They do not wait any more.
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

// wakeIf returns the claims for which f is true, including parked ones. They do not wait any more.
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
