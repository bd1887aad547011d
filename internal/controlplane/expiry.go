package controlplane

import (
	"cmp"
	"time"

	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	certexpiry "capstan.dev/capstan/internal/manager/expiry"
	"capstan.dev/capstan/internal/pki"
)

// defaultCertificateDays of the leaf certificates on control plane machines.
const defaultCertificateDays = 365

// reconcileExpiry shows when the certificates of a control plane expire. It returns when the condition may change by the
// passing of time alone.
func reconcileExpiry(s *scope) time.Duration { return showExpiry(s, s.fleet().members()) }

func showExpiry(s *scope, members []member) time.Duration {
	certificates := expirations(s, members)
	certexpiry.Record(kind, s.controlPlane.Namespace, s.controlPlane.Name, certificates)
	condition, again := certexpiry.Condition(certificates, "see docs/certificates.md for their renewal", now())
	conditions.Set(s.controlPlane, condition)
	return again
}

// expirations are those of the certificates that the provider sees: the authorities, the administrator's, and the first
// leaf certificate of each control plane machine.
func expirations(s *scope, members []member) []certexpiry.Certificate {
	var out []certexpiry.Certificate
	add := func(name string, pem []byte) {
		if c, err := certs.DecodeCertPEM(pem); err == nil && c != nil {
			out = append(out, certexpiry.Of(name, c))
		}
	}
	for _, purpose := range []secret.Purpose{secret.ClusterCA, secret.EtcdCA, secret.FrontProxyCA} {
		if c := s.certificates.GetByPurpose(purpose); c != nil && c.KeyPair != nil {
			add("secret "+secret.Name(s.cluster.Name, purpose), c.KeyPair.Cert)
		}
	}
	if s.access != nil {
		add("secret "+secret.Name(s.cluster.Name, secret.Kubeconfig), s.access.CertData)
	}
	validity := pki.Life(day * time.Duration(cmp.Or(s.controlPlane.Spec.Config.Cluster.CertificateValidityDays, defaultCertificateDays)))
	for _, m := range members {
		if at := m.certificatesExpire; !at.IsZero() {
			out = append(out, certexpiry.Certificate{Name: "machine " + m.name, NotBefore: at.Add(-validity), NotAfter: at})
		}
	}
	return out
}
