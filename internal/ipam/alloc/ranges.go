package alloc

import (
	"fmt"
	"net/netip"
	"sort"
	"strings"

	"go4.org/netipx"
)

// Range contains the addresses from First to Last, both included.
type Range struct{ First, Last U128 }

// Contains reports whether the range contains the address.
func (r Range) Contains(a U128) bool { return !a.Less(r.First) && !r.Last.Less(a) }

// Overlaps reports whether the ranges have an address in common.
func (r Range) Overlaps(o Range) bool { return !o.Last.Less(r.First) && !r.Last.Less(o.First) }

// Ranges are sorted, disjoint and not adjacent.
type Ranges []Range

func rangesOf(set *netipx.IPSet) Ranges {
	var out Ranges
	for _, r := range set.Ranges() {
		out = append(out, Range{FromAddr(r.From()), FromAddr(r.To())})
	}
	return out
}

// find returns the index of the range that contains the address, or -1.
func (rs Ranges) find(a U128) int {
	i := sort.Search(len(rs), func(i int) bool { return !rs[i].Last.Less(a) })
	if i < len(rs) && rs[i].Contains(a) {
		return i
	}
	return -1
}

// Contains reports whether one of the ranges contains the address. It takes O(log n).
func (rs Ranges) Contains(a U128) bool { return rs.find(a) >= 0 }

// ContainsRange reports whether one of the ranges contains all of r.
func (rs Ranges) ContainsRange(r Range) bool {
	i := rs.find(r.First)
	return i >= 0 && rs[i].Contains(r.Last)
}

// Overlap returns a range that both contain. It passes once through each of them.
func (rs Ranges) Overlap(other Ranges) (Range, bool) {
	for i, j := 0, 0; i < len(rs) && j < len(other); {
		a, b := rs[i], other[j]
		if a.Overlaps(b) {
			return Range{maxOf(a.First, b.First), minOf(a.Last, b.Last)}, true
		}
		if a.Last.Less(b.First) {
			i++
		} else {
			j++
		}
	}
	return Range{}, false
}

// Without returns the addresses that other does not contain. The ranges of other may be adjacent. It takes O(n+m).
func (rs Ranges) Without(other Ranges) Ranges {
	var out Ranges
	for _, r := range rs {
		for len(other) > 0 && other[0].Last.Less(r.First) {
			other = other[1:]
		}
		open := true
		for open && len(other) > 0 && other[0].Overlaps(r) {
			if r.First.Less(other[0].First) {
				out = append(out, Range{r.First, other[0].First.Sub(One)})
			}
			if open = other[0].Last.Less(r.Last); open {
				r.First = other[0].Last.Add(One)
				other = other[1:]
			}
		}
		if open {
			out = append(out, r)
		}
	}
	return out
}

// Blocks is the number of blocks of 2^bits addresses in the ranges. It is 0 for all 2^128 addresses.
func (rs Ranges) Blocks(bits uint) U128 {
	var n U128
	for _, r := range rs {
		n = n.Add(r.Last.Sub(r.First).Shr(bits).Add(One))
	}
	return n
}

// whole shrinks the ranges to whole blocks of 2^bits addresses.
func (rs Ranges) whole(bits uint) Ranges {
	if bits == 0 {
		return rs
	}
	mask := One.Shl(bits).Sub(One)
	var out Ranges
	for _, r := range rs {
		first := r.First
		if rest := first.And(mask); !rest.IsZero() {
			first = first.Sub(rest).Add(mask).Add(One)
			if first.Less(r.First) { // The next block is after the end of the address space.
				continue
			}
		}
		end := r.Last.Shr(bits).Shl(bits)
		last := end.Add(mask)
		if last != r.Last { // The last block is incomplete.
			if end.IsZero() {
				continue
			}
			last = end.Sub(One)
		}
		if !last.Less(first) {
			out = append(out, Range{first, last})
		}
	}
	return out
}

func maxOf(a, b U128) U128 {
	if a.Less(b) {
		return b
	}
	return a
}

func minOf(a, b U128) U128 {
	if b.Less(a) {
		return b
	}
	return a
}

// parseRange reads "a-b", a CIDR, or a single address.
func parseRange(s string) (netipx.IPRange, error) {
	if from, to, isRange := strings.Cut(s, "-"); isRange {
		return parseFromTo(s, from, to)
	}
	if strings.Contains(s, "/") {
		prefix, err := ParseCIDR(s)
		if err != nil {
			return netipx.IPRange{}, err
		}
		return netipx.RangeOfPrefix(prefix), nil
	}
	addr, err := ParseAddr(s)
	if err != nil {
		return netipx.IPRange{}, fmt.Errorf("expected a range %q, a CIDR %q or an address %q, found %q",
			"10.0.0.10-10.0.0.20", "10.0.0.0/28", "10.0.0.7", s)
	}
	return netipx.IPRangeFrom(addr, addr), nil
}

func parseFromTo(s, from, to string) (netipx.IPRange, error) {
	a, err := ParseAddr(strings.TrimSpace(from))
	if err != nil {
		return netipx.IPRange{}, fmt.Errorf("range %q: first address: %w", s, err)
	}
	b, err := ParseAddr(strings.TrimSpace(to))
	if err != nil {
		return netipx.IPRange{}, fmt.Errorf("range %q: last address: %w", s, err)
	}
	if a.Is4() != b.Is4() {
		return netipx.IPRange{}, fmt.Errorf("range %q mixes IPv4 and IPv6: both ends must be of one family", s)
	}
	if b.Less(a) {
		return netipx.IPRange{}, fmt.Errorf("range %q is reversed: its first address is above its last; write %q", s, b.String()+"-"+a.String())
	}
	return netipx.IPRangeFrom(a, b), nil
}

// ParseAddr reads an address. It refuses zones and IPv4-mapped IPv6 addresses.
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("expected an IP address, found %q", s)
	case a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("expected an IP address without a zone, found %q: leave out %q", s, "%"+a.Zone())
	case a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%q is an IPv4 address written as IPv6: write %q", s, a.Unmap())
	}
	return a, nil
}

// ParseCIDR reads a CIDR whose host bits are zero.
func ParseCIDR(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("expected a CIDR such as %q, found %q", "10.0.0.0/24", s)
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4 network written as IPv6: write it as IPv4", s)
	}
	if p.Masked() != p {
		return netip.Prefix{}, fmt.Errorf("%q has host bits set: write %q", s, p.Masked())
	}
	return p, nil
}
