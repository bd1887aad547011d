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
	kinds := h.info.GetDevices()
	if len(kinds) == 0 {
		return nil
	}
	promised := map[string]int32{}
	for id, r := range h.promised {
		if h.machines[id] != nil {
			continue
		}
		for kind, n := range r.Devices {
			promised[kind] += n
		}
	}
	out := make(map[string]int32, len(kinds))
	for _, k := range kinds {
		out[k.GetName()] = k.GetCount() - max(h.sums.devices[k.GetName()]+promised[k.GetName()], k.GetAllocated())
	}
	return out
}
