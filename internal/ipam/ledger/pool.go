package ledger

import (
	"context"
	"errors"
	"sync"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// Pool is the ledger of one pool. Its methods can be called concurrently.
//
// The state follows the watch and answers requests. The writer puts the results into the pool's record.
type Pool struct {
	mu     sync.Mutex
	state  *state
	writer *recordWriter
	// used is the time of the last use of this ledger. The registry's lock guards it.
	used time.Time
}

func newPool(r *Registry, key Key) *Pool {
	p := &Pool{state: newState(&r.opts, key)}
	p.writer = newRecordWriter(r, &p.mu, p.state)
	return p
}

// Changed records the generation of the pool in the watch, so that the ledger reads the object again before its next
// decision.
func (p *Pool) Changed(seen ipamv1.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state.doc != nil && !sameIntent(p.state.doc, seen) {
		p.writer.refresh = true
		p.state.wakeAll()
	}
}

// sameIntent reports whether two versions of a pool are equal in all fields that decisions use.
func sameIntent(a, b ipamv1.Pool) bool {
	return a.GetUID() == b.GetUID() &&
		a.GetGeneration() == b.GetGeneration() &&
		a.GetDeletionTimestamp().IsZero() == b.GetDeletionTimestamp().IsZero() &&
		a.GetAnnotations()[ipamv1.OriginUIDAnnotation] == b.GetAnnotations()[ipamv1.OriginUIDAnnotation] &&
		SameComparison(a, b)
}

// SameComparison returns true if two versions of a pool show the same result of its comparison with other pools. The
// manager that watches the pool writes it; others read it before they allocate.
func SameComparison(a, b ipamv1.Pool) bool {
	before := apimeta.FindStatusCondition(a.GetConditions(), ipamv1.NotOverlappingCondition)
	after := apimeta.FindStatusCondition(b.GetConditions(), ipamv1.NotOverlappingCondition)
	if before == nil || after == nil {
		return before == after
	}
	return before.Status == after.Status && before.Reason == after.Reason && before.ObservedGeneration == after.ObservedGeneration
}

// Allocate chooses an address for a claim. When it returns Granted, the address is in the pool's record and no other
// claim gets it.
func (p *Pool) Allocate(ctx context.Context, r Request) (Result, error) {
	var res Result
	var known, wrote bool
	req := &request{
		undo: func(s *state) {
			if wrote {
				s.revert(&r, known)
			}
		},
	}
	req.apply = func(s *state) bool {
		_, known = s.pending[r.UID]
		req.claims = 1
		if _, has := s.addresses.byClaim[r.NamespacedName]; has || known { // This call does not choose the address.
			req.claims = 0
		}
		res, wrote = s.decide(&r)
		if e, ok := s.pending[r.UID]; ok && res.Outcome == Granted {
			res.Before = e.marked.Add(s.opts.grantLife())
		}
		return wrote
	}
	err := p.writer.submit(ctx, req)
	return res, err
}

// Rest withholds the address of an IPAddress from new claims for the pool's resting period. It does nothing if the pool
// has no resting period or cannot allocate this address.
func (p *Pool) Rest(ctx context.Context, ip capiipamv1.IPAddressSpec) error {
	if !p.mayRest() {
		return nil
	}
	var first alloc.U128
	var rested bool
	err := p.writer.submit(ctx, &request{
		apply: func(s *state) bool {
			first, rested = s.space.rest(ip, s.now())
			return rested
		},
		undo: func(s *state) {
			if rested {
				s.space.unrest(first)
			}
		},
	})
	if errors.Is(err, ErrPoolGone) {
		return nil
	}
	return err
}

// mayRest reports whether the pool has a resting period. It is true for a pool that was not read yet.
func (p *Pool) mayRest() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state.doc == nil {
		return true
	}
	seconds := p.state.doc.PoolSpec().RestSeconds
	return seconds != nil && *seconds > 0
}

