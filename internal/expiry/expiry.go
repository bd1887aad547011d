// Package expiry reports the expiry of an object's certificates: in a metric, and in a condition some time after two thirds
// of their lifetime. Each of them should have been renewed by then.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package expiry

import (
	"crypto/x509"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/reconciling"
)

const (
	metricName = "capstan_certificate_expiration_timestamp_seconds"
	metricHelp = "Time at which a certificate expires, in seconds since 1970."
)

var labels = []string{"kind", "namespace", "name", "certificate"}

var expiration = reconciling.NewObjectGauge(prometheus.GaugeOpts{Name: metricName, Help: metricHelp}, labels)

func init() { ctrlmetrics.Registry.MustRegister(expiration) }

// Certificate is a certificate of an object.
type Certificate struct {
	// Name is the name for users and the label of the metric, for example the name of a Secret's key.
	Name string
	// NotBefore and NotAfter bound the validity.
	NotBefore, NotAfter time.Time
}

// Of returns the Certificate of a parsed certificate.
func Of(name string, c *x509.Certificate) Certificate {
	return Certificate{Name: name, NotBefore: c.NotBefore, NotAfter: c.NotAfter}
}

// Due is the time after two thirds of its lifetime.
func (c Certificate) Due() time.Time { return pki.Due(c.NotBefore, c.NotAfter) }

// grace is the time for which a due certificate may wait for its renewal.
func (c Certificate) grace() time.Duration { return c.NotAfter.Sub(c.NotBefore) / 100 }

// Condition returns the condition of the certificates, and the time after which it may change without an event; zero
// means never. why is appended to the message about expiring certificates: the reason why they are not renewed, or the
// required action.
func Condition(certificates []Certificate, why string, now time.Time) (condition metav1.Condition, again time.Duration) {
	var expiring []string
	for _, c := range certificates {
		late := c.Due().Add(c.grace())
		if in := late.Sub(now); in > 0 {
			again = order.Sooner(again, in)
			continue
		}
		expiring = append(expiring, fmt.Sprintf("%s expires on %s", c.Name, c.NotAfter.UTC().Format(time.RFC3339)))
	}
	if len(expiring) == 0 {
		return metav1.Condition{Type: infrav1.CertificatesExpiringCondition, Status: metav1.ConditionFalse, Reason: infrav1.CertificatesNotExpiringReason}, again
	}
	message := strings.Join(expiring, ", ")
	if why != "" {
		message += ": " + why
	}
	return metav1.Condition{Type: infrav1.CertificatesExpiringCondition, Status: metav1.ConditionTrue, Reason: infrav1.CertificatesExpiringReason, Message: message}, again
}

// Record sets the metric of an object to exactly these certificates.
func Record(kind, namespace, name string, certificates []Certificate) {
	ends := map[string]float64{}
	for _, c := range certificates {
		ends[c.Name] = float64(c.NotAfter.Unix())
	}
	expiration.Show(ends, kind, namespace, name)
}

// Forget removes the metric of an object.
func Forget(kind, namespace, name string) { expiration.Forget(kind, namespace, name) }
