package reconciling

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// BuildWithoutDelay builds a controller that serves the next event of an object at once after a success or a conflict, also if the object
// was not reconciled because it is paused or came too early. All that its objects wait for are events, and with ReconcilerRateLimiting of
// Cluster API each step would start up to a second later. CapstanMachines that are ready, and CapstanMachinePools, have a slower pace,
// which their reconcilers set: each of their many events would be a reconcile.
func BuildWithoutDelay(ctx context.Context, b *capicontroller.Builder, r reconcile.Reconciler) (capicontroller.Controller, error) {
	return BuildWithPause(ctx, b, r, 0)
}

// BuildWithPause is BuildWithoutDelay with a pause between the end of a reconcile and the next one of the object. It is for events that users of
// workload clusters cause, as often as they want.
func BuildWithPause(ctx context.Context, b *capicontroller.Builder, r reconcile.Reconciler, pause time.Duration) (capicontroller.Controller, error) {
	p := &withoutDelay{Reconciler: r, pause: pause}
	c, err := b.Build(ctx, p)
	p.controller = c
	return c, err
}

type withoutDelay struct {
	reconcile.Reconciler
	pause      time.Duration
	controller interface {
		DeferNextReconcile(ctrl.Request, time.Time)
	}
}

// Reconcile implements reconcile.Reconciler. A conflict follows from the write of another controller, mostly of core, whose event is
// about to come. The queue delays repeated conflicts.
func (w *withoutDelay) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	result, err := w.Reconciler.Reconcile(ctx, req)
	if err == nil || apierrors.IsConflict(err) {
		w.controller.DeferNextReconcile(req, time.Now().Add(w.pause))
	}
	return result, err
}
