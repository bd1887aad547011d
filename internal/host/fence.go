package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
)

// reachWait is the time in which another box must answer.
const reachWait = 2 * time.Second

// SetFencing sets after how long without contact the machines of a management cluster stop.
func (h *Host) SetFencing(_ context.Context, req *hostpb.SetFencingRequest) (*hostpb.SetFencingResponse, error) {
	if err := admission.CheckFencing(req); err != nil {
		return nil, err
	}
	changed, err := h.fence.Set(req.ManagementCluster, req.StopAfterSeconds)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "recording the fencing: %v", err)
	}
	if changed {
		h.log.Info("Fencing set", "managementCluster", req.ManagementCluster, "stopAfterSeconds", req.StopAfterSeconds)
		h.mu.Lock()
		defer h.mu.Unlock()
		h.broadcaster.Publish(events.Host(h.machines.info()))
	}
	return &hostpb.SetFencingResponse{}, nil
}

// ListContacts returns the last probes of other hosts in a network, and asks their boxes whether they still answer.
func (h *Host) ListContacts(ctx context.Context, req *hostpb.ListContactsRequest) (*hostpb.ListContactsResponse, error) {
	if err := admission.CheckID("network", req.NetworkId); err != nil {
		return nil, err
	}
	h.mu.Lock()
	overlays := h.networks.overlays()
	h.mu.Unlock()
	across := h.networks.acrossHosts(overlays)
	var here *fencing.Network
	if i := slices.IndexFunc(across, func(n fencing.Network) bool { return n.ID == req.NetworkId }); i >= 0 {
		here = &across[i]
	}
	contacts, recorded := h.fence.Contacts(req.NetworkId, here)
	res := &hostpb.ListContactsResponse{RecordedMilliseconds: recorded.Milliseconds(), Contacts: make([]*hostpb.Contact, len(contacts))}
	ctx, cancel := context.WithTimeout(ctx, reachWait)
	defer cancel()
	var all sync.WaitGroup
	for i, c := range contacts {
		res.Contacts[i] = &hostpb.Contact{Host: c.Host, AgeMilliseconds: c.Age.Milliseconds(), Fencing: fencingOf(c.Settings), Peer: c.Peer}
		if c.Peer {
			all.Go(func() { res.Contacts[i].Reachable = fencing.Reachable(ctx, c.Own, c.Address) })
		}
	}
	all.Wait()
	return res, nil
}

func fencingOf(s fencing.Settings) (out []*hostpb.Fencing) {
	for _, id := range slices.Sorted(maps.Keys(s)) {
		out = append(out, &hostpb.Fencing{ManagementCluster: id, StopAfterSeconds: s[id]})
	}
	return out
}

// overlays returns the networks that can be on several hosts; mu is held.
func (ns *networks) overlays() (out []*hostpb.Network) {
	for _, n := range ns.byID {
		if n.Overlay != nil {
			out = append(out, n)
		}
	}
	return out
}

// acrossHosts returns the networks that other hosts have too. It reads files, for which no caller holds mu while capstand serves
// requests.
func (ns *networks) acrossHosts(overlays []*hostpb.Network) (out []fencing.Network) {
	ids := map[string]bool{}
	for _, n := range overlays {
		ids[n.Id] = true
		own, others, err := ns.neighbours(n)
		if ns.neighbourErrors.news(n.Id, err) {
			ns.log.Error("The other hosts of a network are unknown: its machines are not stopped without contact", "id", n.Id, "error", err)
		}
		if len(others) > 0 {
			out = append(out, fencing.Network{ID: n.Id, Own: own, Hosts: others})
		}
	}
	ns.neighbourErrors.keep(ids)
	return out
}

// lastErrors are the last errors of objects, so that an error which lasts is logged once. Its methods are safe for concurrent use.
type lastErrors struct {
	mu   sync.Mutex
	byID map[string]string
}

