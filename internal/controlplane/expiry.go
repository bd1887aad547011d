package controlplane

import (
	"cmp"
	"context"
	"time"

	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	certexpiry "capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/pki"
)

// defaultCertificateDays of the leaf certificates on control plane machines.
const defaultCertificateDays = 365

// reconcileExpiry reports the expiry of the certificates of a control plane. Time alone changes the condition, so the step
// runs again.
func reconcileExpiry(_ context.Context, s *scope) (result, error) {
	return requeueAfter(showExpiry(s, s.Fleet().Members())), nil
}

func showExpiry(s *scope, members []model.Member) time.Duration {
	certificates := expirations(s, members)
	certexpiry.Record(controlplanev1.ControlPlaneKind, s.Object.Namespace, s.Object.Name, certificates)
	condition, again := certexpiry.Condition(certificates, "see docs/certificates.md for their renewal", s.Now)
	conditions.Set(s.Object, condition)
	return again
}

// expirations returns the expiry of the known certificates: the authorities, the client certificate for an external etcd, the
// administrator's certificate, and the first certificate of each control plane machine.
func expirations(s *scope, members []model.Member) []certexpiry.Certificate {
	var out []certexpiry.Certificate
	add := func(name string, pem []byte) {
		if c, err := certs.DecodeCertPEM(pem); err == nil && c != nil {
			out = append(out, certexpiry.Of(name, c))
		}
	}
	for _, purpose := range []secret.Purpose{secret.ClusterCA, secret.EtcdCA, secret.FrontProxyCA, secret.APIServerEtcdClient} {
		if c := s.certificates.GetByPurpose(purpose); c != nil && c.KeyPair != nil {
			add("secret "+secret.Name(s.Cluster.Name, purpose), c.KeyPair.Cert)
		}
	}
	if s.access != nil {
		add("secret "+secret.Name(s.Cluster.Name, secret.Kubeconfig), s.access.CertData)
	}
	validity := pki.Life(model.Day * time.Duration(cmp.Or(s.Object.Spec.Config.Cluster.CertificateValidityDays, defaultCertificateDays)))
	for _, m := range members {
		if at := m.CertificatesExpire; !at.IsZero() {
			out = append(out, certexpiry.Certificate{Name: "machine " + m.Name, NotBefore: at.Add(-validity), NotAfter: at})
		}
	}
	return out
}
