package machine

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// TestShowCertificates: if a certificate of a machine is not renewed after two thirds of its life, a condition names it. Each
// certificate has a metric.
func TestShowCertificates(t *testing.T) {
	now := time.Now()
	t.Cleanup(func() { expiry.Forget(infrav1.MachineKind, "default", "worker") })
	of := func(name string, since, left time.Duration) *hostpb.CertificateStatus {
		return &hostpb.CertificateStatus{Name: name, NotBefore: timestamppb.New(now.Add(-since)), NotAfter: timestamppb.New(now.Add(left))}
	}
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "worker"}}
	for _, c := range []struct {
		what    string
		found   []*hostpb.CertificateStatus
		status  metav1.ConditionStatus // "" for no condition
		message string                 // the beginning of the message
		again   time.Duration
		metrics int
	}{
		{"new ones", []*hostpb.CertificateStatus{of("kubelet-client", 0, 300*time.Hour), of("clients/kube-proxy", 0, 600*time.Hour)}, metav1.ConditionFalse, "", 203 * time.Hour, 2},
		{"one is due", []*hostpb.CertificateStatus{of("kubelet-client", 0, 300*time.Hour), of("clients/kube-proxy", 420*time.Hour, 180*time.Hour)},
			metav1.ConditionTrue, "clients/kube-proxy expires on ", 203 * time.Hour, 2},
		{"a name twice", []*hostpb.CertificateStatus{of("kubelet-client", 0, 300*time.Hour), of("kubelet-client", 0, time.Hour)}, metav1.ConditionFalse, "", 203 * time.Hour, 1},
		{"an older PID 1", nil, "", "", 0, 1},
	} {
		t.Run(c.what, func(t *testing.T) {
			again := showCertificates(m, &hostpb.MachineStatus{Certificates: c.found}, now)
			got := conditions.Get(m, infrav1.CertificatesExpiringCondition)
			switch {
			case c.status == "" && got != nil:
				t.Errorf("got the condition %+v, want none", got)
			case c.status != "" && (got == nil || got.Status != c.status || len(got.Message) < len(c.message) || got.Message[:len(c.message)] != c.message):
				t.Errorf("the condition is %+v, want %s %q", got, c.status, c.message)
			}
			if again.Round(time.Minute) != c.again {
				t.Errorf("got the next check after %s, want %s", again, c.again)
			}
			if n := len(testmetrics.Gather(t, "capstan_certificate_expiration_timestamp_seconds", nil)); n != c.metrics {
				t.Errorf("%d metrics, want %d", n, c.metrics)
			}
		})
	}
}