// news reports whether an object has another error than at the last call, and remembers the error.
func (l *lastErrors) news(id string, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		delete(l.byID, id)
		return false
	}
	if l.byID[id] == err.Error() {
		return false
	}
	if l.byID == nil {
		l.byID = map[string]string{}
	}
	l.byID[id] = err.Error()
	return true
}

// keep forgets the errors of other objects.
func (l *lastErrors) keep(ids map[string]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.byID, func(id, _ string) bool { return !ids[id] })
}

// keepFenced probes the other hosts, and stops the machines that have no contact any more, until ctx ends.
func (h *Host) keepFenced(ctx context.Context) {
	defer h.fence.Close()
	ticker := time.NewTicker(fencing.Pause)
	defer ticker.Stop()
	for {
		h.fenceStep(ctx)
		h.fence.KeepGuard(h.config.Logging)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// fenceStep does one round. Machines end in their own goroutines.
func (h *Host) fenceStep(ctx context.Context) {
	h.mu.Lock()
	overlays, byID := h.networks.overlays(), maps.Clone(h.machines.byID)
	h.mu.Unlock()
	h.fence.SetNetworks(h.networks.acrossHosts(overlays))
	var all []fencing.Machine
	for _, m := range byID { // Also a machine that is being deleted: its pods can have a long time to stop.
		all = append(all, m.leased())
	}
	for _, id := range h.fence.Step(all) {
		h.running.Go(func() { byID[id].stopFenced(ctx) })
	}
}

// leased is the machine as fencing sees it.
func (m *machine) leased() fencing.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := fencing.Machine{ID: m.spec.Id, Network: m.spec.Network.GetId(), ManagementCluster: m.state.ManagementCluster}
	if m.broken != "" { // Its management cluster is unknown, and it may run.
		out.ManagementCluster = m.host.fence.Any()
	}
	return out
}

// stopFenced stops the machine until a manager confirms it.
func (m *machine) stopFenced(ctx context.Context) {
	if !m.beginStop() {
		return
	}
	unmarked, alive := m.host.fence.Stop(ctx, m.spec.Id, m.kill)
	if unmarked != nil {
		m.log.Error("Cannot record that fencing stops the machine: a capstand that starts can start it again", "error", unmarked)
	}
	if alive != nil {
		m.log.Error("Cannot stop the machine; capstand tries again", "error", alive)
		m.mu.Lock()
		m.fenced = false
		m.mu.Unlock()
	}
	m.wake.Send()
}

// beginStop returns whether fencing must stop the machine now.
func (m *machine) beginStop() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fenced {
		return false
	}
	m.fenced, m.unconfirmed = true, true
	m.log.Warn("Stopping the machine: this host has reached neither a manager nor another host of the cluster for too long",
		"stopAfter", m.host.fence.StopAfter(m.state.ManagementCluster))
	return true
}

// kill ends all processes of the machine.
func (m *machine) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return m.endProcesses(ctx)
}

// noticeMark lets a machine wait that the guard has stopped, and returns whether fencing has stopped the machine.
func (m *machine) noticeMark() (fenced bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.fenced && m.host.fence.Marked(m.spec.Id) {
		m.fenced, m.unconfirmed = true, true
	}
	return m.fenced
}

// stayFenced reports that the machine waits for a manager. It ends a machine that still runs, because a capstand ended between the
// mark and the end of the machine.
func (m *machine) stayFenced(life context.Context) time.Duration {
	if err := m.kill(life); err != nil {
		m.log.Error("Cannot stop the machine; capstand tries again", "error", err)
		return fencing.Pause
	}
	after := m.host.fence.StopAfter(m.leased().ManagementCluster)
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Phase, s.Unconfirmed, s.Fenced, s.Pid, s.Services = hostpb.MachineStatus_PENDING, true, true, 0, nil
		s.Message = fmt.Sprintf("the host stopped the machine, because it had reached neither a manager nor another host of the cluster for %s: it starts when a manager confirms it", after)
	})
	return forever
}
