package alloc

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// largePools returns pools with the most addresses and with the highest addresses.
func largePools() map[string]ipamv1.CapstanIPPoolSpec {
	anycast := []ipamv1.ReservedAddress{ipamv1.AnycastAddress}
	return map[string]ipamv1.CapstanIPPoolSpec{
		"all but two":   {Subnets: []ipamv1.Subnet{sub("::/1"), sub("8000::/1")}},
		"all but one":   {Subnets: []ipamv1.Subnet{sub("::/1"), {CIDR: "8000::/1", AllocateReserved: anycast}}},
		"just Hi == 0":  {Subnets: []ipamv1.Subnet{{CIDR: "fd00::/64"}}},
		"just Hi == 1":  {Subnets: []ipamv1.Subnet{{CIDR: "fd00::/64", AllocateReserved: anycast}}},
		"drained half":  {Subnets: []ipamv1.Subnet{sub("::/1"), {CIDR: "8000::/1", Drain: ptr.To(true)}}},
		"huge prefixes": {Subnets: []ipamv1.Subnet{sub("::/1"), sub("8000::/1")}, PrefixLength: ptr.To[int32](1)},
		"all prefixes":  {Subnets: []ipamv1.Subnet{sub("::/1"), sub("8000::/1")}, PrefixLength: ptr.To[int32](127)},
		"64 bits":       {Subnets: []ipamv1.Subnet{sub("::/1"), sub("8000::/1")}, PrefixLength: ptr.To[int32](64)},
		"all IPv4": {Subnets: []ipamv1.Subnet{
			{CIDR: "0.0.0.0/1", AllocateReserved: []ipamv1.ReservedAddress{ipamv1.NetworkAddress, ipamv1.BroadcastAddress}},
			{CIDR: "128.0.0.0/1", AllocateReserved: []ipamv1.ReservedAddress{ipamv1.NetworkAddress, ipamv1.BroadcastAddress}},
		}},
	}
}

// In pools that are too large to check each address, chosen addresses are free and in the pool, the counts are correct,
// and all addresses can be released.
func TestLargePools(t *testing.T) {
	for name, spec := range largePools() {
		for _, order := range []ipamv1.AllocationOrder{ipamv1.LowestOrder, ipamv1.RoundRobinOrder, ipamv1.RandomOrder} {
			t.Run(name+" "+string(order), func(t *testing.T) {
				spec.Order = order
				plan, errs := Compile(&spec, field.NewPath("spec"))
				if len(errs) > 0 {
					t.Fatal(errs.ToAggregate())
				}
				rng := rand.New(rand.NewPCG(1, 2))
				for _, random := range []func(uint64) uint64{
					rng.Uint64N,
					(&script{numbers: []uint64{0}, then: rng}).below,
					(&script{numbers: []uint64{math.MaxUint64}, then: rng}).below,
				} {
					fillAndEmpty(t, plan, random)
				}
			})
		}
	}
}

// script starts with the given numbers, as far as they are below n. math.MaxUint64 stands for the highest number.
type script struct {
	numbers []uint64
	then    *rand.Rand
	calls   int
}

func (s *script) below(n uint64) uint64 {
	if n == 0 {
		panic("no number is below 0")
	}
	if s.calls++; s.calls <= 3 {
		return min(s.numbers[(s.calls-1)%len(s.numbers)], n-1)
	}
	return s.then.Uint64N(n)
}

func fillAndEmpty(t *testing.T, plan *Plan, random func(uint64) uint64) {
	t.Helper()
	set := NewSet(plan)
	set.random = random
	open := naiveBlocks(plan.Open, plan.Bits)
	taken := map[U128]bool{}
	// The top of the address space, where adding one overflows.
	set.SetCursor(plan.Open[len(plan.Open)-1].Last.Shr(plan.Bits).Shl(plan.Bits))
	for i := range 50 {
		if got := new(big.Int).Add(set.Free().Big(), big.NewInt(int64(len(taken)))); got.Cmp(open) != 0 {
			t.Fatalf("%v are free of %v and %d are taken", set.Free(), open, len(taken))
		}
		a, ok := set.Pick()
		if !ok {
			if !set.Free().IsZero() {
				t.Fatalf("no address was chosen, but %v are free", set.Free())
			}
			break
		}
		if taken[a] || !plan.Open.Contains(a) || !plan.Aligned(a) || !set.IsFree(a) {
			t.Fatalf("the address %v was chosen", plan.Addr(a))
		}
		taken[a] = true
		set.SetCursor(a)
		if i%2 == 0 {
			set.Use(Range{a, a.Add(plan.Block().Sub(One))})
		} else {
			set.Rest(a, time.Unix(1, 0))
		}
	}
	// One IPAddress, created by a user, uses all addresses.
	all := Range{Last: U128{math.MaxUint64, math.MaxUint64}}
	set.Use(all)
	if !set.Free().IsZero() {
		t.Fatalf("%v are free although all are used", set.Free())
	}
	set.Unuse(all)
	for a := range taken {
		set.Unuse(Range{a, a.Add(plan.Block().Sub(One))})
	}
	set.Wake(time.Unix(2, 0))
	var left Ranges
	set.free.Ascend(func(r Range) bool { left = append(left, r); return true })
	if set.Free().Big().Cmp(open) != 0 || !slices.Equal(left, plan.Open) {
		t.Fatalf("free: %v in %v, want %v in %v", set.Free(), left, open, plan.Open)
	}
}

