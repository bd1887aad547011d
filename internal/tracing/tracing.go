// Package tracing sends spans to an OpenTelemetry collector, if an administrator has named one. Without a collector its
// functions do nothing. Spans have names of objects and methods as attributes, and no content.
//
// Layer: library. Allowed imports: api.
package tracing

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/stats"

	"capstan.dev/capstan/internal/tracing/collector"
)

const (
	// maxQueued is the number of spans that wait for the collector. Further spans are dropped, so that a collector that is away
	// costs neither time nor memory.
	maxQueued = 2048
	// exportTimeout bounds one attempt to send spans, and the wait for the last spans at the end of the process.
	exportTimeout = 5 * time.Second
	// errorPause is the shortest time between two reports of a collector that does not accept spans.
	errorPause = time.Minute
)

// Start starts to send the spans of this process. stop sends the last ones.
func Start(ctx context.Context, f collector.Flags, service, version string, report func(error)) (stop func(), err error) {
	if f.Endpoint == "" {
		return func() {}, nil
	}
	if err := f.Check(); err != nil {
		return nil, err
	}
	transport := otlptracegrpc.WithInsecure()
	if config, err := f.TLS(); err != nil {
		return nil, err
	} else if config != nil {
		transport = otlptracegrpc.WithTLSCredentials(credentials.NewTLS(config))
	}
	// The exporter does not wait for the collector. It gives up a batch after exportTimeout, and the next one takes its place.
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(f.Endpoint), transport, otlptracegrpc.WithTimeout(exportTimeout),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{Enabled: false}))
	if err != nil {
		return nil, fmt.Errorf("--tracing-endpoint %s: %w", f.Endpoint, err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(float64(f.SamplingRate)/collector.PerMillion))),
		sdktrace.WithBatcher(exporter, sdktrace.WithMaxQueueSize(maxQueued), sdktrace.WithExportTimeout(exportTimeout)),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", service), attribute.String("service.version", version))),
	)
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetErrorHandler(&reporter{report: report})
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exportTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			report(fmt.Errorf("the last spans were not sent: %w", err))
		}
	}, nil
}

// traced leaves out calls that last as long as a connection, and those that are sent all the time.
func traced(info *stats.RPCTagInfo) bool {
	return !strings.HasSuffix(info.FullMethodName, "/Watch") && !strings.HasSuffix(info.FullMethodName, "/Pulse")
}

// ClientOption makes a gRPC client continue traces.
func ClientOption() grpc.DialOption {
	return grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithFilter(traced)))
}

// ServerOption makes a gRPC server continue the traces of its clients.
func ServerOption() grpc.ServerOption {
	return grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithFilter(traced)))
}