// Update calls change with the pool's object, whose counts are up to date, and writes its status if change returns
// true.
func (p *Pool) Update(ctx context.Context, change func(ipamv1.Pool, View) bool) error {
	return p.writer.submit(ctx, &request{
		apply: func(s *state) bool {
			before := s.overlapBlocks()
			must := change(s.doc, s.view())
			if s.overlapBlocks() != before {
				s.wakeAll()
			}
			return must
		},
		undo: func(*state) {},
	})
}

// Sweep settles pending allocations of abandoned claims, and returns the time until its next call; zero means that no
// call is needed. It takes the record over first, so that the allocations of a dead process are settled at once.
func (p *Pool) Sweep(ctx context.Context, exists func(context.Context, types.NamespacedName, types.UID) (bool, error)) (time.Duration, error) {
	if err := p.writer.submit(ctx, &request{apply: func(*state) bool { return false }, undo: func(*state) {}}); err != nil {
		return 0, err
	}
	p.mu.Lock()
	now := p.state.now()
	p.state.tick()
	expired, next := p.state.nextSweep(now)
	p.mu.Unlock()
	for _, e := range expired {
		alive, err := exists(ctx, e.claim, e.uid)
		if err != nil {
			return 0, err
		}
		if !alive {
			p.mu.Lock()
			p.state.dead[e.uid] = now
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	p.state.settleExpired(now)
	p.mu.Unlock()
	if next.IsZero() {
		return 0, nil
	}
	return max(next.Sub(now), 100*time.Millisecond), nil
}

// Releasing records that the provider deletes an IPAddress because its claim was deleted. The claim gets no address
// again, so the ledger does not keep it.
func (p *Pool) Releasing(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.state.addresses.byUID[uid]; ok {
		e.releasing = true
	}
}

// Created records that a claim's IPAddress exists.
func (p *Pool) Created(claim types.UID, ip *capiipamv1.IPAddress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.addAddress(ip)
	if e, ok := p.state.pending[claim]; ok {
		e.done = true
		p.state.settle(e)
	}
}

// Unanswered records that a request to create a claim's IPAddress has ended without an answer. The API server may still
// execute it, even after another request has created the IPAddress and the claim was deleted.
func (p *Pool) Unanswered(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.share(claim)
}

// Abandon records the deletion of a claim for which an address may be chosen. A request to create its IPAddress may
// still be in progress.
func (p *Pool) Abandon(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.leave(claim)
	p.state.dead[claim] = p.state.now()
	p.share(claim)
}

// share keeps the pending allocation of a claim until its deadline. The change of the pool schedules the next Sweep.
func (p *Pool) share(claim types.UID) {
	if e, ok := p.state.pending[claim]; ok {
		e.shared = e.until
		p.state.opts.PoolChanged(p.state.key)
	}
}

// Retract records that the IPAddress of a claim was not created, because the ledger has another IPAddress with its
// name.
func (p *Pool) Retract(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.retract(claim)
}

// Refused records that the API server has refused the IPAddress of a claim. Until its next request, the claim does not
// delay later claims.
func (p *Pool) Refused(t Ticket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.retract(t.UID)
	if _, dead := p.state.dead[t.UID]; !dead {
		p.state.park(p.state.queue.add(t))
	}
}

// park keeps a queued claim from delaying later claims until its next request.
func (p *Pool) park(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.state.queue.tickets[uid]; ok && !e.parked {
		p.state.park(e)
	}
}

// View returns the state of the pool.
func (p *Pool) View() View {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.view()
}

func (p *Pool) addressSeen(ip *capiipamv1.IPAddress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.addAddress(ip)
}

func (p *Pool) addressGone(uid types.UID, moved bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.removeAddress(uid, moved)
}

func (p *Pool) enqueue(t Ticket, copied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.enqueue(t, copied)
}

func (p *Pool) dequeue(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.leave(uid)
}

// forgetDoc forgets the pool object.
func (p *Pool) forgetDoc() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.writer.forgetDoc()
}

// prune drops old entries and reports whether none is left.
func (p *Pool) prune(now time.Time) (empty bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.forgetOld(now) && !p.writer.flushing
}
