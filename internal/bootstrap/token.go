package bootstrap

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"
	"k8s.io/klog/v2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// TokenTTL is the validity of the bootstrap token of a Machine, after its creation and after each renewal.
const TokenTTL = 15 * time.Minute

// tokenTTL returns the validity of the tokens of an owner.
func (o *owner) tokenTTL() time.Duration {
	if o.pool != nil {
		return bootstrapv1.PoolTokenTTL
	}
	return TokenTTL
}

// newToken returns a new bootstrap token, id.secret.
func newToken() (string, error) { return tokenutil.GenerateBootstrapToken() }

// tokenSecret returns the Secret of the token in the workload cluster.
func tokenSecret(token string, owner client.Object, expires time.Time) (*corev1.Secret, error) {
	id, secret, ok := strings.Cut(token, ".")
	if !ok {
		return nil, fmt.Errorf("the bootstrap data contains no valid bootstrap token")
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: bootstrapapi.BootstrapTokenSecretPrefix + id},
		Type:       bootstrapapi.SecretTypeBootstrapToken,
		Data: map[string][]byte{
			bootstrapapi.BootstrapTokenIDKey:               []byte(id),
			bootstrapapi.BootstrapTokenSecretKey:           []byte(secret),
			bootstrapapi.BootstrapTokenExpirationKey:       []byte(expires.UTC().Format(time.RFC3339)),
			bootstrapapi.BootstrapTokenUsageAuthentication: []byte("true"),
			bootstrapapi.BootstrapTokenDescriptionKey:      []byte(fmt.Sprintf("Cluster API bootstrap of %s/%s", owner.GetNamespace(), owner.GetName())),
		},
	}, nil
}

// remaining returns how long a token in the workload cluster stays valid. It is negative if the expiration cannot be
// parsed.
func remaining(existing *corev1.Secret, now time.Time) time.Duration {
	expires, err := time.Parse(time.RFC3339, string(existing.Data[bootstrapapi.BootstrapTokenExpirationKey]))
	if err != nil {
		return -1
	}
	return expires.Sub(now)
}

// tokenStep is the next action for a token.
type tokenStep int

const (
	keepToken tokenStep = iota
	writeToken
	rotateToken
)

// nextTokenStep decides on a token that is still needed, and on the time of the next check. A missing token is written,
// because a machine may have it already. At half of its life a Machine's token is renewed, and a pool's token is
// replaced.
func nextTokenStep(existing *corev1.Secret, pool bool, ttl time.Duration, now time.Time) (step tokenStep, again time.Duration) {
	if existing == nil {
		return writeToken, ttl / 2
	}
	left := remaining(existing, now)
	switch {
	case left > ttl/2:
		return keepToken, left - ttl/2
	case pool && left > 0:
		return rotateToken, 0
	}
	return writeToken, ttl / 2
}

// readToken reads a token in the workload cluster. It is nil if the token does not exist.
func readToken(ctx context.Context, workload client.Client, token string, owner client.Object) (*corev1.Secret, error) {
	found, err := tokenSecret(token, owner, time.Time{})
	if err != nil {
		return nil, err
	}
	err = workload.Get(ctx, client.ObjectKeyFromObject(found), found)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the bootstrap token in the workload cluster: %w", err)
	}
	return found, nil
}

// kubeadmGroup is the group to which control planes of kubeadm give the rights of joining nodes. Capstan's control planes give them to
// all bootstrap tokens.
const kubeadmGroup = "system:bootstrappers:kubeadm:default-node-token"

// putToken writes the token with its expiration to the workload cluster.
func putToken(ctx context.Context, s *scope, workload client.Client, token string, existing *corev1.Secret, expires time.Time) error {
	desired, err := tokenSecret(token, s.config, expires)
	if err != nil {
		return err
	}
	if !isCapstanControlPlane(s.cluster) {
		desired.Data[bootstrapapi.BootstrapTokenExtraGroupsKey] = []byte(kubeadmGroup)
	}
	if existing == nil {
		err = workload.Create(ctx, desired)
	} else {
		before := existing.DeepCopy()
		existing.Data = desired.Data
		err = workload.Patch(ctx, existing, client.MergeFrom(before))
	}
	if err != nil {
		return fmt.Errorf("cannot write the bootstrap token to the workload cluster: %w", err)
	}
	ctrl.LoggerFrom(ctx).Info("Wrote the bootstrap token to the workload cluster", "tokenID", tokenID(token), "expires", expires)
	return nil
}

// rotate writes another token into the bootstrap data of a pool. The name of the data stays, so the pool replaces no
// machine. The previous token is no longer renewed. The data records its id until it expires, because machines that
// have it may still join.
func (r *Reconciler) rotate(ctx context.Context, s *scope, former string) error {
	stored := &corev1.Secret{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: s.config.Namespace, Name: s.config.Status.DataSecretName}, stored); err != nil {
		return err
	}
	token, err := newToken()
	if err != nil {
		return err
	}
	data := stored.Data[secret.KubeconfigDataName]
	if bytes.Count(data, []byte(former)) != 1 {
		return nil // Another writer rotated it. That change is an event.
	}
	before := stored.DeepCopy()
	stored.Data[secret.KubeconfigDataName] = bytes.Replace(data, []byte(former), []byte(token), 1)
	metav1.SetMetaDataAnnotation(&stored.ObjectMeta, bootstrapv1.TokenIDsAnnotation, tokenID(token)+","+tokenID(former))
	if err := r.Client.Patch(ctx, stored, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("cannot write another bootstrap token into the bootstrap data: %w", err)
	}
	ctrl.LoggerFrom(ctx).Info("Rotated the bootstrap token", "Secret", klog.KObj(stored), "tokenID", tokenID(token), "formerTokenID", tokenID(former))
	return nil
}

// tokenID returns the public part of a token.
func tokenID(token string) string {
	id, _, _ := strings.Cut(token, ".")
	return id
}

// hasNoToken reports whether the data of a config has no token: only workers have one. A config whose role was changed keeps the condition of
// its token, and existing data does not follow the change.
func hasNoToken(config *bootstrapv1.CapstanConfig) bool {
	return config.Spec.Role.IsControlPlane() && !conditions.Has(config, bootstrapv1.BootstrapTokenAvailableCondition)
}

// tokenRemoved reports whether the token is no longer needed and was removed.
func tokenRemoved(config *bootstrapv1.CapstanConfig) bool {
	return conditions.GetReason(config, bootstrapv1.BootstrapTokenAvailableCondition) == bootstrapv1.BootstrapTokenRemovedReason
}

func setTokenRemoved(config *bootstrapv1.CapstanConfig) {
	reconciling.SetCondition(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, bootstrapv1.BootstrapTokenRemovedReason, "")
}

// removeToken removes the token from the workload cluster.
func removeToken(ctx context.Context, workload client.Client, token string, owner client.Object) error {
	secret, err := tokenSecret(token, owner, time.Time{})
	if err != nil {
		return err
	}
	if err := workload.Delete(ctx, secret); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("cannot remove the bootstrap token from the workload cluster: %w", err)
	}
	ctrl.LoggerFrom(ctx).Info("Removed the bootstrap token from the workload cluster", "tokenID", tokenID(token))
	return nil
}
