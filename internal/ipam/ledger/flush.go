package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// ErrPoolGone means that the pool object does not exist.
var ErrPoolGone = errors.New("the pool does not exist")

// writeTimeout bounds a write of the record.
const writeTimeout = 15 * time.Second

// conflicts is how often a batch is tried before its claims back off.
const conflicts = 10

// request is one thing that wants to be part of the next write.
type request struct {
	// apply changes the state and reports whether that has to be written. It is
	// called again, after undo, when the write fails.
	apply func(p *Pool) bool
	undo  func(p *Pool)
	err   error
	done  chan struct{}
	// claims is how many claims it serves, for metrics.
	claims int
}

var writes atomic.Uint64

// Allocate chooses an address for a claim. When it returns Granted, the address
// is in the pool's record and nobody else will be given it.
func (p *Pool) Allocate(ctx context.Context, r Request) (Result, error) {
	var res Result
	var known, wrote bool
	req := &request{
		undo: func(p *Pool) {
			if wrote {
				p.unmark(&r, known)
			}
		},
	}
	req.apply = func(p *Pool) bool {
		_, known = p.pending[r.UID]
		req.claims = 1
		if _, has := p.byClaim[r.NamespacedName]; has || known { // its address is not chosen now
			req.claims = 0
		}
		res, wrote = p.decide(&r)
		if e, ok := p.pending[r.UID]; ok && res.Outcome == Granted {
			res.Before = e.marked.Add(p.reg.opts.grantLife())
		}
		return wrote
	}
	err := p.submit(ctx, req)
	return res, err
}

// Rest keeps what an IPAddress has from new claims for the pool's resting
// period. It does nothing when the pool has none, or could not hand just that out.
func (p *Pool) Rest(ctx context.Context, ip capiipamv1.IPAddressSpec) error {
	p.mu.Lock()
	needed := p.doc != nil && p.doc.PoolSpec().RestSeconds != nil && *p.doc.PoolSpec().RestSeconds > 0
	unknown := p.doc == nil
	p.mu.Unlock()
	if !needed && !unknown {
		return nil
	}
	var a alloc.U128
	var rested bool
	err := p.submit(ctx, &request{
		apply: func(p *Pool) bool {
			rested = false
			if p.plan == nil || p.plan.Rest == 0 {
				return false
			}
			span, ok := p.plan.Span(ip.Address, ip.Prefix)
			if !ok || !p.plan.IsBlock(span) || !p.plan.Contains(span) {
				return false
			}
			a = span.First
			if _, already := p.set.RestsUntil(a); already {
				return false
			}
			until := restUntil(p.now(), p.plan.Rest)
			p.set.Rest(a, until)
			if p.nextWake.IsZero() || until.Before(p.nextWake) {
				p.nextWake = until
			}
			rested = true
			return true
		},
		undo: func(p *Pool) {
			if rested && p.set != nil {
				p.set.Unrest(a)
			}
		},
	})
	if errors.Is(err, ErrPoolGone) {
		return nil
	}
	return err
}

// Update calls change with the pool's object, whose counts are up to date, and
// writes its status if change says that it must be.
func (p *Pool) Update(ctx context.Context, change func(ipamv1.Pool, View) bool) error {
	return p.submit(ctx, &request{
		apply: func(p *Pool) bool {
			before := p.unjudged()
			must := change(p.doc, p.view())
			if p.unjudged() != before {
				p.wakeAll()
			}
			return must
		},
		undo: func(*Pool) {},
	})
}

// submit hands a request to the pool's writer and waits for it. Requests that
// come while a write is under way share the next one.
func (p *Pool) submit(ctx context.Context, r *request) error {
	r.done = make(chan struct{})
	p.mu.Lock()
	p.requests = append(p.requests, r)
	if !p.flushing {
		p.flushing = true
		go p.flush(context.WithoutCancel(ctx))
	}
	p.mu.Unlock()
	// The write itself is bounded, and giving up on it would leave an address
	// chosen that nobody wants.
	<-r.done
	return r.err
}

func (p *Pool) flush(ctx context.Context) {
	for {
		p.mu.Lock()
		batch := p.requests
		if len(batch) == 0 {
			p.flushing = false
			p.mu.Unlock()
			return
		}
		n := min(len(batch), p.reg.opts.MaxBatch)
		p.requests = batch[n:]
		p.mu.Unlock()

		err := p.survive(ctx, batch[:n])
		for _, r := range batch[:n] {
			r.err = err
			close(r.done)
		}
	}
}

// survive processes a batch. A pool's spec is a tenant's, and all pools share this process: should something
// panic, it is the error of the batch alone. What was known of the pool may be half changed then, so that it is
// taken over from the record again.
func (p *Pool) survive(ctx context.Context, batch []*request) (err error) {
	defer func() {
		if bug := recover(); bug != nil {
			err = fmt.Errorf("%s cannot be processed because of an error in Capstan: %v: report it with the pool's spec, and use another pool meanwhile", p.key, bug)
			log.FromContext(ctx).Error(err, "Recovered", "stack", string(debug.Stack()))
			p.mu.Lock()
			p.forgetDoc()
			p.mu.Unlock()
		}
	}()
	return p.process(ctx, batch)
}

