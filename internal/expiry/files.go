package expiry

import (
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/pki"
)

const (
	// KindWebhook labels the certificates with which a manager serves webhooks and metrics.
	KindWebhook = "Webhook"
	// KindManagementPlane labels the certificates of an embedded management plane.
	KindManagementPlane = "ManagementPlane"
)

// ReportFolder reports the certificates in the files *.crt of a folder from now on. The label name is the name of the
// folder, the label certificate that of the file. Other programs renew the files, so each scrape reads them again.
// Files that cannot be read or are not certificates are skipped.
func ReportFolder(kind, folder string) { reported.Store(filepath.Clean(folder), kind) }

// reported contains the kinds by folder.
var reported sync.Map

func init() { ctrlmetrics.Registry.MustRegister(files{}) }

// files collects the reported certificates.
type files struct{}

// description has the same metric name as the certificates of objects.
var description = prometheus.NewDesc(metricName, metricHelp, labels, nil)

// Describe implements prometheus.Collector. It sends no description: another collector has metrics of the same name, and
// the registry allows this only without a description.
func (files) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (files) Collect(metrics chan<- prometheus.Metric) {
	reported.Range(func(folder, kind any) bool {
		collect(kind.(string), folder.(string), metrics)
		return true
	})
}

func collect(kind, folder string, metrics chan<- prometheus.Metric) {
	for _, c := range read(folder) {
		metrics <- prometheus.MustNewConstMetric(description, prometheus.GaugeValue, float64(c.NotAfter.Unix()),
			kind, "", filepath.Base(folder), c.Name)
	}
}

// read returns the certificates of a folder by the names of their files.
func read(folder string) (certificates []Certificate) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.crt"))
	if err != nil {
		return nil // The pattern is invalid: no file has such a name.
	}
	for _, path := range paths {
		if c, err := pki.ReadCert(path); err == nil {
			certificates = append(certificates, Of(filepath.Base(path), c))
		}
	}
	return certificates
}

// Folders returns the condition of the certificates in all reported folders. It belongs to no object: the manager logs
// it and emits an event.
func Folders(now time.Time) metav1.Condition {
	var certificates []Certificate
	reported.Range(func(folder, _ any) bool {
		for _, c := range read(folder.(string)) {
			c.Name = filepath.Join(folder.(string), c.Name)
			certificates = append(certificates, c)
		}
		return true
	})
	slices.SortFunc(certificates, func(a, b Certificate) int { return strings.Compare(a.Name, b.Name) })
	condition, _ := Condition(certificates, "see docs/certificates.md for their renewal", now)
	return condition
}
