package host

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machinedisk"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/pki"
)

// scrapeTimeout bounds an answer, and the time for which one balancer can delay it.
const (
	scrapeTimeout         = 10 * time.Second
	balancerScrapeTimeout = 2 * time.Second
)

var (
	infoDesc         = desc("capstand_info", "Version of capstand and of its protocol; always 1.", "version", "protocol")
	machinesDesc     = desc("capstand_machines", "Machines by state: PENDING, RUNNING, RESTARTING, FAILED, DELETING.", "state")
	memoryDesc       = desc("capstand_memory_bytes", "Memory for machines by state: capacity, allocated.", "state")
	diskDesc         = desc("capstand_disk_bytes", "Disk of the host by state: capacity, allocated (the sum of the machines' disks), free.", "state")
	certificateDesc  = desc("capstand_certificate_expiration_timestamp_seconds", "Time at which a certificate of capstand expires, in seconds since 1970: server, and the authorities of clients client-ca and metrics-client-ca.", "certificate")
	restartsDesc     = desc("capstand_machine_restarts_total", "Restarts of PID 1 of a machine.", "namespace", "machine")
	serviceReadyDesc = desc("capstand_service_ready", "1 if a service of a machine is ready, else 0.", "namespace", "machine", "service")
	serviceDesc      = desc("capstand_service_restarts_total", "Restarts of a service of a machine since its PID 1 started.", "namespace", "machine", "service")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

func newStartSeconds() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "capstand_machine_start_seconds", Help: "Duration of a start of PID 1 of a machine, with the creation of its disk and network.",
		Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	})
}

// Metrics answers with the metrics of this host, of its machines and of its load balancers in Prometheus' text format.
func (h *Host) Metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(h.startSeconds, collector{h}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(prometheus.Gatherers{registry, prometheus.GathererFunc(h.balancerMetrics)}, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelWarn), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: 2, Timeout: scrapeTimeout,
	})
}

// collector reads the state of the host at each scrape.
type collector struct{ *Host }

// Describe implements prometheus.Collector. The collector is unchecked: the labels of machines come and go.
func (c collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	c.mu.Lock()
	info := c.machines.info()
	all := slices.Collect(maps.Values(c.machines.byID))
	c.mu.Unlock()
	gauge(infoDesc, 1, info.CapstandVersion, strconv.Itoa(int(info.ProtocolVersion)))
	gauge(memoryDesc, float64(info.MemoryBytes), "capacity")
	gauge(memoryDesc, float64(info.AllocatedMemoryBytes), "allocated")
	gauge(diskDesc, float64(info.DiskBytes), "capacity")
	gauge(diskDesc, float64(info.AllocatedDiskBytes), "allocated")
	if _, free, err := machinedisk.Space(c.config.Root); err == nil {
		gauge(diskDesc, float64(free), "free")
	}
	for name, path := range c.config.Certificates { // Other programs also renew the files.
		if certificate, err := pki.ReadCert(path); err == nil {
			gauge(certificateDesc, float64(certificate.NotAfter.Unix()), name)
		}
	}
	states := map[hostpb.MachineStatus_Phase]int{}
	for _, m := range all {
		snapshot := m.snapshot()
		states[snapshot.Status.Phase]++
		collectMachine(out, snapshot)
	}
	for phase, name := range hostpb.MachineStatus_Phase_name {
		if phase != int32(hostpb.MachineStatus_PHASE_UNSPECIFIED) {
			gauge(machinesDesc, float64(states[hostpb.MachineStatus_Phase(phase)]), name)
		}
	}
}

func collectMachine(out chan<- prometheus.Metric, m *hostpb.Machine) {
	labels := []string{m.Spec.Namespace, m.Spec.Name}
	out <- prometheus.MustNewConstMetric(restartsDesc, prometheus.CounterValue, float64(m.Status.Restarts), labels...)
	seen := map[string]bool{}
	for _, s := range m.Status.Services {
		if seen[s.Name] { // The users of a machine control this report.
			continue
		}
		seen[s.Name] = true
		ready := 0.0
		if s.State == string(machineapi.StateReady) {
			ready = 1
		}
		of := append(slices.Clone(labels), s.Name)
		out <- prometheus.MustNewConstMetric(serviceReadyDesc, prometheus.GaugeValue, ready, of...)
		out <- prometheus.MustNewConstMetric(serviceDesc, prometheus.CounterValue, float64(s.Restarts), of...)
	}
}

// balancerMetrics gathers the metrics of all load balancers, with the labels of their clusters. A balancer that does not answer is
// missing in the result.
func (h *Host) balancerMetrics() ([]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(context.Background(), balancerScrapeTimeout)
	defer cancel()
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.balancers.byID))
	h.mu.Unlock()
	type answer struct {
		families []*dto.MetricFamily
		err      error
	}
	answers := make(chan answer, len(all))
	for _, lb := range all {
		spec := lb.currentSpec()
		go func() {
			families, err := balancer.Scrape(ctx, lb.shared(), map[string]string{"namespace": spec.Namespace, "cluster": spec.Name})
			if err != nil {
				err = fmt.Errorf("load balancer %s/%s: %w", spec.Namespace, spec.Name, err)
			}
			answers <- answer{families, err}
		}()
	}
	var gatherers prometheus.Gatherers
	for range all {
		a := <-answers
		gatherers = append(gatherers, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return a.families, a.err }))
	}
	return gatherers.Gather()
}
