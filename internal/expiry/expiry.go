// Package expiry shows when the certificates of an object expire: in a metric, and in a condition once two thirds of
// their life are over. By then each of them should have been renewed.
//
// Layer: reconciler.
package expiry

import (
	"crypto/x509"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/pki"
)

const (
	// ConditionType is true when a certificate of the object should have been renewed by now.
	ConditionType = "CertificatesExpiring"
	// ExpiringReason means that the message names the certificates, and when they expire.
	ExpiringReason = "CertificatesExpiring"
	// NotExpiringReason means that each certificate has more than a third of its life before it.
	NotExpiringReason = "CertificatesNotExpiring"
)

const (
	metricName = "capstan_certificate_expiration_timestamp_seconds"
	metricHelp = "Time at which a certificate expires, in seconds since 1970."
)

var labels = []string{"kind", "namespace", "name", "certificate"}

var expiration = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricName, Help: metricHelp}, labels)

func init() { ctrlmetrics.Registry.MustRegister(expiration) }

// Certificate is one of an object.
type Certificate struct {
	// Name for people, and the label of the metric: the name of a Secret's key for instance.
	Name string
	// NotBefore and NotAfter are its life.
	NotBefore, NotAfter time.Time
}

// Of a parsed certificate.
func Of(name string, c *x509.Certificate) Certificate {
	return Certificate{Name: name, NotBefore: c.NotBefore, NotAfter: c.NotAfter}
}

// Due is when two thirds of its life are over.
func (c Certificate) Due() time.Time { return pki.Due(c.NotBefore, c.NotAfter) }

// grace is for how long a certificate that is due may wait for its renewal.
func (c Certificate) grace() time.Duration { return c.NotAfter.Sub(c.NotBefore) / 100 }

// Condition for the certificates, and after how long it may change by the passing of time alone; zero: never. why is added
// to the message of certificates that expire: what keeps them from being renewed, or what to do.
func Condition(certificates []Certificate, why string, now time.Time) (condition metav1.Condition, again time.Duration) {
	var expiring []string
	for _, c := range certificates {
		late := c.Due().Add(c.grace())
		if in := late.Sub(now); in > 0 {
			if again == 0 || in < again {
				again = in
			}
			continue
		}
		expiring = append(expiring, fmt.Sprintf("%s expires on %s", c.Name, c.NotAfter.UTC().Format(time.RFC3339)))
	}
	if len(expiring) == 0 {
		return metav1.Condition{Type: ConditionType, Status: metav1.ConditionFalse, Reason: NotExpiringReason}, again
	}
	message := strings.Join(expiring, ", ")
	if why != "" {
		message += ": " + why
	}
	return metav1.Condition{Type: ConditionType, Status: metav1.ConditionTrue, Reason: ExpiringReason, Message: message}, again
}

// Record sets the metric of an object to these certificates, and to no others.
func Record(kind, namespace, name string, certificates []Certificate) {
	Forget(kind, namespace, name)
	for _, c := range certificates {
		expiration.WithLabelValues(kind, namespace, name, c.Name).Set(float64(c.NotAfter.Unix()))
	}
}

// Forget removes the metric of an object.
func Forget(kind, namespace, name string) {
	expiration.DeletePartialMatch(prometheus.Labels{"kind": kind, "namespace": namespace, "name": name})
}
