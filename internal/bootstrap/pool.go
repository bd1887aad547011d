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
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// The machines of a pool share one Secret of bootstrap data, and come and go for as long as the pool lives. So its
// data is not made once and for all: a change of the CapstanConfig, or of the version, makes a new
// Secret under a new name, and the new name is what has the pool replace its machines. A Secret gets another token
// every PoolTokenTTL/2, under the same name, so that a machine that is made late can join and a token is of no use
// for long.

// poolSecretName has a hash of what the data of a pool's machines is made from.
func poolSecretName(config *bootstrapv1.CapstanConfig, version string) string {
	// A spec is plain data: it can always be encoded.
	spec, _ := json.Marshal(config.Spec) //nolint:errchkjson // as said
	sum := sha256.Sum256(append(spec, version...))
	return config.Name + "-" + hex.EncodeToString(sum[:poolHashLength/2])
}

// formerData is the data that a pool uses while new data cannot be made, nil if there is none: its
// token must live on, whatever is wrong with the new spec.
func (r *Reconciler) formerData(ctx context.Context, s *scope) ([]byte, error) {
	name := s.config.Status.DataSecretName
	if s.owner.pool == nil || name == "" || name == dataSecretName(s) {
		return nil, nil
	}
	former := &corev1.Secret{}
	if err := r.SecretClient.Get(ctx, client.ObjectKey{Namespace: s.config.Namespace, Name: name}, former); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return former.Data[secret.KubeconfigDataName], nil
}

// poolData is true for a Secret with data of a pool's machines, also if it has lost its owner reference or has an outdated one
// (ALL-11): the tokens that only such data has mark it then, together with its name.
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

// dropFormerData deletes the Secrets that a pool used before, as soon as its MachinePool names the new one. Their
// tokens are not renewed any more and expire.
func (r *Reconciler) dropFormerData(ctx context.Context, s *scope) error {
	current := s.config.Status.DataSecretName
	if s.owner.pool == nil || current != dataSecretName(s) || ptr.Deref(s.owner.pool.Spec.Template.Spec.Bootstrap.DataSecretName, "") != current {
		return nil
	}
	secrets := &corev1.SecretList{}
	if err := r.SecretClient.List(ctx, secrets, client.InNamespace(s.config.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}); err != nil {
		return err
	}
	for i := range secrets.Items {
		former := &secrets.Items[i]
		if former.Name == current || !poolData(former, s.config) {
			continue
		}
		if err := r.Client.Delete(ctx, former, client.Preconditions{UID: &former.UID}); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