// process applies a batch and writes the record, again and again until no
// other write has come between.
func (p *Pool) process(ctx context.Context, batch []*request) error {
	for attempt := range conflicts {
		if err := p.hold(ctx); err != nil {
			return err
		}
		doc, claims, held := p.apply(batch)
		if !held {
			continue
		}
		if doc == nil {
			return nil
		}
		err := p.blockMove(ctx, doc)
		if err == nil {
			err = p.put(ctx, doc)
		}
		p.written(doc, batch, err)
		if err == nil {
			p.reg.opts.Observe("write", p.key, claims)
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return fmt.Errorf("writing the record of %s: %w", p.key, err)
		}
		p.reg.opts.Observe("conflict", p.key, 0)
		giveWay(attempt)
	}
	return fmt.Errorf("writing the record of %s: other writes came between %d times", p.key, conflicts)
}

// written makes doc the record when it was written, and undoes the batch when it was not.
func (p *Pool) written(doc ipamv1.Pool, batch []*request, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.doc = doc
		p.write = doc.PoolStatus().Allocator.Write
		return
	}
	for _, r := range slices.Backward(batch) {
		r.undo(p)
	}
	p.held = false
}

// giveWay waits for a random time that grows with the attempts. Two processes
// that both want a record would otherwise take it from each other before
// either has used it.
func giveWay(attempt int) {
	time.Sleep(rand.N(20 * time.Millisecond << min(attempt, 6))) // dice, not secrecy.
}

// apply applies a batch, if the record is still held, and returns the object to write, or nil.
func (p *Pool) apply(batch []*request) (doc ipamv1.Pool, claims int, held bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.held || p.refresh {
		return nil, 0, false
	}
	p.tick()
	must := false
	for _, r := range batch {
		if r.apply(p) {
			must = true
			claims += r.claims
		}
	}
	if !must {
		return nil, 0, true
	}
	doc = p.doc.DeepCopyObject().(ipamv1.Pool) //nolint:forcetypeassert // a copy has the type of the original.
	p.fill(doc)
	return doc, claims, true
}

// fill writes the record and the counts into a pool's status.
func (p *Pool) fill(doc ipamv1.Pool) {
	status := doc.PoolStatus()
	status.Addresses = p.view().Counts()
	if status.Allocator == nil {
		status.Allocator = &ipamv1.AllocatorStatus{}
	}
	status.Allocator.Holder = p.reg.holder
	status.Allocator.Write = strconv.FormatUint(writes.Add(1), 10)
	if p.set == nil { // an invalid spec: what others chose stays on record
		return
	}
	if c, ok := p.set.Cursor(); ok && p.plan.Order == ipamv1.RoundRobinOrder {
		status.Allocator.Cursor = p.plan.Addr(c).String()
	}
	status.Allocator.Pending = encodePending(p.plan, slices.Collect(maps.Values(p.pending)))
	status.Allocator.Resting = encodeResting(p.set)
}

func (p *Pool) put(ctx context.Context, doc ipamv1.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return p.reg.client.Status().Update(ctx, doc)
}

// hold makes sure that the record is ours and that all addresses in use are
// known.
func (p *Pool) hold(ctx context.Context) error {
	p.mu.Lock()
	ready := p.held && !p.refresh
	p.mu.Unlock()
	if ready {
		return nil
	}
	for attempt := range conflicts {
		doc, err := p.read(ctx)
		if err != nil {
			return err
		}
		if p.stillOurs(doc) {
			return nil
		}
		switch err := p.takeOver(ctx, doc); {
		case err == nil:
			return nil
		case !apierrors.IsConflict(err):
			return fmt.Errorf("taking over the record of %s: %w", p.key, err)
		}
		p.reg.opts.Observe("conflict", p.key, 0)
		giveWay(attempt)
	}
	return fmt.Errorf("taking over the record of %s: other writes came between %d times", p.key, conflicts)
}

func (p *Pool) read(ctx context.Context) (ipamv1.Pool, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	doc := NewObject(p.key.Kind)
	err := p.reg.live.Get(ctx, client.ObjectKey{Namespace: p.key.Namespace, Name: p.key.Name}, doc)
	if apierrors.IsNotFound(err) {
		p.mu.Lock()
		p.forgetDoc()
		p.mu.Unlock()
		return nil, fmt.Errorf("%s: %w", p.key, ErrPoolGone)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", p.key, err)
	}
	return doc, nil
}

// NewObject returns an empty pool of a kind.
func NewObject(kind string) ipamv1.Pool {
	if kind == ipamv1.GlobalCapstanIPPoolKind {
		return &ipamv1.GlobalCapstanIPPool{}
	}
	return &ipamv1.CapstanIPPool{}
}

