// Package alloc decides which address a claim gets. It has no side effects: the ledger passes the spec and the used
// addresses.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package alloc

import (
	"net/netip"
	"slices"
	"sort"
	"time"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Plan is the compiled spec of a pool.
type Plan struct {
	// V6 is the address family.
	V6 bool
	// Bits is the size of an allocation as a power of two: 0 for single addresses.
	Bits uint
	// Pool contains all addresses of the spec: ranges without exclusions and reserved network addresses, in whole
	// blocks.
	Pool Ranges
	// Open contains the addresses for claims without a reservation: Pool without reservations and without drained
	// subnets.
	Open Ranges
	// Order is the order in which addresses of Open are allocated.
	Order ipamv1.AllocationOrder
	// Rest is the resting period of a released address.
	Rest time.Duration

	prefixes  bool
	length    int32 // length of the allocated prefixes
	subnets   []planSubnet
	reserved  map[U128]ipamv1.Reservation
	byClaim   map[claimName]U128
	anyClaims map[string]U128
}

type planSubnet struct {
	Range
	length  int32
	gateway string
	drain   bool
}

type claimName struct{ namespace, name string }

// Placement contains the fields of an IPAddress besides its address.
type Placement struct {
	Prefix  int32
	Gateway string
}

// Block is the number of addresses that one claim gets.
func (p *Plan) Block() U128 { return One.Shl(p.Bits) }

// Total is the number of addresses or prefixes in the pool.
func (p *Plan) Total() U128 { return p.Pool.Blocks(p.Bits) }

// Addr returns the number as an address of the pool's family.
func (p *Plan) Addr(a U128) netip.Addr { return a.Addr(p.V6) }

// Aligned reports whether a block can start at this address.
func (p *Plan) Aligned(a U128) bool { return a.And(p.Block().Sub(One)).IsZero() }

// IsBlock reports whether a range is exactly one allocation.
func (p *Plan) IsBlock(r Range) bool {
	return p.Aligned(r.First) && r.Last.Sub(r.First) == p.Block().Sub(One)
}

// Place returns the prefix and gateway for an address of the pool.
func (p *Plan) Place(a U128) Placement {
	place := Placement{Prefix: p.length}
	if i := p.subnet(a); i >= 0 {
		place.Gateway = p.subnets[i].gateway
		if !p.prefixes {
			place.Prefix = p.subnets[i].length
		}
	}
	return place
}

func (p *Plan) subnet(a U128) int {
	i := sort.Search(len(p.subnets), func(i int) bool { return !p.subnets[i].Last.Less(a) })
	if i < len(p.subnets) && p.subnets[i].Contains(a) {
		return i
	}
	return -1
}

// Draining reports whether the address is in a subnet without new allocations.
func (p *Plan) Draining(a U128) bool {
	i := p.subnet(a)
	return i >= 0 && p.subnets[i].drain
}

// Reservation returns the address that is reserved for a claim.
func (p *Plan) Reservation(namespace, name string) (U128, bool) {
	if a, ok := p.byClaim[claimName{namespace, name}]; ok {
		return a, true
	}
	a, ok := p.anyClaims[name]
	return a, ok
}

// ReservedFor returns the reservation of an address.
func (p *Plan) ReservedFor(a U128) (ipamv1.Reservation, bool) {
	r, ok := p.reserved[a]
	return r, ok
}

// Ask parses the address that a claim requests with its annotation: "10.0.0.7", or in a pool of prefixes also
// "10.0.1.0/28".
func (p *Plan) Ask(s string) (U128, error) {
	addr, err := parseAsked(s)
	if err != nil {
		return U128{}, err
	}
	if err := p.checkAsked(s, addr); err != nil {
		return U128{}, err
	}
	return FromAddr(addr.Addr()), nil
}

// Span returns the addresses of an IPAddress of this pool. It returns false for an address of another family.
func (p *Plan) Span(address string, prefix *int32) (Range, bool) {
	addr, err := netip.ParseAddr(address)
	if err != nil || addr.Is6() != p.V6 {
		return Range{}, false
	}
	first := FromAddr(addr)
	if !p.prefixes || prefix == nil {
		return Range{first, first}, true
	}
	pfx, err := addr.Prefix(int(*prefix))
	if err != nil {
		return Range{first, first}, true
	}
	first = FromAddr(pfx.Addr())
	host := uint(addr.BitLen()) - uint(*prefix)
	if host == 128 {
		return Range{Last: U128{^uint64(0), ^uint64(0)}}, true
	}
	return Range{first, first.Add(One.Shl(host).Sub(One))}, true
}

// Contains reports whether the spec contains all of an address or prefix.
func (p *Plan) Contains(r Range) bool { return p.Pool.ContainsRange(r) }

func (p *Plan) index() {
	slices.SortFunc(p.subnets, func(a, b planSubnet) int { return a.First.Cmp(b.First) })
	taken := make(Ranges, 0, len(p.reserved))
	for a := range p.reserved {
		taken = append(taken, Range{a, a.Add(p.Block().Sub(One))})
	}
	slices.SortFunc(taken, func(a, b Range) int { return a.First.Cmp(b.First) })
	var drained Ranges
	for _, s := range p.subnets {
		if s.drain {
			drained = append(drained, s.Range)
		}
	}
	p.Open = p.Pool.Without(taken).Without(drained)
}
