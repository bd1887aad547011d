package ledger

import (
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// space contains the addresses of a pool's spec and the use of each address.
type space struct {
	// plan is the compiled spec. It is nil if the spec is invalid.
	plan *alloc.Plan
	// set contains the used and the resting addresses. It is nil if the spec is invalid.
	set     *alloc.Set
	invalid field.ErrorList
	// aliens is the number of IPAddresses that do not belong to the pool's family.
	aliens int
	// nextWake is the time at which the next resting address becomes free.
	nextWake time.Time
}

// compile replaces the plan. It reports whether the address family or the size of the address space changed.
func (s *space) compile(spec *ipamv1.CapstanIPPoolSpec) (changed bool) {
	before := s.plan
	s.plan, s.invalid = alloc.Compile(spec, field.NewPath("spec"))
	return s.plan != nil && before != nil && (s.plan.V6 != before.V6 || s.plan.Bits != before.Bits)
}

// block returns the addresses that a claim gets together with its first address.
func (s *space) block(first alloc.U128) alloc.Range {
	return alloc.Range{First: first, Last: first.Add(s.plan.Block().Sub(alloc.One))}
}

// grant returns the Result for an address.
func (s *space) grant(a alloc.U128) Result {
	place := s.plan.Place(a)
	return Result{Outcome: Granted, Address: s.plan.Addr(a).String(), Prefix: place.Prefix, Gateway: place.Gateway}
}

// count marks the addresses of an IPAddress as used.
func (s *space) count(e *addressEntry) {
	if s.plan == nil || e.counted {
		return
	}
	span, ok := s.plan.Span(e.spec.Address, e.spec.Prefix)
	if !ok {
		if !e.alien {
			e.alien = true
			s.aliens++
		}
		return
	}
	e.span, e.counted = span, true
	s.set.Use(span)
}

// uncount reverts count.
func (s *space) uncount(e *addressEntry) {
	if e.counted {
		s.unuse(e.span)
	}
	if e.alien {
		s.aliens--
	}
	e.counted, e.alien = false, false
}

// unuse marks addresses as no longer used. It does nothing if the spec is invalid.
func (s *space) unuse(span alloc.Range) {
	if s.set != nil {
		s.set.Unuse(span)
	}
}

// rest starts the resting period of an IPAddress. It reports false if the address does not rest, or rests already.
func (s *space) rest(ip capiipamv1.IPAddressSpec, now time.Time) (first alloc.U128, rested bool) {
	first, ok := s.restable(ip)
	if !ok {
		return first, false
	}
	if _, already := s.set.RestsUntil(first); already {
		return first, false
	}
	s.restFrom(first, now)
	return first, true
}

// restAgain starts the resting period of an IPAddress again, also if the address rests already.
func (s *space) restAgain(ip capiipamv1.IPAddressSpec, now time.Time) {
	if first, ok := s.restable(ip); ok {
		s.restFrom(first, now)
	}
}

// restable returns the first address of an IPAddress. It reports false if the address does not rest.
func (s *space) restable(ip capiipamv1.IPAddressSpec) (first alloc.U128, ok bool) {
	if s.plan == nil || s.plan.Rest == 0 {
		return first, false
	}
	span, ok := s.plan.Span(ip.Address, ip.Prefix)
	return span.First, ok && s.plan.IsBlock(span) && s.plan.Contains(span)
}

func (s *space) restFrom(first alloc.U128, now time.Time) {
	until := restUntil(now, s.plan.Rest)
	s.set.Rest(first, until)
	if s.nextWake.IsZero() || until.Before(s.nextWake) {
		s.nextWake = until
	}
}

// unrest reverts rest.
func (s *space) unrest(first alloc.U128) {
	if s.set != nil {
		s.set.Unrest(first)
	}
}

// endRests frees the addresses whose resting period is over. It reports whether there are any.
func (s *space) endRests(now time.Time) bool {
	if s.set == nil || s.nextWake.IsZero() || now.Before(s.nextWake) {
		return false
	}
	var ended int
	ended, s.nextWake = s.set.Wake(now)
	return ended > 0
}

// keepResting copies the resting addresses and the cursor from the set of the previous spec.
func (s *space) keepResting(old *alloc.Set) {
	old.EachResting(s.set.Rest)
	if c, ok := old.Cursor(); ok {
		s.set.SetCursor(c)
	}
}

// readResting reads the resting addresses and the cursor from the record.
func (s *space) readResting(record *ipamv1.AllocatorStatus) {
	if record == nil {
		return
	}
	for _, r := range record.Resting {
		addresses, err := decodeOffsets(r.Offsets)
		if err != nil {
			// An address whose rest is lost is free earlier. It is not allocated twice.
			continue
		}
		for _, a := range addresses {
			s.set.Rest(a, r.Until.Time)
		}
	}
	if a, err := alloc.ParseAddr(record.Cursor); err == nil && a.Is6() == s.plan.V6 {
		s.set.SetCursor(alloc.FromAddr(a))
	}
}
