// Package wakeup wakes a goroutine after changes that it does not need to count.
//
// Layer: library. Allowed imports: api.
package wakeup

// Signal has room for one value: several calls of Send before the receiver reads are one value. The receiver then reads
// the current state, so no change is lost.
type Signal chan struct{}

// New returns a Signal.
func New() Signal { return make(Signal, 1) }

// Send wakes the receiver. It never blocks.
func (s Signal) Send() {
	select {
	case s <- struct{}{}:
	default: // The receiver has not read the previous value yet.
	}
}
