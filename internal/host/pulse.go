package host

import (
	"context"
	"sync"
	"time"

	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/hostpb"
)

// pulses are those of the managers. Its methods are safe for concurrent use.
type pulses struct {
	mu sync.Mutex
	// last is the time of the last one; 0 if there was none. The clock is that of fencing, which continues while the host is suspended.
	last time.Duration
	// lapsed: there was a gap before the last one, in which a manager may have moved addresses to another host.
	lapsed bool
}

// Pulse implements hostpb.HostServer.
func (h *Host) Pulse(context.Context, *hostpb.PulseRequest) (*hostpb.PulseResponse, error) {
	h.pulses.receive(boottime.Now())
	return &hostpb.PulseResponse{}, nil
}

func (p *pulses) receive(now time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lapsed = p.lapsed || p.last == 0 || now-p.last > hostpb.PulseLease
	p.last = now
}

// managed reports whether a manager leaves the addresses of Services to this host. watched: a manager is connected. After a gap, the
// answer is false once, so that the host asks the network for its addresses before it announces them again. A manager without pulses is
// older than they are.
func (p *pulses) managed(now time.Duration, watched bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !watched || p.last == 0 {
		return watched
	}
	lapsed := p.lapsed || now-p.last > hostpb.PulseLease
	p.lapsed = false
	return !lapsed
}
