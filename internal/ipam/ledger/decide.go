package ledger

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
	"capstan.dev/capstan/internal/selection"
)

// LongestArrival is the longest time that objects from another management cluster wait for the rest of a move, if other
// causes can delay them as well.
const LongestArrival = 10 * time.Minute

// mostPending bounds the pending allocations of a pool, because the record contains them. The reconciler has few at a
// time, unless the API server fails to create the IPAddresses.
const mostPending = 2000

// notReadyRetry is the delay of a claim's next request if no event follows the end of its wait.
const notReadyRetry = 10 * time.Second

// Outcome is the result of a request for an address.
type Outcome int

const (
	// Granted means that the claim has the address of the result.
	Granted Outcome = iota
	// NotReady means that the pool cannot serve claims now.
	NotReady
	// Exhausted means that no address is free for this claim. It waits until one is released.
	Exhausted
	// Failed means that the claim cannot get the requested address. It waits until that may have changed.
	Failed
)

// Request is a request for an address of a claim.
type Request struct {
	Ticket
	// Ask is the requested address, or empty.
	Ask string
	// Copied is true if the claim came from another management cluster. Its IPAddress may still arrive.
	Copied bool
	// Out is true if the claim has its address already. The pool then serves the claim even if it does not serve the
	// namespace any more, or overlaps another pool.
	Out bool
	// NamespaceLabels are the labels of the claim's namespace.
	NamespaceLabels map[string]string
}

// Result is the answer to a Request.
type Result struct {
	Outcome
	Message string
	// Address, Prefix and Gateway are the fields of the new IPAddress.
	Address string
	Prefix  int32
	Gateway string
	// Before is the time until which the IPAddress may be created. After it, send the request again.
	Before time.Time
	// RetryAfter is set when the answer can change without an event.
	RetryAfter time.Duration
}

// decision is the answer to one request. It uses only the state in memory.
type decision struct {
	*state

	request *Request
	// line is the claim's entry in the queue.
	line *entry
}

// decide answers a request. It reports whether the record must be written before the answer is returned: only new
// pending allocations must.
func (s *state) decide(r *Request) (res Result, write bool) {
	d := decision{state: s, request: r}
	if _, dead := s.dead[r.UID]; dead { // The reconcile began before the deletion. Nothing would remove a new place in the queue.
		return Result{Outcome: NotReady, RetryAfter: notReadyRetry, Message: "the claim was deleted"}, false
	}
	if e, ok := s.pending[r.UID]; ok && s.space.set != nil {
		return d.pendingAgain(e)
	}
	d.line = s.queue.add(r.Ticket)
	s.queue.unpark(d.line)
	return d.decide()
}

func (d *decision) decide() (Result, bool) {
	r := d.request
	e, exists := d.addresses.byClaim[r.NamespacedName]
	if why := d.notReady(exists && r.Out); why != "" {
		return d.wait(Result{Outcome: NotReady, Message: why})
	}
	if len(d.pending) >= mostPending {
		return d.wait(Result{Outcome: NotReady, RetryAfter: notReadyRetry, Message: fmt.Sprintf(
			"%s has chosen %d addresses whose IPAddresses do not exist yet: waiting until the API server creates them, see the log of the manager", d.key, len(d.pending))})
	}
	before, removed := d.last[r.UID]
	removed = removed && !before.retracted
	excluded := !admits(d.doc.PoolAllowedNamespaces(), r.Namespace, r.NamespaceLabels)
	if excluded && (exists && !r.Out && e.claimUID != r.UID || !exists && !removed) {
		return d.fail(d.notServed())
	}
	if exists {
		return d.existing(e)
	}
	if hold, after := d.arriving(); hold {
		d.park(d.line)
		return d.wait(Result{Outcome: NotReady, RetryAfter: after,
			Message: fmt.Sprintf("%s has come from another management cluster: waiting for the addresses that belong to it to arrive", d.key)})
	}
	if excluded {
		return d.formerAddress(before.span)
	}
	exact, want, err := d.requested()
	if err != nil {
		return d.fail(err.Error())
	}
	if want {
		return d.exactAddress(exact)
	}
	return d.anyAddress()
}

// wait leaves the claim in the queue.
func (d *decision) wait(res Result) (Result, bool) {
	if !d.line.waiting {
		d.queue.setWaiting(d.line, true)
		d.opts.PoolChanged(d.key)
	}
	return res, false
}

// fail parks the claim, because it cannot get any address now.
func (d *decision) fail(message string) (Result, bool) {
	d.park(d.line)
	return d.wait(Result{Outcome: Failed, Message: message})
}

