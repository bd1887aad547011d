package alloc

import (
	"net/netip"
	"testing"

	"go4.org/netipx"
)

// Without agrees with a comparison address by address, for all sets of a few addresses.
func TestWithout(t *testing.T) {
	const addresses = 6
	set := func(bits int) Ranges {
		var b netipx.IPSetBuilder
		for i := range addresses {
			if bits>>i&1 == 1 {
				b.Add(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
			}
		}
		s, err := b.IPSet()
		if err != nil {
			t.Fatal(err)
		}
		return rangesOf(s)
	}
	for a := range 1 << addresses {
		for b := range 1 << addresses {
			var single Ranges // adjacent ranges
			for i := range addresses {
				single = append(single, set(b&(1<<i))...)
			}
			got, adjacent, want := set(a).Without(set(b)), set(a).Without(single), set(a&^b)
			for i := range addresses {
				address := FromAddr(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
				if got.Contains(address) != want.Contains(address) || adjacent.Contains(address) != want.Contains(address) {
					t.Errorf("%v without %v: got %v and %v, want %v", set(a), set(b), got, adjacent, want)
				}
			}
		}
	}
}
