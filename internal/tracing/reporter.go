package tracing

import (
	"sync"
	"time"
)

// reporter reports the errors of OpenTelemetry, at most one per errorPause: a collector that is away causes one per batch.
type reporter struct {
	report func(error)

	mu   sync.Mutex
	next time.Time
}

// Handle implements otel.ErrorHandler.
func (r *reporter) Handle(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.After(r.next) {
		r.next = now.Add(errorPause)
		r.report(err)
	}
}
