package connections

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"capstan.dev/capstan/internal/host/hostpb"
)

// pulsesPerSilence is the number of pulses in the time after which a host is silent.
const pulsesPerSilence = 3

// heartbeat contains the last answer of a host to a pulse. Only hosts with addresses of Services get pulses, because only these addresses
// move soon after a loss.
type heartbeat struct {
	// on: the host gets pulses.
	on bool
	// heard is when the last answered pulse was sent.
	heard time.Time
	// reported: an event has reported the silence.
	reported bool
}

// Silence returns for how long the host has not answered: since the last answered pulse, or since the loss of the connection if the
// host gets none. The clock is monotonic.
func (h *Host) Silence() time.Duration {
	h.mu.RLock()
	defer h.mu.RUnlock()
	switch {
	case h.heartbeat.on:
		return time.Since(h.heartbeat.heard)
	case h.err == nil:
		return 0
	}
	return time.Since(h.since)
}

// noteServices starts pulses if a host has an address of a Service; h.mu is held.
func (h *Host) noteServices(list *hostpb.SetServicesRequest) {
	own := func(s *hostpb.PublishedService) bool { return !s.GetHostPorts() }
	if h.err == nil && !h.heartbeat.on && slices.ContainsFunc(list.GetServices(), own) {
		h.heartbeat = heartbeat{on: true, heard: time.Now()}
	}
}

// sendPulses sends pulses until ctx ends.
func (h *Host) sendPulses(ctx context.Context) {
	ticker := time.NewTicker(h.silence / pulsesPerSilence)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		h.mu.RLock()
		due, heard := h.err == nil && h.heartbeat.on, h.heartbeat.heard
		h.mu.RUnlock()
		if due {
			h.pulse(ctx, heard)
		}
	}
}

// pulse sends one pulse and waits for its answer. A host whose answers do not arrive gets no further pulse either, so both notice the
// loss. An event follows when the host falls silent, and when it answers in time again.
func (h *Host) pulse(ctx context.Context, heard time.Time) {
	notice := time.AfterFunc(time.Until(heard.Add(h.silence)), func() { h.noteSilence(time.Time{}) })
	defer notice.Stop()
	sent := time.Now()
	_, err := h.Pulse(ctx, &hostpb.PulseRequest{})
	if err == nil || Code(err) == codes.Unimplemented { // An older capstand answers, too.
		h.noteSilence(sent)
	}
}

// noteSilence records when the last answered pulse was sent, if it was answered, and reports a change.
func (h *Host) noteSilence(sent time.Time) {
	h.mu.Lock()
	b := &h.heartbeat
	if sent.After(b.heard) {
		b.heard = sent
	}
	silent := time.Since(b.heard) >= h.silence
	changed := h.err == nil && b.on && silent != b.reported
	if changed {
		b.reported = silent
	}
	h.mu.Unlock()
	if changed {
		h.notify(Event{Host: h.name, Silence: true})
	}
}
