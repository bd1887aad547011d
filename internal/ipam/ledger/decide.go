package ledger

import (
	"fmt"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
	"capstan.dev/capstan/internal/selection"
)

// LongestArrival is how long what came from another management cluster waits for
// the rest, where something else than its coming may keep it waiting.
const LongestArrival = 10 * time.Minute

// Outcome says what became of a request for an address.
type Outcome int

const (
	// Granted means that the claim has the address of the result.
	Granted Outcome = iota
	// NotReady means that the pool cannot serve claims now.
	NotReady
	// Exhausted means that no address is free for this claim. It waits until one is released.
	Exhausted
	// Failed means that the claim cannot get the address that it asks for. It waits until
	// that may have changed.
	Failed
)

// Request asks for an address for a claim.
type Request struct {
	Ticket
	// Ask is the address that the claim asks for, or empty.
	Ask string
	// Copied: the claim came from another management cluster, so its address
	// may be on its way.
	Copied bool
	// Out: the claim has its address already, or had it until just now, so
	// that it does not matter whether the pool still serves its namespace.
	Out bool
	// NamespaceLabels are the labels of the claim's namespace.
	NamespaceLabels map[string]string
}

// Result is the answer to a Request.
type Result struct {
	Outcome
	Message string
	// Address, Prefix and Gateway are what the IPAddress is to say.
	Address string
	Prefix  int32
	Gateway string
	// Before is until when the IPAddress may be created; later, ask again.
	Before time.Time
	// RetryAfter is set when only time can change the answer.
	RetryAfter time.Duration
}

// decide answers a request from what is known. Only what it marks as pending
// has to be written before the answer is given away.
func (p *Pool) decide(r *Request) (res Result, wrote bool) {
	if e, ok := p.pending[r.UID]; ok && p.set != nil {
		return p.decidePending(r, e)
	}
	line := p.queue.add(r.Ticket)
	p.queue.unpark(line)
	if res, stop := p.notReady(r); stop {
		return p.wait(line, res), false
	}
	if !r.Out && !admits(p.doc.PoolAllowedNamespaces(), r.Namespace, r.NamespaceLabels) {
		p.park(line)
		return p.wait(line, Result{Outcome: Failed, Message: fmt.Sprintf(
			"%s does not serve claims of namespace %s: name another pool, or have spec.allowedNamespaces of this one allow it", p.key, r.Namespace)}), false
	}
	if e, ok := p.byClaim[r.NamespacedName]; ok {
		return p.decideExisting(r, line, e)
	}
	if hold, after := p.arriving(r); hold {
		p.park(line)
		return p.wait(line, Result{Outcome: NotReady, RetryAfter: after,
			Message: fmt.Sprintf("%s has come from another management cluster: waiting for the addresses that belong to it to arrive", p.key)}), false
	}
	exact, want, err := p.exact(r)
	if err != nil {
		p.park(line)
		return p.wait(line, Result{Outcome: Failed, Message: err.Error()}), false
	}
	if want {
		return p.decideExact(r, line, exact)
	}
	return p.decideAny(r, line)
}

// decidePending answers for a claim that an address is chosen for already.
func (p *Pool) decidePending(r *Request, e *pendingEntry) (Result, bool) {
	has, exists := p.byClaim[r.NamespacedName]
	switch {
	case !exists:
		return p.again(r, e, p.grant(e.span.First))
	case has.counted && has.span == e.span:
		return p.again(r, e, has.result())
	default:
		return Result{Outcome: Failed, RetryAfter: max(e.until.Sub(p.now()), time.Second), Message: fmt.Sprintf(
			"an IPAddress of the claim's name was created with %s while %s was being allocated to it: waiting for the deadline of that request",
			has.spec.Address, p.plan.Addr(e.span.First))}, false
	}
}

// again gives an address that is chosen already. If that was some time ago, or by
// another process, it has to go on record again that an IPAddress may be created
// now.
func (p *Pool) again(r *Request, e *pendingEntry, res Result) (Result, bool) {
	p.leave(r.UID)
	now := p.now()
	if !e.marked.IsZero() && now.Sub(e.marked) < p.reg.opts.grantLife() {
		return res, false
	}
	e.marked, e.until, e.done = now, now.Add(p.reg.opts.Quarantine), false
	return res, true
}

func (p *Pool) notReady(r *Request) (Result, bool) {
	switch {
	case p.planErr != nil:
		return Result{Outcome: NotReady, Message: fmt.Sprintf("%s has an invalid spec: %v", p.key, p.planErr.ToAggregate())}, true
	case !p.doc.GetDeletionTimestamp().IsZero():
		return Result{Outcome: NotReady, Message: fmt.Sprintf("%s is being deleted: use another pool", p.key)}, true
	case p.last[r.UID].moved:
		return Result{Outcome: NotReady, Message: "clusterctl is moving this claim to another management cluster"}, true
	}
	if why := p.unjudged(); why != "" {
		return Result{Outcome: NotReady, Message: fmt.Sprintf("%s %s", p.key, why)}, true
	}
	return Result{}, false
}

