package connections

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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

// TestHolders: an address is taken in the network of a cluster by any machine of any host but the asking one. The id of another cluster is no
// evidence.
func TestHolders(t *testing.T) {
	machine := func(id, namespace, address string) *hostpb.Machine {
		return &hostpb.Machine{Spec: &hostpb.MachineSpec{
			Id: id, Network: &hostpb.Network{Id: "n", Namespace: namespace, Name: "c"}, Addresses: []*hostpb.Address{{Address: address}},
		}}
	}
	one, two := &Host{}, &Host{}
	one.keepAll(machine("a", "ns", "192.0.2.1"), machine("twice", "ns", "192.0.2.3"), machine("again", "ns", "192.0.2.3"), machine("gone", "ns", "192.0.2.4"))
	two.keepAll(machine("b", "ns", "192.0.2.2"), machine("moved", "ns", "192.0.2.5"), machine("copy", "other", "192.0.2.7"))
	one.dropMachine("gone")
	two.keepAll(machine("moved", "ns", "192.0.2.6"))
	p := &Pool{hosts: map[string]*Host{"one": one, "two": two}}
	network := Network{"n", "ns", "c"}
	for name, tc := range map[string]struct {
		network         Network
		address, except string
		want            []string
	}{
		"of another machine":             {network, "192.0.2.1", "x", []string{"one"}},
		"on the second host":             {network, "192.0.2.2", "x", []string{"two"}},
		"of the machine itself":          {network, "192.0.2.1", "a", nil},
		"of two machines":                {network, "192.0.2.3", "again", []string{"one"}},
		"in another network":             {Network{"m", "ns", "c"}, "192.0.2.1", "x", nil},
		"of a cluster with another name": {Network{"n", "ns", "d"}, "192.0.2.1", "x", nil},
		"of a cluster elsewhere":         {network, "192.0.2.7", "x", nil},
		"of nobody":                      {network, "192.0.2.9", "x", nil},
		"of a removed machine":           {network, "192.0.2.4", "x", nil},
		"the former address of another":  {network, "192.0.2.5", "x", nil},
		"the new address of another":     {network, "192.0.2.6", "x", []string{"two"}},
	} {
		if got := p.Holders(tc.network, tc.address, tc.except); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}
