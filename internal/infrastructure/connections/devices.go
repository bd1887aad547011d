package connections

import (
	"capstan.dev/capstan/internal/host/hostpb"
)

// CDIDevices returns the number of CDI devices of a machine by kind.
func CDIDevices(devices []*hostpb.MachineDevice) map[string]int32 {
	var out map[string]int32
	for _, d := range devices {
		if d.IsNode() {
			continue
		}
		if out == nil {
			out = map[string]int32{}
		}
		out[d.GetName()] += d.GetCount()
	}
	return out
}

// freeDevices returns the free CDI devices of the host by kind; mu is held. As with memory, either the manager or the host may know
// a machine first, so the higher of two sums is used.
func (h *Host) freeDevices() map[string]int32 {
	var out map[string]int32
	used := map[string]int32{}
	for _, m := range h.machines {
		for kind, n := range CDIDevices(m.GetSpec().GetDevices()) {
			used[kind] += n
		}
	}
	for id, r := range h.promised {
		if h.machines[id] != nil {
			continue
		}
		for kind, n := range r.Devices {
			used[kind] += n
		}
	}
	for _, k := range h.info.GetDevices() {
		if out == nil {
			out = map[string]int32{}
		}
		out[k.GetName()] = k.GetCount() - max(used[k.GetName()], k.GetAllocated())
	}
	return out
}
