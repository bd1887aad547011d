package alloc

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// model is the naive allocator: it searches every block of the pool in each call.
type model struct {
	plan    *Plan
	blocks  []U128
	used    map[Range]int
	resting map[U128]time.Time
	cursor  *U128
}

func newModel(plan *Plan) *model {
	m := &model{plan: plan, used: map[Range]int{}, resting: map[U128]time.Time{}}
	for _, r := range plan.Open {
		for a, n := r.First, r.Last.Sub(r.First).Shr(plan.Bits).Lo; ; a, n = a.Add(plan.Block()), n-1 {
			m.blocks = append(m.blocks, a)
			if n == 0 {
				break
			}
		}
	}
	return m
}

func (m *model) isFree(a U128) bool {
	if _, rests := m.resting[a]; rests || !slices.Contains(m.blocks, a) {
		return false
	}
	block := Range{a, a.Add(m.plan.Block().Sub(One))}
	for r := range m.used {
		if r.Overlaps(block) {
			return false
		}
	}
	return true
}

func (m *model) free() []U128 {
	var out []U128
	for _, a := range m.blocks {
		if m.isFree(a) {
			out = append(out, a)
		}
	}
	return out
}

func (m *model) counts() (used, outOfRange int) {
	regular := map[Range]bool{}
	for r, n := range m.used {
		isBlock := m.plan.IsBlock(r)
		if isBlock && regular[r] {
			continue
		}
		regular[r] = true
		if isBlock {
			n = 1
		}
		if m.plan.Contains(r) {
			used += n
		} else {
			outOfRange += n
		}
	}
	return used, outOfRange
}

// wantPick checks a choice against the order.
func (m *model) wantPick(got U128, ok bool) error {
	free := m.free()
	if ok != (len(free) > 0) {
		return fmt.Errorf("Pick returned %v, but %d are free", ok, len(free))
	}
	if !ok {
		return nil
	}
	want := free[0]
	switch m.plan.Order {
	case ipamv1.RandomOrder:
		want = got
		if !slices.Contains(free, got) {
			return fmt.Errorf("picked %v, which is not free", m.plan.Addr(got))
		}
	case ipamv1.RoundRobinOrder:
		if m.cursor != nil {
			if i := slices.IndexFunc(free, func(a U128) bool { return m.cursor.Less(a) }); i >= 0 {
				want = free[i]
			}
		}
	}
	if got != want {
		return fmt.Errorf("picked %v, want %v", m.plan.Addr(got), m.plan.Addr(want))
	}
	return nil
}

