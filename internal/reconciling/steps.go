package reconciling

import (
	"context"
	"errors"
)

// ErrWaiting ends a reconcile that an event will continue. A condition names the event.
var ErrWaiting = errors.New("waiting")

// RunSteps runs the steps of a contract in their order, until one returns an error. Each step completes, or returns ErrWaiting after it
// has set a condition that names the missing prerequisite.
func RunSteps[S any](ctx context.Context, scope S, steps ...func(context.Context, S) error) error {
	for _, step := range steps {
		if err := step(ctx, scope); err != nil {
			return err
		}
	}
	return nil
}

// IgnoreWaiting returns nil for ErrWaiting, and other errors as they are.
func IgnoreWaiting(err error) error {
	if errors.Is(err, ErrWaiting) {
		return nil
	}
	return err
}
