package host

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/version"
)

// scrape returns the lines of the metrics.
func scrape(t *testing.T, h *Host) string {
	t.Helper()
	answer := httptest.NewRecorder()
	h.Metrics().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if answer.Code != http.StatusOK {
		t.Fatalf("status %d: %s", answer.Code, answer.Body)
	}
	return answer.Body.String()
}

// A machine's users control what it reports, and the process of a load balancer is less privileged than capstand. Whatever they
// report, the other metrics are there.
func TestMetrics(t *testing.T) {
	h, _ := updatable(t)
	h.config.Root = t.TempDir()
	m := h.machines.byID["m-1"]
	m.setStatus(func(s *hostpb.MachineStatus) {
		s.Restarts = 3
		s.Services = serviceStatuses(machineapi.Status{Services: []machineapi.Service{
			{Name: "etcd", State: machineapi.StateReady, Restarts: 2}, {Name: "etcd"}, {Name: "a\"}\n"}, {Name: "kubelet", State: machineapi.StateBackoff},
		}})
	})
	h.startSeconds.Observe(0.3)
	lb := h.balancers.byID["n-1"]
	lb.dir = t.TempDir()
	if err := os.Mkdir(lb.shared(), 0o700); err != nil {
		t.Fatal(err)
	}
	const honest = "# TYPE capstan_balancer_connections gauge\ncapstan_balancer_connections 7\n"
	own := []string{
		`capstand_machines{state="RUNNING"} 1`, `capstand_machines{state="FAILED"} 0`,
		`capstand_memory_bytes{state="capacity"} 8.589934592e+09`, `capstand_memory_bytes{state="allocated"} 1.073741824e+09`,
		`capstand_disk_bytes{state="free"} `, `,version="` + version.Version + `"} 1`,
		`capstand_machine_restarts_total{machine="one",namespace="default"} 3`,
		`capstand_service_ready{machine="one",namespace="default",service="etcd"} 1`,
		`capstand_service_ready{machine="one",namespace="default",service="kubelet"} 0`,
		`capstand_service_restarts_total{machine="one",namespace="default",service="etcd"} 2`,
		`capstand_machine_start_seconds_bucket{le="0.5"} 1`, `capstand_machine_start_seconds_bucket{le="0.25"} 0`,
	}
	for name, test := range map[string]struct {
		body  string
		serve func(path string) string
		want  bool
	}{
		"no balancer": {},
		"its metrics": {body: honest, serve: func(path string) string { return path }, want: true},
		"a link to another socket": {body: honest, serve: func(path string) string {
			other := filepath.Join(t.TempDir(), "other.sock")
			if err := os.Symlink(other, path); err != nil {
				t.Fatal(err)
			}
			return other
		}},
		"metrics of capstand": {body: honest + "# TYPE capstand_info gauge\ncapstand_info{version=\"evil\"} 1\n", serve: func(path string) string { return path }, want: true},
		"no metrics":          {body: "<html>", serve: func(path string) string { return path }},
		"too much":            {body: honest + strings.Repeat("# x\n", 1<<20) + "capstan_balancer_sources 1\n", serve: func(path string) string { return path }},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(lb.shared(), balancer.MetricsSocket)
			_ = os.Remove(path)
			if test.serve != nil {
				serveMetrics(t, test.serve(path), test.body)
			}
			text := scrape(t, h)
			for _, want := range own {
				if !strings.Contains(text, want) {
					t.Errorf("expected %s in\n%s", want, text)
				}
			}
			if got := strings.Contains(text, `capstan_balancer_connections{cluster="demo",namespace="default"} 7`); got != test.want {
				t.Errorf("the metrics of the balancer are there: %v, in\n%s", got, text)
			}
			if strings.Contains(text, "evil") || strings.Contains(text, "capstan_balancer_sources") {
				t.Errorf("refused metrics are there:\n%s", text)
			}
		})
	}
}

// TestCertificateMetrics: each scrape reads the files again. A file that is missing or broken has no metric.
func TestCertificateMetrics(t *testing.T) {
	h, _ := updatable(t)
	dir := t.TempDir()
	h.config.Root = dir
	h.config.Certificates = map[string]string{"server": filepath.Join(dir, "tls.crt"), "client-ca": filepath.Join(dir, "missing.crt"), "metrics-client-ca": filepath.Join(dir, "broken.crt")}
	if err := os.WriteFile(filepath.Join(dir, "broken.crt"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := certfiles.EnsureAuthority(dir, "ca", "ca", time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, validity := range []time.Duration{time.Hour, 2 * time.Hour} { // Another name makes another certificate.
		leaf := certfiles.Leaf{Name: "tls", CA: "ca", Leaf: pki.Leaf{CommonName: validity.String(), Usages: pki.Server}}
		if _, err := leaf.Ensure(dir, validity, time.Now()); err != nil {
			t.Fatal(err)
		}
		c, err := pki.ReadCert(filepath.Join(dir, "tls.crt"))
		if err != nil {
			t.Fatal(err)
		}
		text := scrape(t, h)
		want := "capstand_certificate_expiration_timestamp_seconds{certificate=\"server\"} " + strconv.FormatFloat(float64(c.NotAfter.Unix()), 'g', -1, 64)
		if !strings.Contains(text, want) || strings.Count(text, "capstand_certificate_expiration_timestamp_seconds{") != 1 {
			t.Errorf("want only %s, found %s", want, text)
		}
	}
}

func serveMetrics(t *testing.T, path, body string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(body)) })}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
}