// failUntilFree parks the claim until an event at one address.
func (d *decision) failUntilFree(a alloc.U128, message string) (Result, bool) {
	d.park(d.line)
	d.queue.setWant(d.line, true, a)
	return d.wait(Result{Outcome: Failed, Message: message})
}

// pendingAgain answers a claim that has a pending allocation.
func (d *decision) pendingAgain(e *pendingEntry) (Result, bool) {
	has, exists := d.addresses.byClaim[d.request.NamespacedName]
	switch {
	case !exists:
		return d.grantAgain(e, d.space.grant(e.span.First))
	case has.counted && has.span == e.span:
		return d.grantAgain(e, has.result())
	default:
		return Result{Outcome: Failed, RetryAfter: max(e.until.Sub(d.now()), time.Second), Message: fmt.Sprintf(
			"an IPAddress of the claim's name was created with %s while %s was being allocated to it: waiting for the deadline of that request",
			has.spec.Address, d.space.plan.Addr(e.span.First))}, false
	}
}

// grantAgain returns a pending allocation. If the allocation is old, or comes from another process, the record must be
// written again before the IPAddress may be created.
func (d *decision) grantAgain(e *pendingEntry, res Result) (Result, bool) {
	d.leave(d.request.UID)
	now := d.now()
	e.done = false
	if !e.marked.IsZero() && now.Sub(e.marked) < d.opts.grantLife() {
		return res, false
	}
	e.marked, e.until = now, now.Add(d.opts.Quarantine)
	return res, true
}

// notReady returns the reason why the pool cannot serve the claim now, or nothing. A claim that has its address keeps it if
// the pool overlaps another one.
func (d *decision) notReady(has bool) string {
	switch {
	case d.space.invalid != nil:
		return fmt.Sprintf("%s has an invalid spec: %v", d.key, d.space.invalid.ToAggregate())
	case !d.doc.GetDeletionTimestamp().IsZero():
		return fmt.Sprintf("%s is being deleted: use another pool", d.key)
	case d.last[d.request.UID].moved:
		return "clusterctl is moving this claim to another management cluster"
	}
	if why := d.overlapBlocks(); why != "" && !has {
		return fmt.Sprintf("%s %s", d.key, why)
	}
	return ""
}

// admits reports whether a pool serves claims of a namespace (row ALL-18). An invalid
// selector admits nothing.
func admits(allowed *ipamv1.AllowedNamespaces, namespace string, namespaceLabels map[string]string) bool {
	return allowed == nil || selection.Namespace(allowed.Names, allowed.Selector, namespace, namespaceLabels)
}

// existing adopts an IPAddress that existed before the claim, or that a process created before it died. The
// adoption is recorded as well, so that no other claim gets the address meanwhile.
func (d *decision) existing(e *addressEntry) (Result, bool) {
	if why := d.unfit(e); why != "" {
		return d.failUntilFree(e.span.First, "the IPAddress of the claim's name has "+why)
	}
	d.allocate(d.request, e.span)
	return e.result(), true
}

// unfit returns the reason why the claim cannot adopt an existing IPAddress, or nothing.
func (d *decision) unfit(e *addressEntry) string {
	plan := d.space.plan
	switch {
	case !e.counted:
		return fmt.Sprintf("%q, which is no address of the family of %s: delete it", e.spec.Address, d.key)
	case !plan.IsBlock(e.span): // Such spans can overlap without being equal, so the check below would miss conflicts.
		return fmt.Sprintf("%s, which is not one prefix of the length %d that %s hands out: delete it, or create it again with that prefix",
			spell(e), plan.Place(e.span.First).Prefix, d.key)
	case d.space.set.InUse(e.span.First) > 1:
		return fmt.Sprintf("%s, which %s has too: delete one of them", e.spec.Address, d.holder(e.span))
	}
	return ""
}

// result returns the address in an IPAddress.
func (e *addressEntry) result() Result {
	return Result{Address: e.spec.Address, Prefix: ptr.Deref(e.spec.Prefix, 0), Gateway: e.spec.Gateway}
}

// spell formats the address of an IPAddress.
func spell(e *addressEntry) string {
	if e.spec.Prefix == nil {
		return e.spec.Address + " without a prefix"
	}
	return fmt.Sprintf("%s/%d", e.spec.Address, *e.spec.Prefix)
}

// arriving reports whether new addresses must wait because older ones may still
// arrive from another management cluster.
func (d *decision) arriving() (bool, time.Duration) {
	now := d.now()
	left := d.opts.MoveSettle - now.Sub(d.arrived)
	if Copied(d.doc) {
		return true, max(left, time.Second)
	}
	// The pool may be older than the claim, and addresses may arrive for ever.
	left = min(left, LongestArrival-now.Sub(d.request.Created))
	return d.request.Copied && left > 0, left
}

