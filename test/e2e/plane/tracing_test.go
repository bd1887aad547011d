//go:build e2e

package plane

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"capstan.dev/capstan/internal/testenv/otlpreceiver"
)

// testTraces: one trace leads from the reconcile of a machine's object over the call of its host to the boot of the machine. The
// spans contain no secrets.
func (i *installation) testTraces(receiver *otlpreceiver.Receiver) {
	t := i.t
	var trace map[string]otlpreceiver.Span
	spans := receiver.Await(t, time.Minute, func(spans []otlpreceiver.Span) bool {
		for _, s := range spans {
			if trace = traceOf(spans, s.Trace()); trace["Apply bootstrap data"].Span != nil && trace["Reconcile CapstanMachine"].Span != nil {
				return true
			}
		}
		return false
	})
	for _, want := range []struct{ service, name, parent string }{
		{"capstan-manager", "Reconcile CapstanMachine", ""},
		{"capstan-manager", "client capstan.host.v1.Host/EnsureMachine", "Reconcile CapstanMachine"},
		{"capstand", "server capstan.host.v1.Host/EnsureMachine", "client capstan.host.v1.Host/EnsureMachine"},
		{"capstand", "Start machine", "server capstan.host.v1.Host/EnsureMachine"},
		{"capstand", "capstan-init", "server capstan.host.v1.Host/EnsureMachine"},
		{"capstand", "Apply bootstrap data", "capstan-init"},
	} {
		s, found := trace[want.name]
		if !found || s.Service != want.service || !bytes.Equal(s.ParentSpanId, trace[want.parent].GetSpanId()) {
			t.Errorf("%s of %s below %s: found %v", want.name, want.service, want.parent, s)
			continue
		}
		t.Logf("%6d ms  %s: %s", (s.EndTimeUnixNano-s.StartTimeUnixNano)/1e6, s.Service, s.Name)
	}
	for _, s := range spans {
		for _, secret := range []string{"PRIVATE KEY", "#cloud-config", "BEGIN CERTIFICATE"} {
			if strings.Contains(s.String(), secret) {
				t.Errorf("the span %s contains %s", s.Name, secret)
			}
		}
	}
}

// testWithoutTraces ends the traces and the feature gate of core.
func (i *installation) testWithoutTraces() {
	i.capstan("up", "--tracing-endpoint", "none", "--core-feature-gates", "none")
	i.testTaintsOfMachines(false)
	for _, c := range []string{"manager", "capstand"} {
		if out, err := run("ps", "-o", "args=", "-p", strconv.Itoa(i.component(c).PID)); err != nil || strings.Contains(out, "--tracing") {
			i.t.Errorf("%s after the end of traces: %s, %v", c, out, err)
		}
	}
}

// testTaintsOfMachines: the webhook of core accepts taints of a Machine only with the feature gate MachineTaintPropagation.
func (i *installation) testTaintsOfMachines(accepted bool) {
	i.t.Helper()
	file := filepath.Join(i.t.TempDir(), "machine.json")
	if err := os.WriteFile(file, []byte(`{"apiVersion":"cluster.x-k8s.io/v1beta2","kind":"Machine","metadata":{"name":"m","namespace":"default"},"spec":{"clusterName":"c",
		"bootstrap":{"dataSecretName":"s"},"infrastructureRef":{"apiGroup":"a.b","kind":"C","name":"d"},
		"taints":[{"key":"example.com/a","effect":"NoSchedule","propagation":"Always"}]}}`), 0o600); err != nil {
		i.t.Fatal(err)
	}
	const refusal = "when the feature gate MachineTaintPropagation is disabled"
	_, err := i.tryKubectl("create", "--dry-run=server", "-f", file)
	if got := err == nil; got != accepted || !accepted && !strings.Contains(err.Error(), refusal) {
		i.t.Errorf("core accepts taints of Machines: %v, want %v; %v", got, accepted, err)
	}
}

// traceOf returns the spans of a trace by name. Both sides of a call have the same name, so theirs has the side in front of it.
func traceOf(spans []otlpreceiver.Span, id string) map[string]otlpreceiver.Span {
	out := map[string]otlpreceiver.Span{}
	for _, s := range spans {
		if s.Trace() != id {
			continue
		}
		name := s.Name
		if side, ok := map[string]string{"SPAN_KIND_CLIENT": "client ", "SPAN_KIND_SERVER": "server "}[s.Kind.String()]; ok {
			name = side + name
		}
		out[name] = s
	}
	return out
}
