package alloc

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Set contains the free addresses of a plan. All its operations take O(log n), regardless of the use of the pool. It is
// not safe for concurrent use.
type Set struct {
	plan *Plan
	free *Tree[Range]
	// freeBlocks is the number of blocks in free.
	freeBlocks U128
	// used counts the holders of each block with valid boundaries. Two holders are a duplicate that another writer
	// created.
	used map[U128]int
	// odd contains the holders of all other ranges, for example of a larger prefix that a user has created. A list is
	// sufficient, because they are rare.
	odd []Range
	// usedInPool counts the blocks in used that the plan contains.
	usedInPool int
	outOfRange int
	resting    map[U128]time.Time
	cursor     U128
	hasCursor  bool
	random     func(n uint64) uint64
}

func byFirst(a, b Range) int { return a.First.Cmp(b.First) }

// NewSet returns a set in which all addresses are free.
func NewSet(plan *Plan) *Set {
	s := &Set{
		plan:    plan,
		free:    NewTree(byFirst),
		used:    map[U128]int{},
		resting: map[U128]time.Time{},
		random:  rand.Uint64N,
	}
	for _, r := range plan.Open {
		s.free.Set(r)
	}
	s.freeBlocks = plan.Open.Blocks(plan.Bits)
	return s
}

// Free is the number of free blocks.
func (s *Set) Free() U128 { return s.freeBlocks }

// Used is the number of blocks in use that the plan contains.
func (s *Set) Used() int { return s.usedInPool }

// OutOfRange is the number of blocks in use that it does not contain.
func (s *Set) OutOfRange() int { return s.outOfRange }

// Resting is the number of resting blocks.
func (s *Set) Resting() int { return len(s.resting) }

// InUse returns the number of holders of the block that starts at this address.
func (s *Set) InUse(a U128) int {
	n := s.used[a]
	block := Range{a, a.Add(s.plan.Block().Sub(One))}
	for _, r := range s.odd {
		if r.Overlaps(block) {
			n++
		}
	}
	return n
}

// Use adds a holder to addresses.
func (s *Set) Use(r Range) {
	if !s.regular(r) {
		s.odd = append(s.odd, r)
		s.count(r, 1)
		s.takeAll(r)
		return
	}
	s.used[r.First]++
	if s.used[r.First] == 1 {
		s.count(r, 1)
		s.take(r.First)
	}
}

// Unuse reverts one Use.
func (s *Set) Unuse(r Range) {
	if !s.regular(r) {
		s.unuseOdd(r)
		return
	}
	switch s.used[r.First] {
	case 0:
		return
	case 1:
		delete(s.used, r.First)
		s.count(r, -1)
		s.giveBack(r.First)
	default:
		s.used[r.First]--
	}
}

func (s *Set) unuseOdd(r Range) {
	i := slices.Index(s.odd, r)
	if i < 0 {
		return
	}
	s.odd = slices.Delete(s.odd, i, i+1)
	s.count(r, -1)
	s.rebuild()
}

func (s *Set) count(r Range, by int) {
	if s.plan.Contains(r) {
		s.usedInPool += by
	} else {
		s.outOfRange += by
	}
}

func (s *Set) regular(r Range) bool { return s.plan.IsBlock(r) }

// rebuild recomputes the free ranges, in O(n log n).
func (s *Set) rebuild() {
	s.free = NewTree(byFirst)
	for _, r := range s.plan.Open {
		s.free.Set(r)
	}
	s.freeBlocks = s.plan.Open.Blocks(s.plan.Bits)
	for a := range s.used {
		s.take(a)
	}
	for a := range s.resting {
		s.take(a)
	}
	for _, r := range s.odd {
		s.takeAll(r)
	}
}

// Rest withholds the block that starts at this address from new claims until the given time. It does nothing if no block
// can start there.
func (s *Set) Rest(a U128, until time.Time) {
	if old, ok := s.resting[a]; ok && old.After(until) || !s.plan.Aligned(a) {
		return
	}
	s.resting[a] = until
	s.take(a)
}

// Unrest reverts Rest.
func (s *Set) Unrest(a U128) {
	if _, ok := s.resting[a]; !ok {
		return
	}
	delete(s.resting, a)
	s.giveBack(a)
}

// RestsUntil returns the end of the resting period of an address.
func (s *Set) RestsUntil(a U128) (time.Time, bool) {
	t, ok := s.resting[a]
	return t, ok
}

// EachResting calls f for every resting address.
func (s *Set) EachResting(f func(U128, time.Time)) {
	for a, t := range s.resting {
		f(a, t)
	}
}

