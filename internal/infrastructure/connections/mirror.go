package connections

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/host/hostpb"
)

// present are the ids of the objects that a host has reported in a stream and still has. They are part of the mirror, and bounded with it.
type present struct{ machines, loadBalancers map[string]bool }

func newPresent() present { return present{map[string]bool{}, map[string]bool{}} }

func (p present) note(e *hostpb.Event) {
	switch o := e.GetObject().(type) {
	case *hostpb.Event_Machine:
		p.machines[o.Machine.GetSpec().GetId()] = true
		if e.GetType() == hostpb.Event_DELETED {
			delete(p.machines, o.Machine.GetSpec().GetId())
		}
	case *hostpb.Event_LoadBalancer:
		p.loadBalancers[o.LoadBalancer.GetId()] = true
		if e.GetType() == hostpb.Event_DELETED {
			delete(p.loadBalancers, o.LoadBalancer.GetId())
		}
	}
}

// apply takes one event into the mirror and passes on the changes that it makes.
func (h *Host) apply(e *hostpb.Event) {
	for _, change := range h.mirror(e) {
		h.notify(change)
	}
}

// mirror takes one event into the mirror, and returns the changes.
func (h *Host) mirror(e *hostpb.Event) (changes []Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	gone := e.GetType() == hostpb.Event_DELETED
	before, usable := h.exclusive(), incompatible(h.info) == nil
	object, changed, claimed := Event{Host: h.name}, false, false
	switch o := e.GetObject().(type) {
	case *hostpb.Event_Machine:
		object.Machine = o.Machine
		have := h.machines[o.Machine.GetSpec().GetId()]
		claimed = have != nil && have.GetStatus().GetManagementCluster() != o.Machine.GetStatus().GetManagementCluster()
		h.mirrorMachine(o.Machine, gone)
	case *hostpb.Event_LoadBalancer:
		object.LoadBalancer = o.LoadBalancer
		if gone {
			drop(h, h.loadBalancers, o.LoadBalancer.GetId())
		} else {
			keep(h, h.loadBalancers, o.LoadBalancer.GetId(), o.LoadBalancer)
		}
	case *hostpb.Event_Host:
		keepBoot(h.info, o.Host, time.Now())
		changed = !proto.Equal(h.info, o.Host)
		h.bytes += memory(o.Host) - memory(h.info)
		h.info = o.Host
	}
	if object.Machine != nil || object.LoadBalancer != nil {
		changes = append(changes, object)
	}
	// Connected depends on the versions too, and machines in deletion wait for it, not for capacity.
	if h.err == nil && usable != (incompatible(h.info) == nil) {
		changes = append(changes, Event{Host: h.name, Connection: true})
	}
	if h.err == nil && (changed || h.exclusive().exceeds(before)) {
		changes = append(changes, Event{Host: h.name, Capacity: true})
	}
	if claimed {
		changes = append(changes, Event{Host: h.name, Claimed: true})
	}
	return changes
}

// keepBoot replaces the time of the boot by that of the manager's clock, because the clock of a host can be wrong. A boot keeps its time, and
// the uptime is left out: otherwise each report would be a change.
func keepBoot(before, report *hostpb.HostInfo, received time.Time) {
	switch up := time.Duration(report.GetUptimeMilliseconds()) * time.Millisecond; {
	case report.GetBootId() != "" && report.GetBootId() == before.GetBootId():
		report.BootedAt = before.GetBootedAt()
	case up > 0:
		report.BootedAt = timestamppb.New(received.Add(-up))
	}
	report.UptimeMilliseconds = 0
}

// mirrorMachine takes a machine into the mirror, or removes it; h.mu is held.
func (h *Host) mirrorMachine(m *hostpb.Machine, gone bool) {
	if !gone {
		h.keepMachine(m)
		h.kept(m)
		return
	}
	h.removals++
	h.forget(NetworkOf(m.GetSpec().GetNetwork().GetId(), m.GetSpec().GetNetwork())) // the host may remove a network together with its last machine
	h.dropMachine(m.GetSpec().GetId())
	delete(h.promised, m.GetSpec().GetId())
}

// keepMachine puts a machine into the mirror; h.mu is held.
func (h *Host) keepMachine(m *hostpb.Machine) {
	id := m.GetSpec().GetId()
	h.dropMachine(id)
	keep(h, h.machines, id, m)
	h.sums.add(m)
}

// keepAnswer puts a machine from an answer into the mirror, unless the mirror is full; h.mu is held. Only the end of the stream empties it.
func (h *Host) keepAnswer(m *hostpb.Machine) error {
	if h.bytes+memory(m) > maxMirrorBytes {
		return errTooMuch
	}
	h.keepMachine(m)
	return nil
}

// dropMachine removes a machine from the mirror; h.mu is held.
func (h *Host) dropMachine(id string) {
	if m, found := h.machines[id]; found {
		h.sums.remove(m)
		drop(h, h.machines, id)
	}
}

// holds reports whether a machine of the host other than except has an address.
func (h *Host) holds(a networkAddress, except string) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.sums.holds(a, except)
}

// keep puts an object into the mirror; h.mu is held.
func keep[T proto.Message](h *Host, mirror map[string]T, id string, object T) {
	drop(h, mirror, id)
	mirror[id] = object
	h.bytes += memory(object)
}

// drop removes an object from the mirror; h.mu is held.
func drop[T proto.Message](h *Host, mirror map[string]T, id string) {
	if object, found := mirror[id]; found {
		h.bytes -= memory(object)
		delete(mirror, id)
	}
}

// bound empties the mirror of a host that reports too much, and returns an error.
func (h *Host) bound() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bytes <= maxMirrorBytes {
		return nil
	}
	h.info, h.bytes = nil, 0
	clear(h.machines)
	h.sums = tally{}
	clear(h.loadBalancers)
	clear(h.services)
	return errTooMuch
}

// synced drops the objects that the host no longer has, and marks the host as connected.
func (h *Host) synced(has present) {
	var lost []Event
	h.mu.Lock()
	h.err, h.noClaims = nil, false
	h.spans, h.heartbeat = map[Network]*span{}, newHeartbeat()
	for network := range h.services {
		h.dropServices(network)
	}
	h.forgotten++
	for id, m := range h.machines {
		if !has.machines[id] {
			h.dropMachine(id)
			lost = append(lost, Event{Host: h.name, Machine: m})
		}
	}
	for id, lb := range h.loadBalancers {
		if !has.loadBalancers[id] {
			drop(h, h.loadBalancers, id)
			lost = append(lost, Event{Host: h.name, LoadBalancer: lb})
		}
	}
	h.mu.Unlock()
	for _, e := range lost {
		h.notify(e)
	}
	h.notify(Event{Host: h.name, Connection: true})
}
