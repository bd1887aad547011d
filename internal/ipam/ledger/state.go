package ledger

import (
	"maps"
	"slices"
	"strconv"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// remember is the time for which the history of a deleted object is kept: longer than a read of all addresses or a step of
// clusterctl move takes.
const remember = 10 * time.Minute

// state is the ledger of one pool in memory. It sends no requests, and its owner holds a lock during each call.
type state struct {
	key  Key
	opts *Options

	// doc is the pool object as of the last write or read of the record. It is nil before the first read.
	doc   ipamv1.Pool
	space space
	// addresses contains the existing IPAddresses.
	addresses addressIndex
	// pending contains the allocations whose IPAddress may not exist yet, by the UID of the claim.
	pending map[types.UID]*pendingEntry
	// loaded is true after pending and the resting addresses have been read from the record.
	loaded bool
	// queue contains the claims without an address.
	queue *queue
	// dead contains deleted claims. They get no address.
	dead map[types.UID]time.Time
	// last contains the last address of each claim whose IPAddress was deleted by a user or was not created.
	last map[types.UID]lastAddress
	// arrived is the time when an address or a claim of this pool last arrived from another management cluster, and
	// addressArrived is the time of the last address.
	arrived, addressArrived time.Time
}

// lastAddress is the address of a claim whose IPAddress was deleted or was not created.
type lastAddress struct {
	span  alloc.Range
	at    time.Time
	moved bool
	// retracted is true if the claim never had the address.
	retracted bool
}

func newState(opts *Options, key Key) *state {
	return &state{
		key:       key,
		opts:      opts,
		addresses: newAddressIndex(),
		pending:   map[types.UID]*pendingEntry{},
		queue:     newQueue(),
		dead:      map[types.UID]time.Time{},
		last:      map[types.UID]lastAddress{},
	}
}

func (s *state) now() time.Time { return s.opts.Now() }

// adopt makes doc the basis of further decisions. A new spec, or a takeover of the record, recomputes the set.
func (s *state) adopt(doc ipamv1.Pool, takeOver bool) {
	newSpec := s.doc == nil || s.doc.GetUID() != doc.GetUID() || s.doc.GetGeneration() != doc.GetGeneration()
	s.doc = doc
	if newSpec && s.space.compile(doc.PoolSpec()) || takeOver {
		s.loaded = false
	}
	if newSpec || takeOver {
		s.rebuild()
	}
}

// rebuild recomputes the set from the existing IPAddresses, the pending allocations and the resting addresses. The last
// two come from the record unless this process has loaded them before.
func (s *state) rebuild() {
	old := s.space.set
	s.space.set = nil
	s.uncountAll()
	if s.space.plan == nil { // The record stays in doc until the spec is valid again.
		return
	}
	s.space.set = alloc.NewSet(s.space.plan)
	record, loaded := s.doc.PoolStatus().Allocator, s.loaded
	s.loaded = true
	if !loaded {
		s.pending = readPending(record, &s.space)
	}
	for _, e := range s.pending {
		s.space.set.Use(e.span)
	}
	if loaded && old != nil {
		s.space.keepResting(old)
	} else {
		s.space.readResting(record)
	}
	for _, e := range s.addresses.byUID {
		s.space.count(e)
	}
	s.space.nextWake = s.now()
	s.wakeAll()
}

// forgetDoc forgets the pool object and all state that comes from its record.
func (s *state) forgetDoc() {
	s.doc, s.space = nil, space{}
	s.pending, s.loaded = map[types.UID]*pendingEntry{}, false
	s.uncountAll()
}

func (s *state) uncountAll() {
	s.space.aliens = 0
	for _, e := range s.addresses.byUID {
		e.counted, e.alien = false, false
	}
}

// addAddress records an existing IPAddress.
func (s *state) addAddress(ip *capiipamv1.IPAddress) {
	e := s.addresses.add(ip)
	if e == nil {
		return
	}
	s.space.count(e)
	if _, allocatedHere := s.pending[e.claimUID]; !allocatedHere {
		s.arrived, s.addressArrived = s.now(), s.now()
	}
	s.opts.PoolChanged(s.key)
}

// removeAddress records the deletion of an IPAddress. moved is true if clusterctl has deleted it after a move.
func (s *state) removeAddress(uid types.UID, moved bool) {
	e := s.addresses.remove(uid, s.now())
	if e == nil { // The release has reported it before. A deleted pool waits until the cache reports it too.
		if s.doc != nil && !s.doc.GetDeletionTimestamp().IsZero() {
			s.opts.PoolChanged(s.key)
		}
		return
	}
	if e.releasing { // The finalizer of another component can have delayed the release after the first rest.
		s.space.restAgain(e.spec, s.now())
	}
	s.space.uncount(e)
	if !e.releasing && e.claimUID != "" {
		s.last[e.claimUID] = lastAddress{span: e.span, at: s.now(), moved: moved}
	}
	s.wakeFor(e.span)
	s.opts.PoolChanged(s.key)
}

// compare brings the index up to date with a read of all addresses. known contains the entries from before the read:
// those that are not in the read were deleted. Other entries may be newer than the read.
func (s *state) compare(known []types.UID, items []*capiipamv1.IPAddress) {
	listed := make(map[types.UID]bool, len(items))
	for _, ip := range items {
		listed[ip.UID] = true
		s.addAddress(ip)
	}
	for _, uid := range known {
		if !listed[uid] {
			s.removeAddress(uid, false)
		}
	}
}

// allocate records that a claim gets an address.
func (s *state) allocate(r *Request, span alloc.Range) {
	now := s.now()
	s.pending[r.UID] = &pendingEntry{uid: r.UID, claim: r.NamespacedName, span: span, marked: now, until: now.Add(s.opts.Quarantine)}
	s.space.set.Use(span)
	s.leave(r.UID)
}

// revert reverts allocate after a failed write of the record. An allocation that was in the record before stays there.
func (s *state) revert(r *Request, known bool) {
	e, ok := s.pending[r.UID]
	switch {
	case !ok:
	case known:
		e.marked = time.Time{}
	default:
		delete(s.pending, r.UID)
		s.space.unuse(e.span)
		if _, dead := s.dead[r.UID]; !dead { // Nothing would remove the place of a deleted claim.
			s.queue.add(r.Ticket)
		}
	}
}

// settle removes a pending allocation unless a request to create its IPAddress may still be in progress.
func (s *state) settle(e *pendingEntry) (settled bool) {
	if s.pending[e.uid] != e || e.outstanding(s.now()) {
		return false
	}
	delete(s.pending, e.uid)
	s.space.unuse(e.span)
	return true
}

// retract records that this process does not create the IPAddress of a claim. The next attempt gets the same address if it is free:
// with another one, each attempt would advance the cursor of RoundRobin, and released addresses would soon be used again.
func (s *state) retract(claim types.UID) {
	e, ok := s.pending[claim]
	if !ok {
		return
	}
	e.done = true
	if before, had := s.last[claim]; !had || before.retracted {
		s.last[claim] = lastAddress{span: e.span, at: s.now(), retracted: true}
	}
	s.settleAndWake(e)
}

// settleAndWake also wakes the claims that can use the address.
func (s *state) settleAndWake(e *pendingEntry) {
	if s.settle(e) {
		s.wakeFor(e.span)
	}
}

// settleExpired settles the pending allocations whose time is over and whose result is known. It runs before every write
// of the record, so that a takeover by another process cannot prevent it.
func (s *state) settleExpired(now time.Time) {
	for _, e := range s.pending {
		if e.until.After(now) {
			continue
		}
		if _, dead := s.dead[e.uid]; dead || e.done || s.addresses.byClaim[e.claim] != nil {
			e.done = true
			s.settleAndWake(e)
		}
	}
}

// tick does the work that is due at this time.
func (s *state) tick() {
	now := s.now()
	s.settleExpired(now)
	if s.space.endRests(now) {
		s.wakeNext()
		s.call(s.queue.wakeIf(func(e *entry) bool { return e.waiting && e.want }))
		s.opts.PoolChanged(s.key)
	}
}

// nextSweep returns the expired pending allocations of claims that may not exist any more. It also returns the time of
// the next call, or zero if no call is needed.
func (s *state) nextSweep(now time.Time) (expired []*pendingEntry, next time.Time) {
	next = s.space.nextWake
	for _, e := range s.pending {
		switch {
		case !e.until.After(now):
			expired = append(expired, e)
		case !e.shared.IsZero() && (next.IsZero() || e.until.Before(next)):
			next = e.until
		}
	}
	return expired, next
}

// enqueue adds a claim to the queue. The IPAddress of a claim from another management cluster may still arrive. A claim
// that was created here gives no such hint.
func (s *state) enqueue(t Ticket, copied bool) {
	if _, served := s.pending[t.UID]; served {
		return
	}
	if _, dead := s.dead[t.UID]; dead { // Nothing would remove its place.
		return
	}
	if e, ok := s.addresses.byClaim[t.NamespacedName]; ok && e.claimUID == t.UID {
		return
	}
	if _, known := s.queue.tickets[t.UID]; !known {
		s.queue.add(t)
		if copied {
			s.arrived = s.now()
		}
	}
}

// leave removes a claim from the queue and wakes the claims that move up. The pool shows the number of waiting claims.
func (s *state) leave(uid types.UID) {
	waiting := s.queue.waiting
	if !s.queue.remove(uid) {
		return
	}
	s.wakeNext()
	if s.queue.waiting != waiting {
		s.opts.PoolChanged(s.key)
	}
}

// park keeps a claim from delaying later claims.
func (s *state) park(e *entry) {
	s.queue.park(e)
	s.wakeNext()
}

// wakeNext wakes the first claims in the queue, one for each free address.
func (s *state) wakeNext() {
	if s.space.set != nil {
		s.call(s.queue.wake(s.space.set.Free()))
	}
}

// wakeFor wakes the queued claims, and those that wait for exactly this address or prefix.
func (s *state) wakeFor(span alloc.Range) {
	s.wakeNext()
	if s.space.plan != nil && s.queue.wanting > 0 {
		s.call(s.queue.wakeIf(func(e *entry) bool { return e.waiting && e.want && span.Overlaps(s.space.block(e.exact)) }))
	}
}

func (s *state) wakeAll() {
	s.call(s.queue.wakeIf(func(e *entry) bool { return e.waiting }))
}

func (s *state) call(claims []types.NamespacedName) {
	for _, c := range claims {
		s.opts.WakeClaim(c)
	}
}

// overlapBlocks returns the reason why the comparison with other pools forbids new allocations, or nothing. Before the
// comparison, the spec may overlap a pool that refuses overlaps.
func (s *state) overlapBlocks() string {
	c := apimeta.FindStatusCondition(s.doc.GetConditions(), ipamv1.NotOverlappingCondition)
	switch {
	case c == nil, c.ObservedGeneration < s.doc.GetGeneration():
		return "is not ready yet: it is being compared with other pools"
	case c.Status == metav1.ConditionFalse && c.Reason == ipamv1.OverlapRefusedReason:
		return "overlaps another pool, which is refused: see its NotOverlapping condition"
	}
	return ""
}

// fill writes the record and the counts into a pool's status.
func (s *state) fill(doc ipamv1.Pool, holder string) {
	status := doc.PoolStatus()
	status.Addresses = s.view().Counts()
	if status.Allocator == nil {
		status.Allocator = &ipamv1.AllocatorStatus{}
	}
	sign(status.Allocator, holder)
	if s.space.set == nil { // The spec is invalid: the allocations of other processes stay in the record.
		return
	}
	if c, ok := s.space.set.Cursor(); ok && s.space.plan.Order == ipamv1.RoundRobinOrder {
		status.Allocator.Cursor = s.space.plan.Addr(c).String()
	}
	status.Allocator.Pending = encodePending(s.space.plan, slices.Collect(maps.Values(s.pending)))
	status.Allocator.Resting = encodeResting(s.space.set)
}

// sign writes the holder and a new number of the write into a record.
func sign(record *ipamv1.AllocatorStatus, holder string) {
	record.Holder = holder
	record.Write = strconv.FormatUint(writes.Add(1), 10)
}

// forgetOld forgets the history of objects that were deleted long ago. It reports whether no state is left. A claim whose IPAddress
// clusterctl has moved gets no other address while the history lasts: it is woken then, because a move can be given up without an event.
func (s *state) forgetOld(now time.Time) (empty bool) {
	history := len(s.last)
	s.addresses.forgetOld(now, remember)
	maps.DeleteFunc(s.dead, func(_ types.UID, at time.Time) bool { return now.Sub(at) > remember })
	maps.DeleteFunc(s.last, func(_ types.UID, l lastAddress) bool { return now.Sub(l.at) > remember })
	if len(s.last) < history {
		s.wakeAll()
	}
	return s.doc == nil && len(s.queue.tickets) == 0 &&
		len(s.addresses.byUID)+len(s.pending)+len(s.addresses.gone)+len(s.dead)+len(s.last) == 0
}