// Wake frees the addresses whose rest has ended, and returns the time of the next call.
func (s *Set) Wake(now time.Time) (woken int, next time.Time) {
	for a, t := range s.resting {
		if !t.After(now) {
			delete(s.resting, a)
			s.giveBack(a)
			woken++
		} else if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	return woken, next
}

// take removes one block from the free ranges, if it is in them.
func (s *Set) take(a U128) {
	block := s.plan.Block()
	last := a.Add(block.Sub(One))
	r, ok := s.free.Floor(Range{First: a})
	if !ok || !r.Contains(a) {
		return
	}
	s.free.Delete(r)
	if r.First.Less(a) {
		s.free.Set(Range{r.First, a.Sub(One)})
	}
	if last.Less(r.Last) {
		s.free.Set(Range{last.Add(One), r.Last})
	}
	s.freeBlocks = s.freeBlocks.Sub(One)
}

// takeAll removes every block that overlaps r from the free ranges.
func (s *Set) takeAll(r Range) {
	bits := s.plan.Bits
	r.First = r.First.Shr(bits).Shl(bits)
	r.Last = r.Last.Shr(bits).Shl(bits).Add(s.plan.Block().Sub(One))
	for {
		free, ok := s.free.Floor(Range{First: r.Last})
		if !ok || !free.Overlaps(r) {
			return
		}
		s.free.Delete(free)
		if free.First.Less(r.First) {
			s.free.Set(Range{free.First, r.First.Sub(One)})
		}
		if r.Last.Less(free.Last) {
			s.free.Set(Range{r.Last.Add(One), free.Last})
		}
		gone := Range{maxOf(free.First, r.First), minOf(free.Last, r.Last)}
		s.freeBlocks = s.freeBlocks.Sub(gone.Last.Sub(gone.First).Shr(bits).Add(One))
	}
}

// giveBack adds one block to the free ranges, unless it is used, resting or reserved.
func (s *Set) giveBack(a U128) {
	if _, rests := s.resting[a]; rests || s.InUse(a) > 0 || !s.plan.Open.Contains(a) {
		return
	}
	r := Range{a, a.Add(s.plan.Block().Sub(One))}
	if below, ok := s.free.Floor(r); ok {
		if below.Contains(a) {
			return
		}
		if below.Last.Add(One) == a {
			s.free.Delete(below)
			r.First = below.First
		}
	}
	if above, ok := s.free.Ceil(Range{First: r.Last}); ok && r.Last.Add(One) == above.First {
		s.free.Delete(above)
		r.Last = above.Last
	}
	s.free.Set(r)
	s.freeBlocks = s.freeBlocks.Add(One)
}

// SetCursor sets the last allocated address for RoundRobin.
func (s *Set) SetCursor(a U128) { s.cursor, s.hasCursor = a, true }

// Cursor is the last allocated address.
func (s *Set) Cursor() (U128, bool) { return s.cursor, s.hasCursor }

// Pick chooses a free address in the plan's order. It does not mark it.
func (s *Set) Pick() (U128, bool) {
	switch s.plan.Order {
	case ipamv1.RoundRobinOrder:
		if s.hasCursor {
			return s.next(s.cursor.Add(One))
		}
	case ipamv1.RandomOrder:
		return s.pickRandom()
	}
	r, ok := s.free.Min()
	return r.First, ok
}

// IsFree reports whether a claim without a reservation can get the address.
func (s *Set) IsFree(a U128) bool {
	r, ok := s.free.Floor(Range{First: a})
	return ok && r.Contains(a)
}

// next returns the first free block at or after a. After the highest block it continues with the lowest one.
func (s *Set) next(a U128) (U128, bool) {
	bits := s.plan.Bits
	if !s.plan.Aligned(a) {
		a = a.Shr(bits).Add(One).Shl(bits)
	}
	if s.IsFree(a) {
		return a, true
	}
	if r, ok := s.free.Ceil(Range{First: a}); ok {
		return r.First, true
	}
	r, ok := s.free.Min()
	return r.First, ok
}

// pickRandom tries a few random addresses of the whole plan. If all are in use, it returns the next free one.
func (s *Set) pickRandom() (U128, bool) {
	const tries = 8
	var a U128
	for range tries {
		a = s.anyOpen()
		if s.IsFree(a) {
			return a, true
		}
	}
	return s.next(a)
}

func (s *Set) anyOpen() U128 {
	bits := s.plan.Bits
	total := s.plan.Open.Blocks(bits)
	if total.IsZero() {
		return U128{}
	}
	n := s.below(total)
	for _, r := range s.plan.Open {
		size := r.Last.Sub(r.First).Shr(bits).Add(One)
		if n.Less(size) {
			return r.First.Add(n.Shl(bits))
		}
		n = n.Sub(size)
	}
	return U128{}
}

// below returns a random number below n. n must not be 0.
func (s *Set) below(n U128) U128 {
	if n.Hi == 0 {
		return U128{Lo: s.random(n.Lo)}
	}
	for {
		r := U128{Hi: s.upTo(n.Hi), Lo: s.upTo(math.MaxUint64)}
		if r.Less(n) {
			return r
		}
	}
}

// upTo returns a random number from 0 to n, both included.
func (s *Set) upTo(n uint64) uint64 {
	if n == math.MaxUint64 { // The number of values overflows.
		return s.random(1<<63)<<1 | s.random(2)
	}
	return s.random(n + 1)
}