// requested returns the address that the claim requests or that the pool reserves for the claim, if there is one.
func (d *decision) requested() (alloc.U128, bool, error) {
	r, plan := d.request, d.space.plan
	kept, reserved := plan.Reservation(r.Namespace, r.Name)
	if r.Ask == "" {
		return kept, reserved, nil
	}
	asked, err := plan.Ask(r.Ask)
	if err != nil {
		return asked, false, fmt.Errorf("annotation %s: %w", ipamv1.AddressAnnotation, err)
	}
	if reserved && asked != kept {
		return asked, false, fmt.Errorf("annotation %s requests %s, but %s reserves %s for this claim: remove one of them",
			ipamv1.AddressAnnotation, r.Ask, d.key, plan.Addr(kept))
	}
	return asked, true, nil
}

// exactAddress allocates one certain address.
func (d *decision) exactAddress(a alloc.U128) (Result, bool) {
	if why := d.unavailable(a); why != "" {
		return d.failUntilFree(a, why)
	}
	d.allocate(d.request, d.space.block(a))
	return d.space.grant(a), true
}

// formerAddress allocates the address of an IPAddress that somebody has removed by force. The pool does not serve the namespace any more,
// so a request of the claim for another address has no effect.
func (d *decision) formerAddress(span alloc.Range) (Result, bool) {
	if plan := d.space.plan; !plan.IsBlock(span) || !plan.Contains(span) {
		return d.fail(fmt.Sprintf("%s has no longer the address that the claim had. %s", d.key, d.notServed()))
	}
	return d.exactAddress(span.First)
}

// notServed explains that the pool does not allow the namespace of the claim.
func (d *decision) notServed() string {
	return fmt.Sprintf("%s does not serve claims of namespace %s: name another pool, or have spec.allowedNamespaces of this one allow it",
		d.key, d.request.Namespace)
}

// unavailable returns the reason why the claim cannot get a certain address, or nothing.
func (d *decision) unavailable(a alloc.U128) string {
	r, plan := d.request, d.space.plan
	addr := plan.Addr(a)
	if res, ok := plan.ReservedFor(a); ok && (res.Claim != r.Name || res.Namespace != "" && res.Namespace != r.Namespace) {
		owner := fmt.Sprintf("claim %q", res.Claim)
		if res.Namespace != "" && res.Namespace != r.Namespace {
			owner = "another namespace"
		}
		return fmt.Sprintf("%s of %s is reserved for %s: ask for another address", addr, d.key, owner)
	}
	if plan.Draining(a) {
		return fmt.Sprintf("%s of %s is in a subnet that is being drained: ask for another address", addr, d.key)
	}
	if d.space.set.InUse(a) > 0 {
		return fmt.Sprintf("%s of %s is in use by %s: waiting until it is released", addr, d.key, d.holder(d.space.block(a)))
	}
	if until, rests := d.space.set.RestsUntil(a); rests {
		return fmt.Sprintf("%s of %s rests until %s", addr, d.key, until.UTC().Format(time.RFC3339))
	}
	return ""
}

// anyAddress allocates a free address. A claim gets one only if there is also one for each earlier claim in the queue. A claim
// gets its previous address again if that address is free.
func (d *decision) anyAddress() (Result, bool) {
	set := d.space.set
	if !d.queue.turn(d.line, set.Free()) {
		return d.exhausted()
	}
	if before, ok := d.last[d.request.UID]; ok && d.space.plan.IsBlock(before.span) && set.IsFree(before.span.First) {
		d.allocate(d.request, before.span)
		return d.space.grant(before.span.First), true
	}
	a, ok := set.Pick()
	if !ok {
		return d.exhausted()
	}
	set.SetCursor(a)
	d.allocate(d.request, d.space.block(a))
	return d.space.grant(a), true
}

func (d *decision) exhausted() (Result, bool) {
	return d.wait(Result{Outcome: Exhausted, Message: fmt.Sprintf(
		"no address of %s is free: release one or add a range to the pool; this claim will then be served in its turn", d.key)})
}

// holder returns the name of another claim that has an address, for messages. It searches all addresses.
func (d *decision) holder(span alloc.Range) string {
	own := d.request.NamespacedName
	for _, e := range d.addresses.byUID {
		if e.counted && e.span.Overlaps(span) && e.claim != own {
			return named(e.claim, own)
		}
	}
	for _, e := range d.pending {
		if e.span.Overlaps(span) && e.claim != own {
			return named(e.claim, own)
		}
	}
	return "another claim"
}

// named returns the name of a claim for a message to another claim. Names are hidden from other namespaces.
func named(claim, to types.NamespacedName) string {
	if claim.Namespace != to.Namespace {
		return "a claim of another namespace"
	}
	return "claim " + claim.String()
}