// After any sequence of operations, the allocator and the model have the same free addresses, counts and choices.
func TestSetEqualsModel(t *testing.T) {
	for name, spec := range modelSpecs() {
		for seed := range uint64(40) {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				plan, errs := Compile(spec, field.NewPath("spec"))
				if len(errs) > 0 {
					t.Fatal(errs.ToAggregate())
				}
				rng := rand.New(rand.NewPCG(seed, 1))
				ops := make([]byte, 400)
				for i := range ops {
					ops[i] = byte(rng.Uint32())
				}
				if err := play(plan, ops); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

func modelSpecs() map[string]*ipamv1.CapstanIPPoolSpec {
	v4 := []ipamv1.Subnet{
		{CIDR: "10.0.0.0/28", Gateway: "10.0.0.1", Exclude: []ipamv1.AddressRange{"10.0.0.5-10.0.0.6"}},
		{CIDR: "10.0.1.0/29", Drain: ptr.To(true)},
		{CIDR: "10.0.2.0/27", Ranges: []ipamv1.AddressRange{"10.0.2.3", "10.0.2.8/30", "10.0.2.20-10.0.2.25"}},
	}
	return map[string]*ipamv1.CapstanIPPoolSpec{
		"lowest":     {Subnets: v4, Order: ipamv1.LowestOrder, Reservations: []ipamv1.Reservation{{Address: "10.0.0.9", Claim: "a"}}},
		"roundrobin": {Subnets: v4, Order: ipamv1.RoundRobinOrder},
		"random":     {Subnets: v4, Order: ipamv1.RandomOrder},
		"v6 top":     {Subnets: []ipamv1.Subnet{{CIDR: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffe0/123"}}, Order: ipamv1.RoundRobinOrder},
		"v4 top":     {Subnets: []ipamv1.Subnet{{CIDR: "255.255.255.224/27", AllocateReserved: []ipamv1.ReservedAddress{ipamv1.NetworkAddress, ipamv1.BroadcastAddress}}}},
		"prefixes":   {Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24", Gateway: "10.0.0.1", Exclude: []ipamv1.AddressRange{"10.0.0.100"}}}, PrefixLength: ptr.To[int32](28)},
		"v6 prefixes": {Subnets: []ipamv1.Subnet{{CIDR: "fd00::/60"}, {CIDR: "fd00:1::/62"}}, PrefixLength: ptr.To[int32](64),
			Order: ipamv1.RandomOrder},
	}
}

// play runs the operations that the bytes encode on both.
func play(plan *Plan, ops []byte) error {
	set, m := NewSet(plan), newModel(plan)
	now := time.Unix(1000, 0)
	var held []Range
	spots := append(slices.Clone(m.blocks), plan.Pool[0].First, plan.Pool[len(plan.Pool)-1].Last, plan.subnets[0].First)
	use := func(r Range) {
		set.Use(r)
		m.used[r]++
		held = append(held, r)
	}
	for i := 0; i+1 < len(ops); i += 2 {
		n := int(ops[i+1])
		spot := spots[n%len(spots)]
		switch ops[i] % 8 {
		case 0, 1, 2: // allocate
			a, ok := set.Pick()
			if err := m.wantPick(a, ok); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			if ok {
				set.SetCursor(a)
				m.cursor = &a
				use(Range{a, a.Add(plan.Block().Sub(One))})
			}
		case 3, 4: // release
			if len(held) > 0 {
				j := n % len(held)
				r := held[j]
				held = slices.Delete(held, j, j+1)
				set.Unuse(r)
				if m.used[r]--; m.used[r] == 0 {
					delete(m.used, r)
				}
			}
		case 5: // A user creates an IPAddress of any size.
			last := spot.Add(U128{Lo: uint64(n % 5)})
			if last.Less(spot) {
				last = spot
			}
			use(Range{spot, last})
		case 6:
			a := spot.Add(U128{Lo: uint64(n % 3)}) // also of those that a user has created
			until := now.Add(time.Duration(n) * time.Second)
			set.Rest(a, until)
			if old, ok := m.resting[a]; plan.Aligned(a) && (!ok || !old.After(until)) {
				m.resting[a] = until
			}
		case 7:
			now = now.Add(time.Duration(n%32) * time.Second)
			set.Wake(now)
			for a, t := range m.resting {
				if !t.After(now) {
					delete(m.resting, a)
				}
			}
		}
		if err := same(set, m); err != nil {
			return fmt.Errorf("step %d (operation %d, %d): %w", i, ops[i]%8, n, err)
		}
	}
	return nil
}

func same(set *Set, m *model) error {
	free := m.free()
	if set.Free() != (U128{Lo: uint64(len(free))}) {
		return fmt.Errorf("%v are free, want %d", set.Free(), len(free))
	}
	var got []U128
	set.free.Ascend(func(r Range) bool {
		for a := r.First; ; a = a.Add(m.plan.Block()) {
			got = append(got, a)
			if last := a.Add(m.plan.Block().Sub(One)); !last.Less(r.Last) {
				return true
			}
		}
	})
	if !slices.Equal(got, free) {
		return fmt.Errorf("free: %v, want %v", got, free)
	}
	used, out := m.counts()
	if set.Used() != used || set.OutOfRange() != out {
		return fmt.Errorf("got %d used and %d out of range, want %d and %d", set.Used(), set.OutOfRange(), used, out)
	}
	return nil
}

// The tree is equal to a sorted list with ranks.
func TestTreeIsASortedList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	tree, list := NewTree(func(a, b int) int { return a - b }), []int{}
	for range 5000 {
		v := rng.IntN(200)
		i, found := slices.BinarySearch(list, v)
		switch {
		case rng.IntN(2) == 0:
			tree.Set(v)
			if !found {
				list = slices.Insert(list, i, v)
			}
		case tree.Delete(v) != found:
			t.Fatalf("Delete(%d) disagrees", v)
		case found:
			list = slices.Delete(list, i, i+1)
		}
		if tree.Len() != len(list) || tree.Rank(v) != sortRank(list, v) {
			t.Fatalf("Len or Rank(%d) disagrees", v)
		}
		floor, okF := tree.Floor(v)
		ceil, okC := tree.Ceil(v)
		if r := sortRank(list, v+1); okF != (r > 0) || okF && floor != list[r-1] {
			t.Fatalf("Floor(%d) disagrees", v)
		}
		if r := sortRank(list, v); okC != (r < len(list)) || okC && ceil != list[r] {
			t.Fatalf("Ceil(%d) disagrees", v)
		}
	}
}

func sortRank(list []int, v int) int { i, _ := slices.BinarySearch(list, v); return i }

// FuzzSet compares any sequence of operations with the model.
func FuzzSet(f *testing.F) {
	f.Add(uint8(0), []byte{0, 0, 0, 0, 3, 0, 6, 9, 7, 30})
	f.Add(uint8(1), []byte{0, 0, 5, 3, 5, 200, 3, 1, 0, 0})
	f.Add(uint8(5), []byte{5, 1, 0, 0, 3, 0, 0, 0, 6, 4})
	f.Add(uint8(6), []byte{0, 0, 5, 255, 0, 1, 3, 0, 3, 0})
	specs := modelSpecs()
	names := make([]string, 0, len(specs))
	for name := range specs {
		names = append(names, name)
	}
	slices.Sort(names)
	f.Fuzz(func(t *testing.T, which uint8, ops []byte) {
		plan, errs := Compile(specs[names[int(which)%len(names)]], field.NewPath("spec"))
		if len(errs) > 0 {
			t.Fatal(errs.ToAggregate())
		}
		if err := play(plan, ops[:min(len(ops), 200)]); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzParseRange checks that an accepted range has the text from which it was parsed.
func FuzzParseRange(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "10.0.0.1-10.0.0.9", "10.0.0.0/24", "fd00::/64", "fd00::1-fd00::ff", "::ffff:10.0.0.1",
		"10.0.0.9-10.0.0.1", "10.0.0.1-fd00::1", "fe80::1%eth0", "0.0.0.0/0", "10.0.0.1/24", "-", "/", "1-2-3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := parseRange(s)
		if err != nil {
			return
		}
		if !r.IsValid() || r.To().Less(r.From()) || r.From().Is4() != r.To().Is4() || r.From().Is4In6() || r.From().Zone() != "" {
			t.Fatalf("%q became %v", s, r)
		}
		again, err := parseRange(r.From().String() + "-" + r.To().String())
		if err != nil || again != r {
			t.Fatalf("%q became %v, which is parsed as %v, %v", s, r, again, err)
		}
		for _, a := range []netip.Addr{r.From(), r.To()} {
			if FromAddr(a).Addr(a.Is6()) != a {
				t.Fatalf("%v changes in the conversion to a number", a)
			}
		}
	})
}
