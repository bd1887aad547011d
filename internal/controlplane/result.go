package controlplane

import (
	"context"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/order"
)

// result is the report of a step to the steps after it, to the status and to the queue. Reconcile merges the results; no step
// changes the result of another one.
type result struct {
	// requeueAfter is the time after which the step has to run again without an event; 0 means never.
	requeueAfter time.Duration
	// stop: no later step may run in this reconciliation.
	stop bool
	// blocked is the reason why no Machine can be created or deleted now; "" when it can. The latest reason counts.
	blocked string
	// departing lists the obstacles of Machines and etcd members that have to go.
	departing []string
	// remediating lists the state of remediations.
	remediating []string
	// refused lists the in-place changes that Machines refused.
	refused []string
	// deletingReason and deletingMessage describe the progress of the deletion.
	deletingReason, deletingMessage string
}

func blocked(reason string) result { return result{blocked: reason} }

func requeueAfter(d time.Duration) result { return result{requeueAfter: d} }

// afterRefusal logs a refused change and returns nil. The step then runs again after a pause, because no event reports the end of a refusal.
// Other errors are returned: after repeated ones the next reconciliation can be many minutes away.
func (r *result) afterRefusal(ctx context.Context, err error) error {
	if !isRefused(err) {
		return err
	}
	ctrl.LoggerFrom(ctx).Error(err, "A change was refused")
	r.merge(requeueAfter(longestPause))
	return nil
}

// merge adds the result of a later step.
func (r *result) merge(later result) {
	r.requeueAfter = order.Sooner(r.requeueAfter, later.requeueAfter)
	r.stop = r.stop || later.stop
	if later.blocked != "" {
		r.blocked = later.blocked
	}
	r.departing = append(r.departing, later.departing...)
	r.remediating = append(r.remediating, later.remediating...)
	r.refused = append(r.refused, later.refused...)
	if later.deletingReason != "" {
		r.deletingReason, r.deletingMessage = later.deletingReason, later.deletingMessage
	}
}