// unjudged returns the reason why the pool may not hand out anything as far as other pools are
// concerned, or nothing. A spec that has not been compared with theirs may overlap
// one that refuses that.
func (p *Pool) unjudged() string {
	c := apimeta.FindStatusCondition(p.doc.GetConditions(), ipamv1.NotOverlappingCondition)
	switch {
	case c == nil, c.ObservedGeneration < p.doc.GetGeneration():
		return "is not ready yet: it is being compared with other pools"
	case c.Status == metav1.ConditionFalse && c.Reason == ipamv1.OverlapRefusedReason:
		return "overlaps another pool, which is refused: see its NotOverlapping condition"
	}
	return ""
}

// admits reports whether a pool serves claims of a namespace (row ALL-18). An invalid
// selector admits nothing.
func admits(allowed *ipamv1.AllowedNamespaces, namespace string, namespaceLabels map[string]string) bool {
	return allowed == nil || selection.Namespace(allowed.Names, allowed.Selector, namespace, namespaceLabels)
}

func (p *Pool) wait(line *entry, res Result) Result {
	if !line.waiting {
		p.queue.setWaiting(line, true)
		p.reg.opts.PoolChanged(p.key)
	}
	return res
}

// park takes a claim out of line that would hold up those behind it.
func (p *Pool) park(line *entry) {
	p.queue.park(line)
	p.wakeNext()
}

func (p *Pool) grant(a alloc.U128) Result {
	place := p.plan.Place(a)
	return Result{Address: p.plan.Addr(a).String(), Prefix: place.Prefix, Gateway: place.Gateway}
}

// decideExisting takes over an IPAddress that was made beforehand, or that a
// process made which died before it said so. That goes through the record too,
// so that nobody else is given the address meanwhile.
func (p *Pool) decideExisting(r *Request, line *entry, e *addressEntry) (Result, bool) {
	if why := p.unfit(r, e); why != "" {
		p.park(line)
		p.queue.setWant(line, true, e.span.First)
		return p.wait(line, Result{Outcome: Failed, Message: "the IPAddress of the claim's name has " + why}), false
	}
	p.mark(r, e.span)
	return e.result(), true
}

// unfit returns the reason why an IPAddress that was made beforehand cannot be taken over, or
// nothing.
func (p *Pool) unfit(r *Request, e *addressEntry) string {
	switch {
	case !e.counted:
		return fmt.Sprintf("%q, which is no address of the family of %s: delete it", e.spec.Address, p.key)
	case !p.plan.IsBlock(e.span): // two of these could have addresses in common without being the same
		return fmt.Sprintf("%s, which is not one prefix of the length %d that %s hands out: delete it, or create it again with that prefix",
			spell(e), p.plan.Place(e.span.First).Prefix, p.key)
	case p.set.InUse(e.span.First) > 1:
		return fmt.Sprintf("%s, which %s has too: delete one of them", e.spec.Address, p.holder(e.span, r.NamespacedName))
	}
	return ""
}

// result is what an IPAddress says.
func (e *addressEntry) result() Result {
	return Result{Address: e.spec.Address, Prefix: ptr.Deref(e.spec.Prefix, 0), Gateway: e.spec.Gateway}
}

// spell writes what an IPAddress has.
func spell(e *addressEntry) string {
	if e.spec.Prefix == nil {
		return e.spec.Address + " without a prefix"
	}
	return fmt.Sprintf("%s/%d", e.spec.Address, *e.spec.Prefix)
}

// arriving reports whether new addresses must wait because older ones may still
// arrive from another management cluster.
func (p *Pool) arriving(r *Request) (bool, time.Duration) {
	now := p.now()
	left := p.reg.opts.MoveSettle - now.Sub(p.arrived)
	if Copied(p.doc) {
		return true, max(left, time.Second)
	}
	// The pool may have been here before the claim, and be busy for ever.
	left = min(left, LongestArrival-now.Sub(r.Created))
	return r.Copied && left > 0, left
}

