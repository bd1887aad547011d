package connections

import (
	"slices"

	"capstan.dev/capstan/internal/host/hostpb"
)

// tally sums up the machines of a host. The sums change with each machine that comes or goes, so that placement, which asks every
// host, costs the same with any number of machines.
type tally struct {
	cpus         int32 // of the machines with a limit
	unlimited    int32 // machines that have all processors of the host
	memory, disk int64
	devices      map[string]int32 // CDI devices by kind
	// holders are the ids of the machines by network and address. A host that reports one address twice has two.
	holders map[place][]string
}

// place is an address in a network of machines.
type place struct{ network, address string }

// add counts a machine.
func (t *tally) add(m *hostpb.Machine) {
	t.count(m, 1)
	for _, p := range places(m) {
		if t.holders == nil {
			t.holders = map[place][]string{}
		}
		t.holders[p] = append(t.holders[p], m.GetSpec().GetId())
	}
}

// remove takes back the count of a machine.
func (t *tally) remove(m *hostpb.Machine) {
	t.count(m, -1)
	for _, p := range places(m) {
		i := slices.Index(t.holders[p], m.GetSpec().GetId())
		if i < 0 {
			continue
		}
		if t.holders[p] = slices.Delete(t.holders[p], i, i+1); len(t.holders[p]) == 0 {
			delete(t.holders, p)
		}
	}
}

func (t *tally) count(m *hostpb.Machine, sign int32) {
	spec := m.GetSpec()
	if spec.GetCpus() == 0 {
		t.unlimited += sign
	}
	t.cpus += sign * spec.GetCpus()
	t.memory += int64(sign) * spec.GetMemoryBytes()
	t.disk += int64(sign) * spec.GetDiskBytes()
	for kind, n := range CDIDevices(spec.GetDevices()) {
		if t.devices == nil {
			t.devices = map[string]int32{}
		}
		if t.devices[kind] += sign * n; t.devices[kind] == 0 {
			delete(t.devices, kind)
		}
	}
}

// holds reports whether a machine other than except has an address.
func (t *tally) holds(p place, except string) bool {
	return slices.ContainsFunc(t.holders[p], func(id string) bool { return id != except })
}

func places(m *hostpb.Machine) (out []place) {
	for _, a := range m.GetSpec().GetAddresses() {
		out = append(out, place{network: m.GetSpec().GetNetwork().GetId(), address: a.GetAddress()})
	}
	return out
}
