package bootstrap

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// CrossCADataName is the key, in the secret <cluster>-ca, of the certificate authority that signs, signed by the
// one before it (docs/certificates.md).
const CrossCADataName = "cross.crt"

const caPath = nodeconfig.PKIDir + "/ca.crt"

// crossCertificate is the file of the authority signed by the one before; nil before the first rotation.
func (r *Reconciler) crossCertificate(ctx context.Context, s *scope) ([]render.File, error) {
	ca := &corev1.Secret{}
	key := client.ObjectKey{Namespace: s.cluster.Namespace, Name: secret.Name(s.cluster.Name, secret.ClusterCA)}
	if err := r.SecretClient.Get(ctx, key, ca); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	cross := ca.Data[CrossCADataName]
	if len(cross) == 0 {
		return nil, nil
	}
	return []render.File{{Path: nodeconfig.CrossCAPath, Permissions: "0644", Content: cross}}, nil
}

// namedAuthorities names the certificate authorities of the cluster that are in bootstrap data.
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

// refreshAuthorities gives the data of a pool other certificate authorities when they are rotated: its machines come
// and go, and one that is made late has to trust those of its time. The name and the token stay, so
// that the pool replaces nothing.
func (r *Reconciler) refreshAuthorities(ctx context.Context, s *scope, existing *corev1.Secret) ([]byte, error) {
	data := existing.Data[secret.KubeconfigDataName]
	if s.owner.pool == nil {
		return data, nil
	}
	in, err := r.input(ctx, s)
	if _, waits := asNotYet(err); waits {
		return data, nil
	}
	have, want := existing.Annotations[bootstrapv1.AuthoritiesAnnotation], namedAuthorities(in.Certificates)
	// Data of a former version of Capstan does not say what is in it. Each rotation begins with two authorities.
	if err != nil || have == want || have == "" && !strings.Contains(want, ",") {
		return data, err
	}
	if in.Token, err = render.Token(data); err != nil {
		return data, err
	}
	fresh, err := render.CloudConfig(in)
	if err != nil {
		return data, nil // What is there still works.
	}
	before := existing.DeepCopy()
	existing.Data[secret.KubeconfigDataName] = fresh
	metav1.SetMetaDataAnnotation(&existing.ObjectMeta, bootstrapv1.AuthoritiesAnnotation, want)
	return fresh, r.Client.Patch(ctx, existing, client.MergeFrom(before))
}
