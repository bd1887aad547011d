package controlplane

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/keyutil"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/reconciling"
)

// noCertificates is the reason why no Machine is created. The condition CertificatesAvailable names the Secret.
const noCertificates = "certificates are not available"

// authorities is the step that provides the certificate authorities and the encryption key of a cluster.
type authorities struct {
	*clients
	*secrets
}

// reconcile creates the missing certificate authorities and the encryption key, and checks the existing ones (CP-15). It
// never overwrites one. Once the control plane is initialized it creates none, because the machines use the missing key, and
// a new one would not match.
func (r *authorities) reconcile(ctx context.Context, s *scope) (result, error) {
	problems, err := r.ensureCertificates(ctx, s)
	if err != nil {
		reconciling.SetCondition(s.Object, controlplanev1.CertificatesAvailableCondition, metav1.ConditionUnknown, clusterv1.InternalErrorReason, "%s", err)
		return blocked(noCertificates), err
	}
	if len(problems) > 0 {
		reconciling.SetCondition(s.Object, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, controlplanev1.CertificatesNotAvailableReason, "%s", strings.Join(problems, "; "))
		return result{blocked: noCertificates, stop: !s.Initialized()}, nil
	}
	reconciling.SetCondition(s.Object, controlplanev1.CertificatesAvailableCondition, metav1.ConditionTrue, controlplanev1.CertificatesAvailableReason, "")
	s.certified = true
	return result{}, nil
}

func (r *authorities) ensureCertificates(ctx context.Context, s *scope) (problems []string, err error) {
	s.certificates = bootstrap.Certificates(s.Object.Spec.Config.Cluster)
	for _, c := range s.certificates {
		problem, err := r.ensureCertificate(ctx, s, c)
		if err != nil {
			return nil, err
		}
		if problem != "" {
			problems = append(problems, problem)
		}
	}
	if render.NeedsEncryptionKey(s.Object.Spec.Config.Cluster.Encryption) {
		problem, err := r.ensureEncryptionKey(ctx, s)
		if err != nil {
			return nil, err
		}
		if problem != "" {
			problems = append(problems, problem)
		}
	}
	return problems, nil
}

// ensureCertificate creates one certificate authority, or describes the problem of the existing one.
func (r *authorities) ensureCertificate(ctx context.Context, s *scope, c *secret.Certificate) (problem string, err error) {
	name := secret.Name(s.Cluster.Name, c.Purpose)
	existing, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name})
	switch {
	case err != nil:
		return "", err
	case existing != nil:
		if !c.External {
			if err := r.ownSecret(ctx, s, existing); err != nil {
				return "", err
			}
		}
		c.KeyPair = &certs.KeyPair{Cert: existing.Data[secret.TLSCrtDataName], Key: existing.Data[secret.TLSKeyDataName]}
		if problem := checkCertificate(name, c, s.Now); problem != "" || c.Purpose != secret.ClusterCA {
			return problem, nil
		}
		s.Authority = existing
		state := s.Rotation()
		problem := model.CannotChangeAuthorities(name, state.Established, state.Target)
		if problem == "" {
			s.signer = c.KeyPair
		}
		return problem, nil
	case c.External:
		return fmt.Sprintf("the Secret %s does not exist: an external etcd needs it", name), nil
	case s.MustBeGiven(c.Purpose):
		return model.NotGiven(name), nil
	case s.Initialized():
		return fmt.Sprintf("the Secret %s was deleted, but the machines still use its content: restore it from a backup", name), nil
	}
	one := secret.Certificates{c}
	if err := one.Generate(); err != nil {
		return "", err
	}
	if c.Purpose == secret.ClusterCA {
		if c.KeyPair, err = newAuthority(s.Object.Spec, s.Now); err != nil {
			return "", err
		}
		s.signer = c.KeyPair
	}
	return "", one.SaveGenerated(ctx, r.Client, util.ObjectKey(s.Cluster), controllerRef(s.Object))
}

// checkCertificate describes the problem of a certificate authority, never any of its content.
func checkCertificate(name string, c *secret.Certificate, now time.Time) string {
	if c.Purpose == secret.ServiceAccount {
		return checkServiceAccountKeys(name, c)
	}
	if c.External && len(c.KeyPair.Key) == 0 {
		return "" // The authority of an external etcd: its key is not ours.
	}
	pair, err := pki.KeyPair(c.KeyPair.Cert, c.KeyPair.Key)
	if err != nil {
		return fmt.Sprintf("the Secret %s is broken: tls.crt is not a PEM certificate, or tls.key is not its key of at most 8 KiB", name)
	}
	cert, err := x509.ParseCertificate(pair.Certificate[0])
	switch {
	case err != nil:
		return fmt.Sprintf("the Secret %s is broken: tls.crt is not a certificate", name)
	case !cert.IsCA && c.Purpose != secret.APIServerEtcdClient:
		return fmt.Sprintf("the Secret %s is broken: its certificate is not one of a certificate authority", name)
	case now.After(cert.NotAfter):
		return fmt.Sprintf("the certificate in the Secret %s has expired at %s", name, cert.NotAfter.UTC().Format("2006-01-02"))
	}
	return ""
}

