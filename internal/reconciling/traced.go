package reconciling

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Traced returns a reconciler whose reconciles are the first spans of traces. The text of an error is not part of a span.
func Traced(kind string, r reconcile.Reconciler) reconcile.Reconciler {
	tracer := otel.Tracer("capstan.dev/capstan/manager")
	return reconcile.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
		ctx, span := tracer.Start(ctx, "Reconcile "+kind, trace.WithNewRoot(), trace.WithAttributes(
			attribute.String("capstan.kind", kind), attribute.String("k8s.namespace.name", request.Namespace), attribute.String("capstan.name", request.Name)))
		defer span.End()
		result, err := r.Reconcile(ctx, request)
		if err != nil {
			span.SetStatus(codes.Error, "")
		}
		return result, err
	})
}
