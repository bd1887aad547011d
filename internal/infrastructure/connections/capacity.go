package connections

import (
	"cmp"

	"capstan.dev/capstan/internal/host/hostpb"
)

// Resources are the parts of a host that a machine has. With CPUs 0 it has all processors of the host.
type Resources struct {
	CPUs         int32
	Memory, Disk int64            // in bytes
	Devices      map[string]int32 // CDI devices by kind
}

// Promise sets resources aside for a machine that is about to be made, until the host has it: the
// host's own account lags behind placement. Release takes it back.
func (h *Host) Promise(id string, r Resources) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machines[id] == nil {
		h.promised[id] = r
	}
}

// PromiseGrowth sets the memory aside that a machine of the host gets by an update in place, until the host reports it.
// bytes is the machine's memory after the update. Release takes it back.
func (h *Host) PromiseGrowth(id string, bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.machines[id]; m != nil && m.GetSpec().GetMemoryBytes() < bytes {
		h.promised[id] = Resources{Memory: bytes}
	}
}

// kept drops the promise of a machine that has the promised memory.
func (h *Host) kept(m *hostpb.Machine) {
	if id := m.GetSpec().GetId(); h.promised[id].Memory <= m.GetSpec().GetMemoryBytes() {
		delete(h.promised, id)
	}
}

// Release takes a promise back.
func (h *Host) Release(id string) {
	h.mu.Lock()
	before := h.exclusive()
	delete(h.promised, id)
	more := h.exclusive().exceeds(before)
	h.mu.Unlock()
	if more {
		h.notify(Event{Host: h.name, Capacity: true})
	}
}

// exclusive returns the free resources that machines do not share; mu is held. An Event reports each increase.
func (h *Host) exclusive() Resources {
	return Resources{Memory: h.freeMemory(), Devices: h.freeDevices()}
}

// exceeds reports whether r has more memory, or more devices of a kind, than before.
func (r Resources) exceeds(before Resources) bool {
	if r.Memory > before.Memory {
		return true
	}
	for kind, n := range r.Devices {
		if n > before.Devices[kind] {
			return true
		}
	}
	return false
}

// FreeMemory returns the free memory for new machines, in bytes. Promised memory counts as used. An Event reports each
// increase.
func (h *Host) FreeMemory() int64 {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.freeMemory()
}

// freeMemory uses the higher of two sums, that of the manager and that of the host, because either may contain a
// machine first. A promised machine that the host has already created is in both and counts once. The promised growth of a
// machine is in neither.
func (h *Host) freeMemory() int64 {
	used := h.sums.memory
	var growth int64
	for id, r := range h.promised {
		if m := h.machines[id]; m != nil {
			growth += max(0, r.Memory-m.GetSpec().GetMemoryBytes())
			continue
		}
		used += r.Memory
	}
	return h.info.GetMemoryBytes() - max(used, h.info.GetAllocatedMemoryBytes()) - growth
}

// Free returns the resources for new machines. CPUs and Disk are for comparisons of hosts only: machines share the processors, and their
// disks occupy only written blocks, so both can be negative.
func (h *Host) Free() Resources {
	h.mu.RLock()
	defer h.mu.RUnlock()
	all := h.info.GetCpus()
	free := Resources{
		CPUs: all - h.sums.cpus - h.sums.unlimited*all, Memory: h.freeMemory(), Disk: h.info.GetDiskBytes() - h.sums.disk,
		Devices: h.freeDevices(),
	}
	for id, r := range h.promised {
		if h.machines[id] == nil {
			free.CPUs -= cmp.Or(r.CPUs, all)
			free.Disk -= r.Disk
		}
	}
	return free
}
