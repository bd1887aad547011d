// Package otlpreceiver is a collector for tests: it serves the protocol OTLP over gRPC and keeps the spans.
//
// Layer: test. Allowed imports: all.
package otlpreceiver

import (
	"context"
	"encoding/hex"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Span is a received span with the name of the service that sent it.
type Span struct {
	*tracepb.Span

	Service, Scope string
}

// Trace is the id of the span's trace.
func (s Span) Trace() string { return hex.EncodeToString(s.TraceId) }

// Receiver is a running collector.
type Receiver struct {
	collectorpb.UnimplementedTraceServiceServer

	// Endpoint is its address.
	Endpoint string

	mu      sync.Mutex
	spans   []Span
	arrived chan struct{}
}

// Start starts a collector until the end of the test.
func Start(t *testing.T, options ...grpc.ServerOption) *Receiver {
	t.Helper()
	r, stop, err := Serve(options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return r
}

// Serve starts a collector until stop is called.
func Serve(options ...grpc.ServerOption) (r *Receiver, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	r = &Receiver{Endpoint: listener.Addr().String(), arrived: make(chan struct{}, 1)}
	server := grpc.NewServer(options...)
	collectorpb.RegisterTraceServiceServer(server, r)
	go func() { _ = server.Serve(listener) }()
	return r, server.Stop, nil
}

// Export implements the service of OTLP.
func (r *Receiver) Export(_ context.Context, request *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resource := range request.ResourceSpans {
		service := ""
		for _, attribute := range resource.GetResource().GetAttributes() {
			if attribute.Key == "service.name" {
				service = attribute.Value.GetStringValue()
			}
		}
		for _, scope := range resource.ScopeSpans {
			for _, span := range scope.Spans {
				r.spans = append(r.spans, Span{span, service, scope.GetScope().GetName()})
			}
		}
	}
	select {
	case r.arrived <- struct{}{}:
	default:
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// Spans returns the spans that have arrived.
func (r *Receiver) Spans() []Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.spans)
}

// Await waits until the spans that have arrived are enough.
func (r *Receiver) Await(t *testing.T, within time.Duration, enough func([]Span) bool) []Span {
	t.Helper()
	for end := time.After(within); ; {
		if spans := r.Spans(); enough(spans) {
			return spans
		}
		select {
		case <-r.arrived:
		case <-end:
			for _, s := range r.Spans() {
				t.Logf("%s %s %s %s", s.Trace(), s.Service, s.Scope, s.Name)
			}
			t.Fatal("the expected spans have not arrived")
		}
	}
}
