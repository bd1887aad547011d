package connections

import (
	"capstan.dev/capstan/internal/host/hostpb"
)

// tally sums up the machines of a host. The sums change with each machine that comes or goes, so that placement, which asks every
// host, costs the same with any number of machines.
type tally struct {
	cpus         int32 // of the machines with a limit
	unlimited    int32 // machines that have all processors of the host
	memory, disk int64
	devices      map[string]int32 // CDI devices by kind
	// holders are the ids of the machines by network and address. A host can report any number of machines with one address, so they are a set.
	holders map[networkAddress]map[string]bool
}

// networkAddress is an address in a network of machines.
type networkAddress struct {
	network Network
	address string
}

// add counts a machine.
func (t *tally) add(m *hostpb.Machine) {
	t.count(m, 1)
	for _, a := range networkAddresses(m) {
		if t.holders == nil {
			t.holders = map[networkAddress]map[string]bool{}
		}
		if t.holders[a] == nil {
			t.holders[a] = map[string]bool{}
		}
		t.holders[a][m.GetSpec().GetId()] = true
	}
}

// remove takes back the count of a machine.
func (t *tally) remove(m *hostpb.Machine) {
	t.count(m, -1)
	for _, a := range networkAddresses(m) {
		if delete(t.holders[a], m.GetSpec().GetId()); len(t.holders[a]) == 0 {
			delete(t.holders, a)
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
func (t *tally) holds(a networkAddress, except string) bool {
	ids := t.holders[a]
	return len(ids) > 1 || len(ids) == 1 && !ids[except]
}

func networkAddresses(m *hostpb.Machine) (out []networkAddress) {
	network := NetworkOf(m.GetSpec().GetNetwork().GetId(), m.GetSpec().GetNetwork())
	for _, a := range m.GetSpec().GetAddresses() {
		out = append(out, networkAddress{network, a.GetAddress()})
	}
	return out
}
