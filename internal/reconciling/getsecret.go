package reconciling

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// GetSecret reads a Secret from the cache, and live when the cache does not contain it; nil when it does not exist. The cache contains only
// Secrets with the label of their cluster (see Options.SecretCachingClient), which Secrets of users can lack.
func GetSecret(ctx context.Context, cache, live client.Reader, key client.ObjectKey) (*corev1.Secret, error) {
	out := &corev1.Secret{}
	err := cache.Get(ctx, key, out)
	if apierrors.IsNotFound(err) {
		err = live.Get(ctx, key, out)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return out, err
}
