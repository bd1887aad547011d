package bootstrap

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// TokenTTL is how long a bootstrap token is valid unless it is renewed.
	TokenTTL = 15 * time.Minute
	// tokenRenewBefore is how long before its end a token that is still needed is renewed.
	tokenRenewBefore = TokenTTL / 2
)

// newToken is a new bootstrap token, id.secret.
func newToken() (string, error) { return tokenutil.GenerateBootstrapToken() }

// tokenSecret is the token as the workload cluster keeps it.
func tokenSecret(token string, owner client.Object, expires time.Time) (*corev1.Secret, error) {
	id, secret, ok := strings.Cut(token, ".")
	if !ok {
		return nil, fmt.Errorf("the bootstrap data holds no well formed bootstrap token")
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

// renewal says whether a token must be written at the time now, and when to look again.
func renewal(existing *corev1.Secret, now time.Time) (write bool, again time.Duration) {
	fresh := TokenTTL - tokenRenewBefore
	if existing == nil {
		return true, fresh
	}
	expires, err := time.Parse(time.RFC3339, string(existing.Data[bootstrapapi.BootstrapTokenExpirationKey]))
	if err != nil || expires.Sub(now) <= tokenRenewBefore {
		return true, fresh
	}
	return false, expires.Sub(now) - tokenRenewBefore
}

// ensureToken makes the token work in the workload cluster for as long as it is needed. It returns
// after how long the token has to be renewed.
func ensureToken(ctx context.Context, workload client.Client, token string, owner client.Object, now time.Time) (time.Duration, error) {
	desired, err := tokenSecret(token, owner, now.Add(TokenTTL))
	if err != nil {
		return 0, err
	}
	existing := &corev1.Secret{}
	err = workload.Get(ctx, client.ObjectKeyFromObject(desired), existing)
	if apierrors.IsNotFound(err) {
		existing = nil
	} else if err != nil {
		return 0, fmt.Errorf("cannot read the bootstrap token in the workload cluster: %w", err)
	}
	write, again := renewal(existing, now)
	if !write {
		return again, nil
	}
	if existing == nil {
		err = workload.Create(ctx, desired)
	} else {
		before := existing.DeepCopy()
		existing.Data = desired.Data
		err = workload.Patch(ctx, existing, client.MergeFrom(before))
	}
	if err != nil {
		return 0, fmt.Errorf("cannot write the bootstrap token to the workload cluster: %w", err)
	}
	return again, nil
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
	return nil
}