// exact returns the one address that a claim is to get, if there is one.
func (p *Pool) exact(r *Request) (alloc.U128, bool, error) {
	kept, reserved := p.plan.Reservation(r.Namespace, r.Name)
	if r.Ask == "" {
		return kept, reserved, nil
	}
	asked, err := p.plan.Ask(r.Ask)
	if err != nil {
		return asked, false, fmt.Errorf("annotation %s: %w", ipamv1.AddressAnnotation, err)
	}
	if reserved && asked != kept {
		return asked, false, fmt.Errorf("annotation %s asks for %s, but %s reserves %s for this claim: remove one of them",
			ipamv1.AddressAnnotation, r.Ask, p.key, p.plan.Addr(kept))
	}
	return asked, true, nil
}

func (p *Pool) decideExact(r *Request, line *entry, a alloc.U128) (Result, bool) {
	if res, taken := p.exactTaken(r, a); taken {
		p.park(line)
		p.queue.setWant(line, true, a)
		return p.wait(line, res), false
	}
	p.mark(r, p.block(a))
	return p.grant(a), true
}

func (p *Pool) exactTaken(r *Request, a alloc.U128) (Result, bool) {
	addr := p.plan.Addr(a)
	if res, ok := p.plan.ReservedFor(a); ok && (res.Claim != r.Name || res.Namespace != "" && res.Namespace != r.Namespace) {
		whom := fmt.Sprintf("claim %q", res.Claim)
		if res.Namespace != "" && res.Namespace != r.Namespace {
			whom = "another namespace"
		}
		return Result{Outcome: Failed, Message: fmt.Sprintf("%s of %s is reserved for %s: ask for another address", addr, p.key, whom)}, true
	}
	if p.plan.Draining(a) {
		return Result{Outcome: Failed, Message: fmt.Sprintf("%s of %s is in a subnet that is being drained: ask for another address", addr, p.key)}, true
	}
	if p.set.InUse(a) > 0 {
		return Result{Outcome: Failed, Message: fmt.Sprintf("%s of %s is in use by %s: waiting until it is released", addr, p.key, p.holder(p.block(a), r.NamespacedName))}, true
	}
	if until, rests := p.set.RestsUntil(a); rests {
		return Result{Outcome: Failed, Message: fmt.Sprintf("%s of %s rests until %s", addr, p.key, until.UTC().Format(time.RFC3339))}, true
	}
	return Result{}, false
}

// decideAny serves first come, first served: a claim gets an address only when
// there is one for everybody before it too.
func (p *Pool) decideAny(r *Request, line *entry) (Result, bool) {
	if !p.queue.turn(line, p.set.Free()) {
		return p.wait(line, Result{Outcome: Exhausted, Message: p.exhaustedMessage()}), false
	}
	if before, ok := p.last[r.UID]; ok && p.plan.IsBlock(before.span) && p.set.IsFree(before.span.First) {
		p.mark(r, before.span)
		return p.grant(before.span.First), true
	}
	a, ok := p.set.Pick()
	if !ok {
		return p.wait(line, Result{Outcome: Exhausted, Message: p.exhaustedMessage()}), false
	}
	p.set.SetCursor(a)
	p.mark(r, p.block(a))
	return p.grant(a), true
}

func (p *Pool) exhaustedMessage() string {
	return fmt.Sprintf("no address of %s is free: release one or add a range to the pool; this claim will then be served in its turn", p.key)
}

func (p *Pool) block(a alloc.U128) alloc.Range {
	return alloc.Range{First: a, Last: a.Add(p.plan.Block().Sub(alloc.One))}
}

// mark chooses an address for a claim.
func (p *Pool) mark(r *Request, span alloc.Range) {
	now := p.now()
	p.pending[r.UID] = &pendingEntry{uid: r.UID, claim: r.NamespacedName, span: span, marked: now, until: now.Add(p.reg.opts.Quarantine)}
	p.set.Use(span)
	p.leave(r.UID)
}

// unmark undoes mark when the record could not be written. What was on record
// before stays so.
func (p *Pool) unmark(r *Request, known bool) {
	if e, ok := p.pending[r.UID]; ok {
		if known {
			e.marked = time.Time{}
			return
		}
		delete(p.pending, r.UID)
		if p.set != nil {
			p.set.Unuse(e.span)
		}
		p.queue.add(r.Ticket)
	}
}

// holder names the claim that has an address to another claim. It is for messages only: it looks at everything.
func (p *Pool) holder(span alloc.Range, to types.NamespacedName) string {
	for _, e := range p.addresses {
		if e.counted && e.span.Overlaps(span) && e.claim != to {
			return named(e.claim, to)
		}
	}
	for _, e := range p.pending {
		if e.span.Overlaps(span) && e.claim != to {
			return named(e.claim, to)
		}
	}
	return "another claim"
}

// named is how a claim is called in a message to another one. The names in a namespace are not for other namespaces.
func named(claim, to types.NamespacedName) string {
	if claim.Namespace != to.Namespace {
		return "a claim of another namespace"
	}
	return "claim " + claim.String()
}