// stillOurs reports whether the record is as we wrote it last, so that only other
// parts of the object have changed.
func (p *Pool) stillOurs(doc ipamv1.Pool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	record := doc.PoolStatus().Allocator
	if p.doc == nil || p.doc.GetUID() != doc.GetUID() || record == nil ||
		p.write == "" || record.Holder != p.reg.holder || record.Write != p.write {
		return false
	}
	p.adopt(doc, false)
	p.held = true
	return true
}

// takeOver writes our name into the record, and only then reads all addresses:
// whatever its last holder made known before is there to be read, and it can
// add nothing after. What is read is followed from before on, or its going
// would never be seen.
func (p *Pool) takeOver(ctx context.Context, doc ipamv1.Pool) error {
	if p.key.Namespace == "" {
		if err := p.reg.opts.FollowAll(ctx); err != nil {
			return err
		}
	}
	status := doc.PoolStatus()
	if status.Allocator == nil {
		status.Allocator = &ipamv1.AllocatorStatus{Resting: moved(doc, p.now())}
	}
	status.Allocator.Holder = p.reg.holder
	status.Allocator.Write = strconv.FormatUint(writes.Add(1), 10)
	if err := p.put(ctx, doc); err != nil {
		return err
	}
	lister := p.reg.global
	if p.key.Namespace != "" {
		lister = p.reg.namespaced
	}
	p.mu.Lock()
	known := slices.Collect(maps.Keys(p.addresses))
	p.mu.Unlock()
	items, err := lister.list(ctx, p.key)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.compare(known, items)
	p.adopt(doc, true)
	p.held = true
	p.write = status.Allocator.Write
	p.reg.opts.Observe("takeover", p.key, 0)
	return nil
}

// compare brings the index up to date with a read of all addresses. What was known
// before that began and is not in it has gone; what was learned meanwhile may be
// newer than it.
func (p *Pool) compare(known []types.UID, items []*capiipamv1.IPAddress) {
	listed := make(map[types.UID]bool, len(items))
	for _, ip := range items {
		listed[ip.UID] = true
		p.learn(ip)
	}
	for _, uid := range known {
		if !listed[uid] {
			p.unlearn(uid, false)
		}
	}
}

// tick does what only the passing of time asks for.
func (p *Pool) tick() {
	now := p.now()
	p.settleExpired(now)
	if p.set != nil && !p.nextWake.IsZero() && !now.Before(p.nextWake) {
		var woken int
		if woken, p.nextWake = p.set.Wake(now); woken > 0 {
			p.wakeNext()
			p.call(p.queue.wakeIf(func(e *entry) bool { return e.waiting && e.want }))
			p.reg.opts.PoolChanged(p.key)
		}
	}
}

// Sweep settles the pending allocations whose claims nobody works on any more,
// and says when to call it again. A zero duration means that nothing waits for time. It takes the record over first:
// what a process has left behind that died is settled at once.
func (p *Pool) Sweep(ctx context.Context, exists func(context.Context, types.NamespacedName, types.UID) (bool, error)) (time.Duration, error) {
	if err := p.submit(ctx, &request{apply: func(*Pool) bool { return false }, undo: func(*Pool) {}}); err != nil {
		return 0, err
	}
	p.mu.Lock()
	now := p.now()
	p.tick()
	var ask []*pendingEntry
	next := p.nextWake
	for _, e := range p.pending {
		switch {
		case !e.until.After(now):
			ask = append(ask, e)
		case e.shared && (next.IsZero() || e.until.Before(next)):
			next = e.until
		}
	}
	p.mu.Unlock()
	for _, e := range ask {
		alive, err := exists(ctx, e.claim, e.uid)
		if err != nil {
			return 0, err
		}
		if !alive {
			p.mu.Lock()
			p.dead[e.uid] = now
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	p.settleExpired(now)
	p.mu.Unlock()
	if next.IsZero() {
		return 0, nil
	}
	return max(next.Sub(now), 100*time.Millisecond), nil
}

func (p *Pool) settleAndWake(e *pendingEntry) {
	if p.pending[e.uid] == e && p.settlePending(e) {
		p.wakeFor(e.span)
	}
}

// prune forgets what happened long ago and reports whether nothing is left to know.
func (p *Pool) prune(now time.Time) (empty bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetOld(now)
	return p.doc == nil && !p.flushing && len(p.queue.tickets) == 0 &&
		len(p.addresses)+len(p.pending)+len(p.gone)+len(p.dead)+len(p.last) == 0
}

func (p *Pool) forgetOld(now time.Time) {
	for uid, at := range p.gone {
		if now.Sub(at) > remember {
			delete(p.gone, uid)
		}
	}
	for uid, at := range p.dead {
		if now.Sub(at) > remember {
			delete(p.dead, uid)
		}
	}
	for uid, l := range p.last {
		if now.Sub(l.at) > remember {
			delete(p.last, uid)
		}
	}
}
