package ledger

import (
	"sync"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// remember is how long what happened to an object is kept in mind after it has
// gone: longer than a read of all addresses or a clusterctl move's step takes.
const remember = 10 * time.Minute

// Pool is the ledger of one pool. Its index follows the watch; its record is
// only ever written by one goroutine at a time.
type Pool struct {
	reg *Registry
	key Key

	mu sync.Mutex
	// doc is the pool object as of the last write or read of the record.
	doc ipamv1.Pool
	// held: doc's resourceVersion is from our own write, or a read that showed
	// our own last write, so all that is in use is known.
	held bool
	// refresh: the pool object has changed since doc.
	refresh bool
	write   string

	plan    *alloc.Plan
	set     *alloc.Set
	planErr field.ErrorList

	addresses map[types.UID]*addressEntry
	byClaim   map[types.NamespacedName]*addressEntry
	gone      map[types.UID]time.Time
	// dead are claims that have gone or are going: they get no address any more.
	dead     map[types.UID]time.Time
	pending  map[types.UID]*pendingEntry
	last     map[types.UID]lastAddress
	queue    *queue
	nextWake time.Time
	// loaded: pending and the resting addresses have been read from the record.
	loaded bool
	// aliens is the number of addresses that are not of the pool's family.
	aliens int
	// arrived is when something of this pool last appeared that was not made
	// here: an address or a claim that may have come with others.
	arrived time.Time
	// used is when the registry was last asked for this ledger; its lock
	// guards it.
	used time.Time

	requests []*request
	flushing bool
}

// addressEntry is an IPAddress that exists.
type addressEntry struct {
	uid       types.UID
	claim     types.NamespacedName
	spec      capiipamv1.IPAddressSpec
	span      alloc.Range
	claimUID  types.UID // of the controlling owner, if there is one
	counted   bool      // span is in the set
	alien     bool      // it is no address of the pool's family
	releasing bool
}

// pendingEntry is an address that is chosen for a claim.
type pendingEntry struct {
	uid   types.UID
	claim types.NamespacedName
	span  alloc.Range
	// until is how long a request to create the IPAddress may be under way.
	until time.Time
	// marked is when this process wrote it into the record. It may begin to
	// create the IPAddress for a short time after that; later it has to write
	// it again. It is zero when another process wrote it.
	marked time.Time
	// shared: a request that this process cannot answer for may be under way,
	// so the address stays taken until the time above.
	shared bool
	done   bool
}

// lastAddress is what a claim had whose IPAddress has gone.
type lastAddress struct {
	span  alloc.Range
	at    time.Time
	moved bool
}

func newPool(r *Registry, key Key) *Pool {
	return &Pool{
		reg:       r,
		key:       key,
		addresses: map[types.UID]*addressEntry{},
		byClaim:   map[types.NamespacedName]*addressEntry{},
		gone:      map[types.UID]time.Time{},
		dead:      map[types.UID]time.Time{},
		pending:   map[types.UID]*pendingEntry{},
		last:      map[types.UID]lastAddress{},
		queue:     newQueue(),
	}
}

func (p *Pool) now() time.Time { return p.reg.opts.Now() }

// Changed tells the ledger which generation of the pool the watch has shown,
// so that it reads the object again before it decides anything.
func (p *Pool) Changed(seen ipamv1.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.doc != nil && !sameIntent(p.doc, seen) {
		p.refresh = true
		p.wakeAll()
	}
}

// sameIntent reports whether two versions of a pool differ in nothing that the
// ledger's decisions rest on.
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

func (p *Pool) forgetDoc() {
	p.doc, p.held, p.refresh = nil, false, false
	p.plan, p.set, p.planErr = nil, nil, nil
	p.pending, p.loaded = map[types.UID]*pendingEntry{}, false
	p.uncountAll()
}

func (p *Pool) uncountAll() {
	p.aliens = 0
	for _, e := range p.addresses {
		e.counted, e.alien = false, false
	}
}

// adopt makes doc the state that decisions are taken on. With a new spec the
// free list is worked out afresh.
func (p *Pool) adopt(doc ipamv1.Pool, takeOver bool) {
	newSpec := p.doc == nil || p.doc.GetUID() != doc.GetUID() || p.doc.GetGeneration() != doc.GetGeneration()
	p.doc, p.refresh = doc, false
	if newSpec {
		before := p.plan
		p.plan, p.planErr = alloc.Compile(doc.PoolSpec(), field.NewPath("spec"))
		if p.plan != nil && before != nil && (p.plan.V6 != before.V6 || p.plan.Bits != before.Bits) {
			p.loaded = false
		}
	}
	if newSpec || takeOver {
		p.rebuild(takeOver)
	}
}

// rebuild works the set out from the index, the pending allocations and the
// resting addresses. When the record was taken over, the last two come from it.
func (p *Pool) rebuild(takeOver bool) {
	old := p.set
	p.set = nil
	p.uncountAll()
	if takeOver {
		p.loaded = false
	}
	if p.plan == nil { // the record waits in doc until the spec is valid again
		return
	}
	p.set = alloc.NewSet(p.plan)
	record := p.doc.PoolStatus().Allocator
	takeOver, p.loaded = !p.loaded, true
	if takeOver {
		p.takePending(record)
	}
	for _, e := range p.pending {
		p.set.Use(e.span)
	}
	p.restoreResting(old, record, takeOver)
	for _, e := range p.addresses {
		p.countAddress(e)
	}
	p.nextWake = p.now()
	p.wakeAll()
}

func (p *Pool) restoreResting(old *alloc.Set, record *ipamv1.AllocatorStatus, takeOver bool) {
	if old != nil && !takeOver {
		old.EachResting(p.set.Rest)
		if c, ok := old.Cursor(); ok {
			p.set.SetCursor(c)
		}
		return
	}
	if record == nil {
		return
	}
	for _, r := range record.Resting {
		addresses, err := decodeOffsets(r.Offsets)
		if err != nil {
			// What can be read rests; a rest cut short is no duplicate.
			continue
		}
		for _, a := range addresses {
			p.set.Rest(a, r.Until.Time)
		}
	}
	if a, err := alloc.ParseAddr(record.Cursor); err == nil && a.Is6() == p.plan.V6 {
		p.set.SetCursor(alloc.FromAddr(a))
	}
}

// takePending replaces the pending allocations by those of the record. Whoever
// made them may still be about to create the IPAddresses.
func (p *Pool) takePending(record *ipamv1.AllocatorStatus) {
	p.pending = map[types.UID]*pendingEntry{}
	if record != nil {
		for _, r := range record.Pending {
			a, err := alloc.ParseAddr(r.Address)
			if err != nil || a.Is6() != p.plan.V6 {
				continue
			}
			first := alloc.FromAddr(a)
			p.pending[types.UID(r.UID)] = &pendingEntry{
				uid:    types.UID(r.UID),
				claim:  types.NamespacedName{Namespace: r.Namespace, Name: r.Name},
				span:   alloc.Range{First: first, Last: first.Add(p.plan.Block().Sub(alloc.One))},
				until:  r.Until.Time,
				shared: true,
			}
		}
	}
}

func (p *Pool) countAddress(e *addressEntry) {
	if p.plan == nil || e.counted {
		return
	}
	span, ok := p.plan.Span(e.spec.Address, e.spec.Prefix)
	if !ok {
		if !e.alien {
			e.alien = true
			p.aliens++
		}
		return
	}
	e.span, e.counted = span, true
	p.set.Use(span)
}

func (p *Pool) uncountAddress(e *addressEntry) {
	if e.counted && p.set != nil {
		p.set.Unuse(e.span)
	}
	if e.alien {
		p.aliens--
	}
	e.counted, e.alien = false, false
}

func (p *Pool) addressSeen(ip *capiipamv1.IPAddress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.learn(ip)
}

// learn adds an IPAddress to the index. A read of all addresses can be older
// than the watch, so what is known to have gone is not added again.
func (p *Pool) learn(ip *capiipamv1.IPAddress) {
	if _, gone := p.gone[ip.UID]; gone {
		return
	}
	claim := types.NamespacedName{Namespace: ip.Namespace, Name: ip.Name} // IPAM-04e: the claim's name
	var claimUID types.UID
	if owner := metav1.GetControllerOf(ip); owner != nil {
		claimUID = owner.UID
	}
	if e, ok := p.addresses[ip.UID]; ok {
		e.claimUID = claimUID
		return
	}
	e := &addressEntry{uid: ip.UID, claim: claim, claimUID: claimUID, spec: ip.Spec}
	p.addresses[ip.UID] = e
	p.byClaim[claim] = e
	p.countAddress(e)
	if _, chosenHere := p.pending[claimUID]; !chosenHere {
		p.arrived = p.now()
	}
	p.reg.opts.PoolChanged(p.key)
}

func (p *Pool) addressGone(uid types.UID, moved bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unlearn(uid, moved)
}

// unlearn takes an IPAddress out of the index that has gone.
func (p *Pool) unlearn(uid types.UID, moved bool) {
	if _, seen := p.gone[uid]; seen {
		return
	}
	p.gone[uid] = p.now()
	e, ok := p.addresses[uid]
	if !ok {
		return
	}
	delete(p.addresses, uid)
	if p.byClaim[e.claim] == e {
		delete(p.byClaim, e.claim)
	}
	p.uncountAddress(e)
	if !e.releasing && e.claimUID != "" {
		p.last[e.claimUID] = lastAddress{span: e.span, at: p.now(), moved: moved}
	}
	p.wakeFor(e.span)
	p.reg.opts.PoolChanged(p.key)
}

// Releasing marks a claim's IPAddress as on its way out, so that nothing is
// remembered for the claim.
func (p *Pool) Releasing(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.addresses[uid]; ok {
		e.releasing = true
	}
}

// Created tells the ledger that a claim's IPAddress exists.
func (p *Pool) Created(claim types.UID, ip *capiipamv1.IPAddress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.learn(ip)
	if e, ok := p.pending[claim]; ok {
		e.done = true
		p.settlePending(e)
	}
}

// Abandon tells the ledger that a claim has gone for which an address may be
// chosen. A request to create its IPAddress may still be under way.
func (p *Pool) Abandon(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leave(claim)
	p.dead[claim] = p.now()
	if e, ok := p.pending[claim]; ok {
		e.shared = true
		p.reg.opts.PoolChanged(p.key)
	}
}

// Retract tells the ledger that the IPAddress of a claim was not created
// because there is another of its name, which it has been told of.
func (p *Pool) Retract(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.pending[claim]; ok && !e.shared {
		e.done = true
		p.settleAndWake(e)
	}
}

// settleExpired drops the pending allocations whose time is over and of which
// the outcome is known. It is part of every write of the record, so that it is
// not lost when another process takes the record over in between.
func (p *Pool) settleExpired(now time.Time) {
	for _, e := range p.pending {
		if e.until.After(now) {
			continue
		}
		if _, dead := p.dead[e.uid]; dead || p.byClaim[e.claim] != nil {
			e.done = true
			p.settleAndWake(e)
		}
	}
}

// settlePending drops a pending allocation when nothing can come of it that is
// not known.
func (p *Pool) settlePending(e *pendingEntry) bool {
	if !e.done || e.shared && e.until.After(p.now()) {
		return false
	}
	delete(p.pending, e.uid)
	if p.set != nil {
		p.set.Unuse(e.span)
	}
	return true
}

// enqueue puts a claim in line. One that came from another management cluster has
// an address that may be on its way; one that was made here tells nothing.
func (p *Pool) enqueue(t Ticket, copied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, served := p.pending[t.UID]; served {
		return
	}
	if e, ok := p.byClaim[t.NamespacedName]; ok && e.claimUID == t.UID {
		return
	}
	if _, known := p.queue.tickets[t.UID]; !known {
		p.queue.add(t)
		if copied {
			p.arrived = p.now()
		}
	}
}

func (p *Pool) dequeue(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leave(uid)
}

// leave takes a claim out of line and lets those behind it move up.
func (p *Pool) leave(uid types.UID) {
	if p.queue.remove(uid) {
		p.wakeNext()
	}
}

// Park takes a claim out of line that cannot be served for reasons of its own.
func (p *Pool) Park(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.queue.tickets[uid]; ok && !e.parked {
		p.queue.park(e)
		p.wakeNext()
	}
}

func (p *Pool) wakeNext() {
	if p.set != nil {
		p.call(p.queue.wake(p.set.Free()))
	}
}

// wakeFor wakes those in line, and those who wait for just this address or prefix.
func (p *Pool) wakeFor(span alloc.Range) {
	p.wakeNext()
	if p.plan != nil && p.queue.wanting > 0 {
		p.call(p.queue.wakeIf(func(e *entry) bool { return e.waiting && e.want && span.Overlaps(p.block(e.exact)) }))
	}
}

func (p *Pool) wakeAll() {
	p.call(p.queue.wakeIf(func(e *entry) bool { return e.waiting }))
}

func (p *Pool) call(claims []types.NamespacedName) {
	for _, c := range claims {
		p.reg.opts.WakeClaim(c)
	}
}
