package expiry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// TestCondition: a certificate that was not renewed after two thirds of its lifetime is reported. The result contains
// the time of the next check.
func TestCondition(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	of := func(name string, since, until time.Duration) Certificate {
		return Certificate{Name: name, NotBefore: now.Add(-since), NotAfter: now.Add(until)}
	}
	for name, c := range map[string]struct {
		certificates []Certificate
		status       metav1.ConditionStatus
		message      string
		again        time.Duration
	}{
		"none":                               {nil, metav1.ConditionFalse, "", 0},
		"new":                                {[]Certificate{of("a", 0, 300*time.Hour)}, metav1.ConditionFalse, "", 203 * time.Hour},
		"the earliest check first":           {[]Certificate{of("a", 0, 300*time.Hour), of("b", 0, 100*time.Hour)}, metav1.ConditionFalse, "", 67*time.Hour + 40*time.Minute},
		"before the deadline of the renewal": {[]Certificate{of("a", 201*time.Hour, 99*time.Hour)}, metav1.ConditionFalse, "", 2 * time.Hour},
		"two thirds":                         {[]Certificate{of("a", 203*time.Hour, 97*time.Hour), of("b", 0, 3*time.Hour)}, metav1.ConditionTrue, "a expires on 1970-01-16T14:46:40Z: why", 2*time.Hour + 108*time.Second},
		"expired":                            {[]Certificate{of("a", 2*time.Hour, -time.Hour)}, metav1.ConditionTrue, "a expires", 0},
	} {
		t.Run(name, func(t *testing.T) {
			got, again := Condition(c.certificates, "why", now)
			if got.Status != c.status || !strings.Contains(got.Message, c.message) || again.Round(time.Second) != c.again {
				t.Errorf("got %v, next check in %s", got, again)
			}
		})
	}
}

// TestRecord: the metric contains only current certificates. The series of a certificate that stays is not made again, so each scrape finds it.
func TestRecord(t *testing.T) {
	at := time.Unix(2_000_000, 0)
	Record("Kind", "ns", "a", []Certificate{{Name: "old", NotAfter: at}, {Name: "stays", NotAfter: at}})
	Record("Kind", "ns", "b", []Certificate{{Name: "other", NotAfter: at}})
	stays := expiration.WithLabelValues("Kind", "ns", "a", "stays")
	Record("Kind", "ns", "a", []Certificate{{Name: "stays", NotAfter: at}})
	if expiration.WithLabelValues("Kind", "ns", "a", "stays") != stays {
		t.Error("the series was removed and made again")
	}
	Forget("Kind", "ns", "b")
	if n := testutil.CollectAndCount(expiration); n != 1 {
		t.Errorf("%d series", n)
	}
	if got := testutil.ToFloat64(stays); got != 2_000_000 {
		t.Errorf("%f", got)
	}
	Forget("Kind", "ns", "a")
	if n := testutil.CollectAndCount(expiration); n != 0 {
		t.Errorf("%d series of a deleted object", n)
	}
}

// TestReportFolder: each scrape reads the files. The registry accepts their certificates together with those of objects.
func TestReportFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manager")
	write := func(validity time.Duration) float64 {
		t.Helper()
		if err := certfiles.EnsureAuthority(dir, "ca", "ca", time.Now()); err != nil {
			t.Fatal(err)
		}
		leaf := certfiles.Leaf{Name: "tls", CA: "ca", Leaf: pki.Leaf{CommonName: validity.String(), Usages: pki.Server}}
		if _, err := leaf.Ensure(dir, validity, time.Now()); err != nil {
			t.Fatal(err)
		}
		c, err := pki.ReadCert(filepath.Join(dir, "tls.crt"))
		if err != nil {
			t.Fatal(err)
		}
		return float64(c.NotAfter.Unix())
	}
	scrape := func() map[string]float64 {
		t.Helper()
		found := map[string]float64{}
		for _, s := range testmetrics.Gather(t, metricName, nil) {
			found[strings.Join([]string{s.Labels["certificate"], s.Labels["kind"], s.Labels["name"], s.Labels["namespace"]}, "|")] = s.Value
		}
		return found
	}
	Record("Kind", "ns", "a", []Certificate{{Name: "b", NotAfter: time.Unix(7, 0)}})
	defer Forget("Kind", "ns", "a")
	ReportFolder(KindWebhook, dir)
	ReportFolder(KindWebhook, dir+"/") // a second manager in the same process
	defer reported.Delete(dir)
	for _, validity := range []time.Duration{time.Hour, 2 * time.Hour} {
		at := write(validity)
		if err := os.WriteFile(filepath.Join(dir, "broken.crt"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		found := scrape()
		if len(found) != 3 || found["tls.crt|Webhook|manager|"] != at || found["ca.crt|Webhook|manager|"] == 0 || found["b|Kind|a|ns"] != 7 {
			t.Errorf("want tls.crt until %v, found %v", at, found)
		}
	}
}
