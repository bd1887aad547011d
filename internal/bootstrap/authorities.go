package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// CrossCADataName is the key of the cross-signed authority in the secret <cluster>-ca: the certificate of the signing
// authority, signed by the previous authority (docs/certificates.md).
const CrossCADataName = "cross.crt"

const (
	caPath         = nodeconfig.PKIDir + "/ca.crt"
	etcdCAPath     = nodeconfig.PKIDir + "/etcd/ca.crt"
	etcdClientPath = nodeconfig.PKIDir + "/apiserver-etcd-client.crt"
)

// crossCertificate returns the file of the cross-signed authority. It is nil before the first rotation.
func (r *Reconciler) crossCertificate(ctx context.Context, s *scope) ([]render.File, error) {
	ca := &corev1.Secret{}
	key := client.ObjectKey{Namespace: s.cluster.Namespace, Name: secret.Name(s.cluster.Name, secret.ClusterCA)}
	if err := r.SecretCachingClient.Get(ctx, key, ca); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	cross := ca.Data[CrossCADataName]
	if len(cross) == 0 {
		return nil, nil
	}
	return []render.File{{Path: nodeconfig.CrossCAPath, Permissions: "0644", Content: cross}}, nil
}

// namedAuthorities returns the names of the cluster's certificate authorities that bootstrap data contains.
func namedAuthorities(certificates []render.File) string {
	for _, f := range certificates {
		if f.Path != caPath {
			continue
		}
		if found, err := nodeconfig.Fingerprints(f.Content); err == nil {
			return strings.Join(found, ",")
		}
	}
	return ""
}

// EtcdFingerprints returns the names of the certificates with which API servers reach an external etcd.
func EtcdFingerprints(authorities, client []byte) string {
	found, err := nodeconfig.Fingerprints(slices.Concat(authorities, []byte("\n"), client))
	if err != nil {
		return ""
	}
	return strings.Join(found, ",")
}

// namedEtcdCertificates returns the names of the certificates of an external etcd that bootstrap data contains; "" without them.
func namedEtcdCertificates(cluster bootstrapv1.ClusterConfiguration, certificates []render.File) string {
	files := map[string][]byte{}
	for _, f := range certificates {
		files[f.Path] = f.Content
	}
	if len(cluster.Etcd.External.Endpoints) == 0 || len(files[etcdClientPath]) == 0 {
		return ""
	}
	return EtcdFingerprints(files[etcdCAPath], files[etcdClientPath])
}

// refreshAuthorities replaces the certificate authorities in the data of a pool during a rotation. A pool creates
// machines at any time, and a new machine must trust the current authorities. All the rest of the data stays: the pool replaces no
// machine, and no other input can prevent the change. With an error, the data has the former authorities.
func (r *Reconciler) refreshAuthorities(ctx context.Context, s *scope, existing *corev1.Secret) ([]byte, error) {
	data := existing.Data[secret.KubeconfigDataName]
	if s.owner.pool == nil {
		return data, nil
	}
	fresh, err := r.withCurrentAuthorities(ctx, s, existing)
	if err != nil {
		return data, fmt.Errorf("the certificate authorities in the Secret %s cannot be replaced: %w", existing.Name, err)
	}
	return fresh, nil
}

func (r *Reconciler) withCurrentAuthorities(ctx context.Context, s *scope, existing *corev1.Secret) ([]byte, error) {
	data := existing.Data[secret.KubeconfigDataName]
	certificates, err := r.certificates(ctx, s, nodeconfig.RoleWorker)
	have, want := existing.Annotations[bootstrapv1.AuthoritiesAnnotation], namedAuthorities(certificates)
	// Data of older versions of Capstan does not record its authorities. Each rotation starts with two authorities.
	if err != nil || have == want || have == "" && !strings.Contains(want, ",") {
		return data, err
	}
	fresh, err := render.WithCertificates(data, certificates)
	if err != nil {
		return nil, err
	}
	err = reconciling.Change(ctx, r.Client, existing, func() {
		existing.Data[secret.KubeconfigDataName] = fresh
		metav1.SetMetaDataAnnotation(&existing.ObjectMeta, bootstrapv1.AuthoritiesAnnotation, want)
	})
	if apierrors.IsConflict(err) {
		return data, nil // The Secret may have another token than the cache, whose event follows.
	}
	return fresh, err
}
