package bootstrap

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// The machines of a pool share one Secret of bootstrap data for as long as the pool exists. A change of the
// CapstanConfig or of the version creates a new Secret under a new name. The new name makes the pool replace its
// machines. Every PoolTokenTTL/2 the Secret gets another token under the same name, so that new machines can join and a
// leaked token is soon useless.

// poolSecretName returns the name of a pool's Secret. It contains a hash of everything that the data is rendered from.
func poolSecretName(config *bootstrapv1.CapstanConfig, version string) string {
	// Encoding cannot fail, because a spec is plain data.
	spec, _ := json.Marshal(config.Spec) //nolint:errchkjson // as said
	sum := sha256.Sum256(append(spec, version...))
	return config.Name + "-" + hex.EncodeToString(sum[:poolHashLength/2])
}

// formerData returns the data that a pool uses as long as new data cannot be created, or nil. Its token must be renewed, and its
// certificate authorities replaced, even if the new spec is invalid.
func (r *Reconciler) formerData(ctx context.Context, s *scope) ([]byte, error) {
	name := s.config.Status.DataSecretName
	if s.owner.pool == nil || name == "" || name == dataSecretName(s) {
		return nil, nil
	}
	former := &corev1.Secret{}
	if err := r.SecretCachingClient.Get(ctx, client.ObjectKey{Namespace: s.config.Namespace, Name: name}, former); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return r.refreshAuthorities(ctx, s, former)
}

// poolData reports whether a Secret contains the data of a pool's machines, even if it lost its owner reference or has
// an outdated one (ALL-11). The name and the kind of token, which only pools have, identify it.
func poolData(s *corev1.Secret, config *bootstrapv1.CapstanConfig) bool {
	if metav1.GetControllerOfNoCopy(s) != nil {
		return isController(s, config)
	}
	name, hash, _ := strings.Cut(s.Name, config.Name+"-")
	_, marked := s.Annotations[bootstrapv1.TokenIDsAnnotation]
	return marked && s.Type == clusterv1.ClusterSecretType && name == "" && len(hash) == poolHashLength
}

// poolHashLength is the number of characters behind the dash in the name of a pool's Secret.
const poolHashLength = 8

// dropFormerData deletes the Secrets that a pool used before, as soon as its MachinePool references the new one.
// Nothing renews the tokens of the deleted Secrets, so they expire.
func (r *Reconciler) dropFormerData(ctx context.Context, s *scope) error {
	current := s.config.Status.DataSecretName
	if s.owner.pool == nil || current != dataSecretName(s) || ptr.Deref(s.owner.pool.Spec.Template.Spec.Bootstrap.DataSecretName, "") != current {
		return nil
	}
	secrets := &corev1.SecretList{}
	if err := r.SecretCachingClient.List(ctx, secrets, reconciling.OfCluster(client.ObjectKeyFromObject(s.cluster)), client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range secrets.Items {
		former := &secrets.Items[i]
		if former.Name == current || isUpdateData(former) || !poolData(former, s.config) {
			continue
		}
		if err := r.Client.Delete(ctx, former, client.Preconditions{UID: &former.UID}); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
