package connections

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// keepAll puts machines into the mirror of a host.
func (h *Host) keepAll(machines ...*hostpb.Machine) {
	if h.machines == nil {
		h.machines = map[string]*hostpb.Machine{}
	}
	for _, m := range machines {
		h.keepMachine(m)
	}
}

// TestTally: after any order of new, changed and removed machines, the sums are those of the machines that are left.
func TestTally(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	h := &Host{}
	for step := range 2000 {
		id := fmt.Sprint("m", random.IntN(20))
		if random.IntN(3) == 0 {
			h.dropMachine(id)
		} else {
			h.keepAll(randomMachine(random, id))
		}
		var want tally
		for _, m := range h.machines {
			want.add(m)
		}
		if got := h.sums; got.cpus != want.cpus || got.unlimited != want.unlimited || got.memory != want.memory || got.disk != want.disk ||
			!maps.Equal(got.devices, want.devices) || len(got.holders) != len(want.holders) {
			t.Fatalf("step %d: the sums are %+v, want %+v", step, got, want)
		}
		for p, ids := range want.holders {
			if !maps.Equal(ids, h.sums.holders[p]) {
				t.Fatalf("step %d: %v have %+v, want %v", step, h.sums.holders[p], p, ids)
			}
		}
	}
}

func randomMachine(random *rand.Rand, id string) *hostpb.Machine {
	spec := &hostpb.MachineSpec{
		Id: id, Cpus: random.Int32N(3), MemoryBytes: random.Int64N(100), DiskBytes: random.Int64N(100),
		Network: &hostpb.Network{Id: fmt.Sprint("n", random.IntN(2))},
	}
	for range random.IntN(3) {
		spec.Addresses = append(spec.Addresses, &hostpb.Address{Address: fmt.Sprint("192.0.2.", random.IntN(9))})
		spec.Devices = append(spec.Devices, &hostpb.MachineDevice{Name: "example.com/gpu", Count: 1})
	}
	return &hostpb.Machine{Spec: spec}
}

// TestHasAddress: an address is taken in its network by any machine of any host but the asking one.
func TestHasAddress(t *testing.T) {
	machine := func(id, network, address string) *hostpb.Machine {
		return &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: id, Network: &hostpb.Network{Id: network}, Addresses: []*hostpb.Address{{Address: address}}}}
	}
	one, two := &Host{}, &Host{}
	one.keepAll(machine("a", "n", "192.0.2.1"), machine("twice", "n", "192.0.2.3"), machine("again", "n", "192.0.2.3"), machine("gone", "n", "192.0.2.4"))
	two.keepAll(machine("b", "n", "192.0.2.2"), machine("moved", "n", "192.0.2.5"))
	one.dropMachine("gone")
	two.keepAll(machine("moved", "n", "192.0.2.6"))
	p := &Pool{hosts: map[string]*Host{"one": one, "two": two}}
	for name, tc := range map[string]struct {
		network, address, except string
		want                     bool
	}{
		"of another machine":            {"n", "192.0.2.1", "x", true},
		"on the second host":            {"n", "192.0.2.2", "x", true},
		"of the machine itself":         {"n", "192.0.2.1", "a", false},
		"of two machines":               {"n", "192.0.2.3", "again", true},
		"in another network":            {"m", "192.0.2.1", "x", false},
		"of nobody":                     {"n", "192.0.2.9", "x", false},
		"of a removed machine":          {"n", "192.0.2.4", "x", false},
		"the former address of another": {"n", "192.0.2.5", "x", false},
		"the new address of another":    {"n", "192.0.2.6", "x", true},
	} {
		if got := p.HasAddress(tc.network, tc.address, tc.except); got != tc.want {
			t.Errorf("%s: got %t, want %t", name, got, tc.want)
		}
	}
}