func checkServiceAccountKeys(name string, c *secret.Certificate) string {
	broken := fmt.Sprintf("the Secret %s is broken: tls.key needs a PEM private key of at most 8 KiB, and tls.crt its public key", name)
	public, err := keyutil.ParsePublicKeysPEM(c.KeyPair.Cert)
	if err != nil {
		return broken
	}
	if pki.CheckKeySize(c.KeyPair.Key) != nil {
		return broken
	}
	// The public part of the private key.
	private, err := keyutil.ParsePublicKeysPEM(c.KeyPair.Key)
	if err != nil || !equalKeys(public[0], private[0]) {
		return broken
	}
	return ""
}

func equalKeys(a, b any) bool {
	x, err := x509.MarshalPKIXPublicKey(a)
	if err != nil {
		return false
	}
	y, err := x509.MarshalPKIXPublicKey(b)
	return err == nil && bytes.Equal(x, y)
}

// ensureEncryptionKey creates the key that encrypts resources in etcd, unless data may be encrypted with a lost one.
func (r *authorities) ensureEncryptionKey(ctx context.Context, s *scope) (problem string, err error) {
	key := client.ObjectKey{Namespace: s.Cluster.Namespace, Name: bootstrap.EncryptionSecretName(s.Cluster.Name)}
	existing, err := r.getSecret(ctx, key)
	switch {
	case err != nil:
		return "", err
	case existing != nil && len(existing.Data[secret.KubeconfigDataName]) != render.EncryptionKeySize:
		return fmt.Sprintf("the Secret %s is broken: its key `value` needs %d bytes", key.Name, render.EncryptionKeySize), nil
	case existing != nil:
		return "", r.ownSecret(ctx, s, existing)
	case s.MustBeGiven(model.EncryptionPurpose):
		return model.NotGiven(key.Name), nil
	}
	if s.Initialized() {
		if used, err := r.mayBeEncrypted(ctx, s); err != nil {
			return "", err
		} else if used {
			return fmt.Sprintf("the Secret %s was deleted, but the data in etcd is encrypted with its key: restore it from a backup", key.Name), nil
		}
		if !staysAlone(s.Object, s.Object) {
			return fmt.Sprintf("the Secret %s does not exist, and API servers with the former encryption setting cannot read data that the new setting encrypts: %s", key.Name, model.TwoStepsOrAlone), nil
		}
	}
	value := make([]byte, render.EncryptionKeySize)
	if _, err := rand.Read(value); err != nil {
		return "", err
	}
	return "", r.Client.Create(ctx, ownedSecret(s, key.Name, value))
}

// mayBeEncrypted reports whether a machine may have written encrypted data. Only a cluster whose machines all have the mode None
// has none: its encryption begins now. A Machine without its CapstanConfig may have encrypted, and a cluster without Machines too,
// because the data of an external etcd stays. It reads live, because a new key makes the data of a former one unreadable.
func (r *authorities) mayBeEncrypted(ctx context.Context, s *scope) (bool, error) {
	for _, machine := range s.Machines {
		config := &bootstrapv1.CapstanConfig{}
		key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
		if err := r.LiveClient.Get(ctx, key, config); err != nil {
			return true, client.IgnoreNotFound(err)
		}
		if config.Spec.Cluster.Encryption.Mode != bootstrapv1.EncryptionNone {
			return true, nil
		}
	}
	return len(s.Machines) == 0, nil
}

// ownedSecret returns a Secret of the cluster that the control plane owns.
func ownedSecret(s *scope, name string, value []byte) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       s.Cluster.Namespace,
			Name:            name,
			Labels:          map[string]string{clusterv1.ClusterNameLabel: s.Cluster.Name},
			OwnerReferences: []metav1.OwnerReference{controllerRef(s.Object)},
		},
		Type: clusterv1.ClusterSecretType,
		Data: map[string][]byte{secret.KubeconfigDataName: value},
	}
}

func controllerRef(controlPlane *controlplanev1.CapstanControlPlane) metav1.OwnerReference {
	return *metav1.NewControllerRef(controlPlane, controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind))
}
