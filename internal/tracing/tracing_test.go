package tracing_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/otlpreceiver"
	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/internal/tracing"
	"capstan.dev/capstan/internal/tracing/collector"
)

// start starts traces for a test. The returned function sends the last spans.
func start(t *testing.T, f collector.Flags) func() {
	t.Helper()
	stop, err := tracing.Start(t.Context(), f, "tested", "v1", func(err error) { t.Log(err) })
	if err != nil {
		t.Fatal(err)
	}
	return stop
}

// dial returns a client of a server. Both use the provider of spans of this moment: OpenTelemetry has one for the whole process.
func dial(t *testing.T) healthpb.HealthClient {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(tracing.ServerOption())
	healthpb.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), tracing.ClientOption())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return healthpb.NewHealthClient(conn)
}

// A call continues the trace of its caller. Watches are not traced. Without a collector nothing is sent.
func TestCalls(t *testing.T) {
	start(t, collector.Flags{})()
	if _, err := dial(t).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}

	receiver := otlpreceiver.Start(t)
	stop := start(t, collector.Flags{Endpoint: receiver.Endpoint, SamplingRate: collector.PerMillion, Insecure: true})
	client := dial(t)
	ctx, span := otel.Tracer("test").Start(t.Context(), "reconcile")
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	watching, cancel := context.WithCancel(ctx)
	watch, err := client.Watch(watching, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	for err == nil { // until the end of the stream
		_, err = watch.Recv()
	}
	span.End()
	stop()
	spans := receiver.Spans()
	if len(spans) != 3 {
		t.Fatalf("%d spans: %v", len(spans), spans)
	}
	for _, s := range spans {
		if s.Trace() != span.SpanContext().TraceID().String() || s.Service != "tested" || strings.Contains(s.Name, "Watch") {
			t.Errorf("%s %s of trace %s", s.Service, s.Name, s.Trace())
		}
	}
}

// Only the part of the traces that the administrator has chosen is recorded.
func TestSampling(t *testing.T) {
	receiver := otlpreceiver.Start(t)
	stop := start(t, collector.Flags{Endpoint: receiver.Endpoint, SamplingRate: 0, Insecure: true})
	_, span := otel.Tracer("test").Start(t.Context(), "reconcile")
	span.End()
	stop()
	if n := len(receiver.Spans()); n != 0 {
		t.Errorf("%d spans with the sampling rate 0", n)
	}
}

// A collector that does not accept connections, or never answers, costs no time. Spans above the limit of the queue are dropped.
func TestAbsentCollector(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, endpoint := range map[string]string{"closed": ports.Address(t), "silent": silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			var reports atomic.Int32
			stop, err := tracing.Start(t.Context(), collector.Flags{Endpoint: endpoint, SamplingRate: collector.PerMillion, Insecure: true}, "tested", "v1",
				func(error) { reports.Add(1) })
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			const spans = 10_000 // more than the queue holds; one wait for the collector takes longer than all of them
			for range spans {
				_, span := otel.Tracer("test").Start(t.Context(), "reconcile")
				span.End()
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("%d spans took %s", spans, took)
			}
			began = time.Now()
			stop()
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("the end took %s", took)
			}
			if n := reports.Load(); n > 2 {
				t.Errorf("%d reports of one problem", n)
			}
		})
	}
}

// The collector is known by its authority, and knows the process by its certificate.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"ca", "other"} {
		if err := certfiles.EnsureAuthority(dir, name, name, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	for _, leaf := range []certfiles.Leaf{
		{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: "collector", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usages: pki.Server}},
		{Name: "client", CA: "ca", Leaf: pki.Leaf{CommonName: "capstan", Usages: pki.Client}},
	} {
		if _, err := leaf.Ensure(dir, time.Hour, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := tls.LoadX509KeyPair(file("server.crt"), file("server.key"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(file("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(ca)
	transport := credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, MinVersion: tls.VersionTLS12})
	for name, test := range map[string]struct {
		flags   collector.Flags
		arrives bool
	}{
		"good":              {collector.Flags{CAFile: file("ca.crt"), CertFile: file("client.crt"), KeyFile: file("client.key")}, true},
		"another authority": {collector.Flags{CAFile: file("other.crt"), CertFile: file("client.crt"), KeyFile: file("client.key")}, false},
		"no certificate":    {collector.Flags{CAFile: file("ca.crt")}, false},
		"without TLS":       {collector.Flags{Insecure: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			receiver := otlpreceiver.Start(t, grpc.Creds(transport))
			test.flags.Endpoint, test.flags.SamplingRate = receiver.Endpoint, collector.PerMillion
			stop := start(t, test.flags)
			_, span := otel.Tracer("test").Start(t.Context(), "reconcile")
			span.End()
			stop()
			if got := len(receiver.Spans()) == 1; got != test.arrives {
				t.Errorf("the span has arrived: %v", got)
			}
		})
	}
}

// Wrong flags are errors that name the flag.
func TestWrongFlags(t *testing.T) {
	for want, flags := range map[string]collector.Flags{
		"--tracing-endpoint":                  {Endpoint: "collector"},
		"--tracing-sampling-rate-per-million": {Endpoint: "c:1", SamplingRate: 1_000_001},
		"--tracing-ca-file":                   {Endpoint: "c:1", CAFile: "/missing"},
		"--tracing-cert-file":                 {Endpoint: "c:1", CertFile: "/missing"},
		"--tracing-insecure":                  {Endpoint: "c:1", CAFile: "a", Insecure: true},
	} {
		if _, err := tracing.Start(t.Context(), flags, "tested", "v1", nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", flags, err, want)
		}
	}
}
