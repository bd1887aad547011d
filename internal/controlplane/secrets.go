package controlplane

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// secrets reads the Secrets of a cluster, and makes control planes their owners.
type secrets struct{ *clients }

// getSecret reads a Secret; nil when it does not exist.
func (r *secrets) getSecret(ctx context.Context, key client.ObjectKey) (*corev1.Secret, error) {
	return reconciling.GetSecret(ctx, r.SecretClient, r.Client, key)
}

// ownSecret makes the control plane the controller of a Secret of its cluster, so that it is moved and deleted with it, and writes the
// label without which Cluster API does not read it (CP-13, CP-15). As with KubeadmControlPlane, the type determines the owner: Cluster API
// uses its own type, and Secrets of users have another one. A Secret with another controller does not change. With the admission plugin
// OwnerReferencesPermissionEnforcement, as on OpenShift, the right to delete all Secrets would be necessary. The provider does not have it:
// there, a Secret of a user gets only the label, works without our owner reference, and remains after the deletion of the cluster.
func (r *secrets) ownSecret(ctx context.Context, s *scope, existing *corev1.Secret) error {
	if existing.Type != clusterv1.ClusterSecretType || metav1.GetControllerOfNoCopy(existing) != nil && !model.IsController(s.Object, existing) {
		return nil
	}
	ref := controllerRef(s.Object)
	if util.HasExactOwnerRef(existing.OwnerReferences, ref) && isLabelled(s, existing) {
		return nil
	}
	before := existing.DeepCopy()
	label := func() { metav1.SetMetaDataLabel(&existing.ObjectMeta, clusterv1.ClusterNameLabel, s.Cluster.Name) }
	err := reconciling.Change(ctx, r.Client, existing, func() {
		existing.OwnerReferences = util.EnsureOwnerRef(slices.Clone(existing.OwnerReferences), ref)
		label()
	})
	if apierrors.IsForbidden(err) && !isLabelled(s, before) {
		before.DeepCopyInto(existing)
		err = reconciling.Change(ctx, r.Client, existing, label)
	}
	if err != nil && !apierrors.IsForbidden(err) {
		return fmt.Errorf("cannot adopt the Secret %s: %w", existing.Name, err)
	}
	return nil
}

// isLabelled reports whether Cluster API finds the Secret of a cluster: its caches contain only Secrets with the label.
func isLabelled(s *scope, existing *corev1.Secret) bool {
	return existing.Labels[clusterv1.ClusterNameLabel] == s.Cluster.Name
}

// ownSecrets owns all existing Secrets before the control plane is deleted.
func (r *secrets) ownSecrets(ctx context.Context, s *scope) error {
	names := []string{bootstrap.EncryptionSecretName(s.Cluster.Name), secret.Name(s.Cluster.Name, secret.Kubeconfig)}
	for _, c := range bootstrap.Certificates(s.Object.Spec.Config.Cluster) {
		if !c.External {
			names = append(names, secret.Name(s.Cluster.Name, c.Purpose))
		}
	}
	for _, name := range names {
		existing, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name})
		if err != nil {
			return err
		}
		if existing == nil {
			continue
		}
		if err := r.ownSecret(ctx, s, existing); err != nil {
			return err
		}
	}
	return nil
}

// readCertificates reads live the Secrets whose content only new Machines get: the cluster's certificate authority, and the certificates
// of an external etcd. A missing one makes no Machine outdated.
func (r *secrets) readCertificates(ctx context.Context, s *scope) error {
	stored := &corev1.Secret{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: caName(s)}, stored); err != nil {
		return client.IgnoreNotFound(err)
	}
	s.Authority = stored
	for _, c := range s.certificates {
		if !c.External {
			continue
		}
		c.KeyPair = nil
		given := &corev1.Secret{}
		err := r.Client.Get(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: secret.Name(s.Cluster.Name, c.Purpose)}, given)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		c.KeyPair = &certs.KeyPair{Cert: given.Data[secret.TLSCrtDataName], Key: given.Data[secret.TLSKeyDataName]}
	}
	return nil
}

// etcdCertificates returns the fingerprints of the certificates of an external etcd; "" without them.
func (s *scope) etcdCertificates() string {
	authority, leaf := s.certificates.GetByPurpose(secret.EtcdCA), s.certificates.GetByPurpose(secret.APIServerEtcdClient)
	if authority == nil || leaf == nil || authority.KeyPair == nil || leaf.KeyPair == nil {
		return ""
	}
	return bootstrap.EtcdFingerprints(authority.KeyPair.Cert, leaf.KeyPair.Cert)
}

// etcdClientIsNewer reports whether the client certificate for an external etcd is newer than a Machine, which therefore has another one.
func (s *scope) etcdClientIsNewer(machine *clusterv1.Machine) bool {
	leaf := s.certificates.GetByPurpose(secret.APIServerEtcdClient)
	if leaf == nil || leaf.KeyPair == nil {
		return false
	}
	cert, err := certs.DecodeCertPEM(leaf.KeyPair.Cert)
	return err == nil && cert != nil && cert.NotBefore.After(machine.CreationTimestamp.Time)
}

// madeData is the bootstrap data of a Machine.
type madeData struct {
	// made: the Machine names its Secret. lost: the Secret does not exist any more; it is not created again after the Machine has started.
	made, lost bool
	// annotations record the certificates of the Machine.
	annotations map[string]string
}

// dataOf returns the bootstrap data of a Machine.
func (r *secrets) dataOf(ctx context.Context, machine *clusterv1.Machine) (madeData, error) {
	name := ptr.Deref(machine.Spec.Bootstrap.DataSecretName, "")
	if name == "" {
		return madeData{}, nil
	}
	data, err := r.getSecret(ctx, client.ObjectKey{Namespace: machine.Namespace, Name: name})
	if err != nil || data == nil {
		return madeData{made: true, lost: true}, err
	}
	return madeData{made: true, annotations: data.Annotations}, nil
}
