package connections

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

// pulsesPerSilence is the number of pulses in the time after which a host is silent.
const pulsesPerSilence = 3

// maxPulsed bounds heartbeat.networks to two megabytes, because a host can report any number of networks. A host with so many gets pulses in
// any case.
const maxPulsed = 4096

var errSilent = errors.New("the host does not answer")

// heartbeat contains the last answer of a host to a pulse. Only hosts that have addresses of Services, or can get them from a lost host,
// get pulses, because only these addresses move soon after a loss.
type heartbeat struct {
	// networks for which the host gets pulses.
	networks map[Network]bool
	// heard is the time at which the last answered pulse was sent.
	heard time.Time
	// answers ends with fallSilent, when the host falls silent. An event has then reported the silence.
	answers    context.Context
	fallSilent context.CancelFunc
}

func newHeartbeat() heartbeat {
	b := heartbeat{networks: map[Network]bool{}}
	b.listen()
	return b
}

// listen lets calls take their time again.
func (b *heartbeat) listen() { b.answers, b.fallSilent = context.WithCancel(context.Background()) }

// SetPulses starts pulses for a network, whose Services have or can get addresses on the host, or ends them. A host gets pulses as long as
// it gets them for a network. A new connection has none.
func (h *Host) SetPulses(network Network, wanted bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.heartbeat
	switch {
	case h.err != nil || b.networks[network] == wanted || wanted && len(b.networks) == maxPulsed:
	case wanted:
		if len(b.networks) == 0 {
			b.heard = time.Now()
			select {
			case h.beat <- struct{}{}:
			default: // It was not received yet.
			}
		}
		b.networks[network] = true
	default:
		delete(b.networks, network)
		if len(b.networks) == 0 {
			b.listen()
		}
	}
}

// Silence returns for how long the host has not answered: since the last answered pulse, or since the loss of the connection if the
// host gets none. The clock is monotonic.
func (h *Host) Silence() time.Duration {
	h.mu.RLock()
	defer h.mu.RUnlock()
	switch {
	case len(h.heartbeat.networks) > 0:
		return time.Since(h.heartbeat.heard)
	case h.err == nil:
		return 0
	}
	return time.Since(h.since)
}

// SilenceError returns nil while the host is connected and not silent, and the reason otherwise.
func (h *Host) SilenceError() error {
	if err := h.ConnectionError(); err != nil {
		return err
	}
	if h.Silence() >= h.silence {
		return errSilent
	}
	return nil
}

// unlessSilent ends a call when the host falls silent, long before the connection ends: the caller has work for other hosts. Pulses are
// the exception, because they notice the return.
func (h *Host) unlessSilent(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if method == hostpb.Host_Pulse_FullMethodName {
		return invoke(ctx, method, req, reply, conn, opts...)
	}
	h.mu.RLock()
	answers := h.heartbeat.answers
	h.mu.RUnlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(answers, func() { cancel(errSilent) })()
	err := invoke(ctx, method, req, reply, conn, opts...)
	if err != nil && errors.Is(context.Cause(ctx), errSilent) {
		return status.Error(codes.Unavailable, errSilent.Error())
	}
	return err
}

// sendPulses sends pulses until ctx ends. Most hosts get none, and need no timer.
func (h *Host) sendPulses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.beat:
			h.sendWantedPulses(ctx)
		}
	}
}

// sendWantedPulses sends pulses until none are wanted or the connection is lost.
func (h *Host) sendWantedPulses(ctx context.Context) {
	ticker := time.NewTicker(h.silence / pulsesPerSilence)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		h.mu.RLock()
		due, heard := h.err == nil && len(h.heartbeat.networks) > 0, h.heartbeat.heard
		h.mu.RUnlock()
		if !due {
			return
		}
		h.pulse(ctx, heard)
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
	changed := h.err == nil && len(b.networks) > 0 && silent != (b.answers.Err() != nil)
	switch {
	case changed && silent:
		b.fallSilent()
	case changed:
		b.listen()
	}
	h.mu.Unlock()
	if changed {
		h.notify(Event{Host: h.name, Silence: true})
	}
}
