package machine

import (
	"time"

	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/host/hostpb"
)

// showCertificates reports when the certificates of the machine expire. It returns after how long the condition may change
// without an event; zero: never. A machine that reports none, because its PID 1 is of an older version, has no condition.
func showCertificates(m *infrav1.CapstanMachine, status *hostpb.MachineStatus, now time.Time) (again time.Duration) {
	certificates := certificatesOf(status)
	if len(certificates) == 0 {
		conditions.Delete(m, infrav1.CertificatesExpiringCondition)
		return 0
	}
	expiry.Record(infrav1.MachineKind, m.Namespace, m.Name, certificates)
	condition, again := expiry.Condition(certificates, "the machine has not renewed them: see /var/log/capstan/node-agent.log and kubelet.log with `capstan logs`", now)
	conditions.Set(m, condition)
	return again
}

// certificatesOf leaves out repeated names: one name is one metric.
func certificatesOf(status *hostpb.MachineStatus) []expiry.Certificate {
	var out []expiry.Certificate
	seen := map[string]bool{}
	for _, c := range status.GetCertificates() {
		if !seen[c.GetName()] {
			out = append(out, expiry.Certificate{Name: c.GetName(), NotBefore: c.GetNotBefore().AsTime(), NotAfter: c.GetNotAfter().AsTime()})
		}
		seen[c.GetName()] = true
	}
	return out
}
