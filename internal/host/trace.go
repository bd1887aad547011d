package host

import (
	"context"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"capstan.dev/capstan/internal/machineapi"
)

// Scopes of the spans that capstand sends.
const (
	hostScope = "capstan.dev/capstan/capstand"
	initScope = "capstan.dev/capstan/capstan-init"
)

// span starts a span of the trace in which the machine was requested. Without such a trace it is not recorded.
func (m *machine) span(scope, name string, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	ctx := trace.ContextWithSpanContext(context.Background(), m.trace)
	if !m.trace.IsValid() {
		return ctx, trace.SpanFromContext(ctx) // records nothing
	}
	options = append(options, trace.WithAttributes(
		attribute.String("k8s.namespace.name", m.spec.Namespace), attribute.String("capstan.name", m.spec.Name), attribute.String("capstan.machine.id", m.spec.Id)))
	return otel.Tracer(scope).Start(ctx, name, options...)
}

// traceBootstrap sends the spans of capstan-init, which the machine has reported: a machine has neither the address of the collector nor
// credentials for it. Its users control the times, so they count only between the start of the machine and now.
func (m *machine) traceBootstrap(t machineapi.Times, started, now time.Time, failed bool) {
	from, applied := within(t.Started, started, now), within(t.Applied, started, now)
	ctx, whole := m.span(initScope, "capstan-init", trace.WithTimestamp(from))
	if !whole.IsRecording() {
		return
	}
	_, data := otel.Tracer(initScope).Start(ctx, "Apply bootstrap data", trace.WithTimestamp(applied))
	if failed {
		whole.SetStatus(codes.Error, "")
		data.SetStatus(codes.Error, "")
	}
	end := within(t.Ended, applied, now)
	data.End(trace.WithTimestamp(end))
	whole.End(trace.WithTimestamp(end))
}

// within returns a time that is not before the first and not after the last one.
func within(t, first, last time.Time) time.Time {
	switch {
	case t.Before(first):
		return first
	case t.After(last):
		return last
	}
	return t
}