// naiveBlocks is Ranges.Blocks with unlimited numbers.
func naiveBlocks(rs Ranges, bits uint) *big.Int {
	n := new(big.Int)
	for _, r := range rs {
		size := new(big.Int).Sub(r.Last.Big(), r.First.Big())
		n.Add(n, size.Rsh(size.Add(size, big.NewInt(1)), bits))
	}
	return n
}

// The number of all IPv6 addresses overflows, so a pool cannot contain all of them.
func TestCompileRefusesEveryAddress(t *testing.T) {
	anycast := []ipamv1.ReservedAddress{ipamv1.AnycastAddress}
	_, errs := Compile(&ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{
		{CIDR: "::/1", AllocateReserved: anycast}, {CIDR: "8000::/1", AllocateReserved: anycast},
	}}, field.NewPath("spec"))
	if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), "every address of IPv6") {
		t.Errorf("got %v", errs)
	}
}

// FuzzBelow checks that random numbers are below their limit, and that each draw ends.
func FuzzBelow(f *testing.F) {
	for _, n := range []U128{One, {Lo: math.MaxUint64}, {Hi: 1}, {Hi: 1, Lo: 1}, {Hi: math.MaxUint64}, {Hi: math.MaxUint64, Lo: math.MaxUint64}} {
		f.Add(n.Hi, n.Lo, uint64(0))
		f.Add(n.Hi, n.Lo, uint64(math.MaxUint64))
	}
	f.Fuzz(func(t *testing.T, hi, lo, first uint64) {
		n := U128{hi, lo}
		if n.IsZero() {
			return
		}
		s := &Set{random: (&script{numbers: []uint64{first}, then: rand.New(rand.NewPCG(first, 1))}).below}
		if got := s.below(n); !got.Less(n) {
			t.Errorf("%v is not below %v", got, n)
		}
	})
}

// FuzzU128 compares the arithmetic with that of unlimited numbers.
func FuzzU128(f *testing.F) {
	for _, u := range []uint64{0, 1, 1 << 63, math.MaxUint64} {
		f.Add(u, u, uint64(0), uint64(1), uint8(0))
		f.Add(u, uint64(0), u, u, uint8(64))
		f.Add(uint64(1), u, u, uint64(math.MaxUint64), uint8(127))
	}
	space := new(big.Int).Lsh(big.NewInt(1), 128)
	f.Fuzz(func(t *testing.T, ah, al, bh, bl uint64, shift uint8) {
		a, b, n := U128{ah, al}, U128{bh, bl}, uint(shift%128)
		for name, tt := range map[string]struct{ got, want *big.Int }{
			"Add": {a.Add(b).Big(), new(big.Int).Add(a.Big(), b.Big())},
			"Sub": {a.Sub(b).Big(), new(big.Int).Sub(a.Big(), b.Big())},
			"Shl": {a.Shl(n).Big(), new(big.Int).Lsh(a.Big(), n)},
			"Shr": {a.Shr(n).Big(), new(big.Int).Rsh(a.Big(), n)},
			"And": {a.And(b).Big(), new(big.Int).And(a.Big(), b.Big())},
		} {
			if tt.got.Cmp(tt.want.Mod(tt.want, space)) != 0 {
				t.Errorf("%s of %v and %v (%d): got %v, want %v", name, a, b, n, tt.got, tt.want)
			}
		}
		if a.Cmp(b) != a.Big().Cmp(b.Big()) || a.Less(b) != (a.Cmp(b) < 0) || a.AtLeast(bl) != (a.Cmp(U128{Lo: bl}) >= 0) {
			t.Errorf("the order of %v and %v is wrong", a, b)
		}
	})
}
