package host

import (
	"bytes"
	"context"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/otlpreceiver"
	"capstan.dev/capstan/internal/tracing"
	tracingto "capstan.dev/capstan/internal/tracing/collector"
)

// capstand sends what capstan-init did in the trace of the call that created the machine, once. The users of a machine control its
// report, so its times count only after the start of the machine and before now.
func TestTraceOfBootstrap(t *testing.T) {
	receiver := otlpreceiver.Start(t)
	stop, err := tracing.Start(t.Context(), tracingto.Flags{Endpoint: receiver.Endpoint, SamplingRate: tracingto.PerMillion, Insecure: true}, "capstand", "v1", func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	m := onDisk(t, recorded(t))
	ctx, call := otel.Tracer("test").Start(t.Context(), "EnsureMachine")
	m.trace = trace.SpanContextFromContext(ctx)
	began := time.Now().Add(-time.Minute)
	m.state.StartedAt = began
	life, end := context.WithCancel(t.Context())
	report := machineapi.Status{Bootstrap: machineapi.Started, Times: machineapi.Times{Started: began.Add(-time.Hour), Applied: began.Add(time.Millisecond)}}
	m.heard(life, report)
	report.Bootstrap, report.Times.Ended = machineapi.Failed, began.Add(time.Hour)
	m.heard(life, report)
	m.heard(life, report)
	end()
	m.host.running.Wait()
	call.End()
	stop()
	spans := map[string]otlpreceiver.Span{}
	for _, s := range receiver.Spans() {
		if s.Trace() != call.SpanContext().TraceID().String() {
			t.Errorf("%s is not a part of the trace", s.Name)
		}
		spans[s.Name] = s
	}
	whole, data := spans["capstan-init"], spans["Apply bootstrap data"]
	if len(receiver.Spans()) != 3 || whole.Span == nil || data.Span == nil {
		t.Fatalf("spans %v", receiver.Spans())
	}
	if !bytes.Equal(whole.ParentSpanId, spans["EnsureMachine"].SpanId) || !bytes.Equal(data.ParentSpanId, whole.SpanId) || whole.Scope != initScope {
		t.Errorf("%v, %v", whole, data)
	}
	if int64(whole.StartTimeUnixNano) != began.UnixNano() || int64(data.StartTimeUnixNano) != began.Add(time.Millisecond).UnixNano() || time.Unix(0, int64(whole.EndTimeUnixNano)).After(time.Now()) {
		t.Errorf("times %v, %v", whole, data)
	}
	if whole.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || whole.Status.GetMessage() != "" {
		t.Errorf("status %v", whole.Status)
	}
}
