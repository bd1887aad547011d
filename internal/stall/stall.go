// Package stall ends waits that make no progress. A fixed limit is too short for a slow host or too long for a broken one.
//
// Layer: library. Allowed imports: api.
package stall

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Furthest contains the furthest rank that each part has reached. A part without a rank has rank 0.
type Furthest map[string]int

// Advance records the ranks and reports whether a part is further than ever before. A part that falls back and returns, for
// example a service that ends and starts again, is not. The number of advances is therefore bounded.
func (f Furthest) Advance(ranks map[string]int) bool {
	advanced := false
	for name, rank := range ranks {
		if rank > f[name] {
			f[name], advanced = rank, true
		}
	}
	return advanced
}

// Context returns a context that ends when advance was not called for the limit; without a limit it does not end on its own.
// Its cause is then a time limit (context.DeadlineExceeded).
func Context(ctx context.Context, limit time.Duration) (_ context.Context, advance func(), cancel context.CancelFunc) {
	ctx, end := context.WithCancelCause(ctx)
	if limit <= 0 {
		return ctx, func() {}, func() { end(nil) }
	}
	timer := time.AfterFunc(limit, func() { end(stalled(limit)) })
	return ctx, func() { timer.Reset(limit) }, func() {
		timer.Stop()
		end(nil)
	}
}

// Stalled reports whether the context ended because nothing advanced.
func Stalled(ctx context.Context) bool {
	var cause stalled
	return errors.As(context.Cause(ctx), &cause)
}

// stalled is the cause of a context that ended after this time without progress.
type stalled time.Duration

func (s stalled) Error() string { return fmt.Sprintf("no progress for %s", time.Duration(s)) }

// Is makes it a time limit, as that of context.WithTimeout.
func (s stalled) Is(target error) bool { return target == context.DeadlineExceeded }
